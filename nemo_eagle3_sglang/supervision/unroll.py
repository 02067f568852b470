"""Index tensors of the training-time-test unroll over bare documents.

Slot t of a document is a chain of drafts: at step k it reads token ``t + 1 + k`` and is taught the target's
distribution at that token (EAGLE-3's training-time test, arXiv:2503.01840, section 3; AutoModel's trainer reaches the
same by shifting padded rows left once a step). What a chain needs follows:

* keys and values of step 0 are read by every later slot of the document, so step 0's are made for all N slots;
* a key or value of a later step is read by its own chain alone, so queries, MLP and later steps are made only for the
  R slots whose chain is supervised at some step;
* logits are made only for the E pairs (step, slot) that are supervised.

The sets are exact: dropping the rest changes no loss and no gradient.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import torch

from nemo_eagle3_sglang.supervision.documents import Documents


@dataclass(frozen=True)
class Unroll:
    """Where the unroll of ``steps`` K reads and is taught; tensors are int64 on the device unless said.

    Shapes: N slots (T less one a document), R chains that are supervised, E supervised pairs of step and chain,
    M >= R query slots of the attention (each document's from its first chain to its end), G documents.

    Attributes:
        tokens: ``[T]`` token ids, the documents one after another.
        supervised: ``[P]`` indices into T.
        slots: ``[N]`` indices into T.
        next_ids: ``[N]`` the token that follows each slot, read at step 0.
        positions: ``[N]`` position of each slot in its document.
        chains: ``[R]`` indices into N.
        chain_positions: ``[R]`` position of each chain in its document.
        chain_ids: ``[K-1, R]`` the token read at each later step.
        chain_queries: ``[R]`` indices into M.
        pairs: ``[E]`` ``step * R + chain``, by step.
        pair_targets: ``[E]`` indices into P.
        cu_queries: ``[G+1]`` int32, bounds of the documents in M.
        cu_slots: ``[G+1]`` int32, bounds of the documents in N.
        lengths: Tokens of each document.
        query_lengths: Query slots of each document.
        pair_sizes: Pairs of each step.
        chain_counts: Chains that are supervised at every step up to k, for each k.
        total: Real tokens of the micro-batch, trimmed ones included.
    """

    tokens: torch.Tensor
    supervised: torch.Tensor
    slots: torch.Tensor
    next_ids: torch.Tensor
    positions: torch.Tensor
    chains: torch.Tensor
    chain_positions: torch.Tensor
    chain_ids: torch.Tensor
    chain_queries: torch.Tensor
    pairs: torch.Tensor
    pair_targets: torch.Tensor
    cu_queries: torch.Tensor
    cu_slots: torch.Tensor
    lengths: list[int]
    query_lengths: list[int]
    pair_sizes: list[int]
    chain_counts: list[int]
    total: int

    @property
    def steps(self) -> int:
        """K, the steps of the unroll."""
        return len(self.pair_sizes)

    @property
    def slot_lengths(self) -> list[int]:
        """Slots of each document."""
        return [n - 1 for n in self.lengths]

    @property
    def dense(self) -> bool:
        """Whether every query slot is a chain, M = R."""
        return sum(self.query_lengths) == self.chains.shape[0]


def unroll(docs: Documents, steps: int, device: torch.device) -> Unroll:
    """Lay out the unroll of ``steps`` steps and send it to ``device`` in one transfer.

    Args:
        docs: G documents, trimmed, possibly none.
        steps: K, at least 1.
        device: Where the tensors go; the copy does not make the host wait.
    """
    lengths = docs.lengths.astype(np.int64)
    ends = np.repeat(np.cumsum(lengths), lengths)
    is_last = np.arange(len(docs.tokens)) == ends - 1
    slots = np.flatnonzero(~is_last)
    end = ends[slots]
    learnt = np.zeros(len(docs.tokens) + 1, dtype=bool)
    learnt[docs.supervised] = True
    reads = slots + 1 + np.arange(steps)[:, None]
    inside = reads < end
    taught = inside & learnt[np.minimum(reads, len(docs.tokens))]
    chains = np.flatnonzero(taught.any(axis=0))
    taught = taught[:, chains]
    step, chain = np.nonzero(taught)
    targets = np.cumsum(learnt) - 1

    slot_lengths = lengths - 1
    slot_starts = np.cumsum(slot_lengths) - slot_lengths
    chain_document = np.searchsorted(slot_starts, chains, side="right") - 1
    first = chains[np.searchsorted(chain_document, np.arange(len(lengths)))] if len(lengths) else chains
    query_lengths = slot_starts + slot_lengths - first
    query_starts = np.cumsum(query_lengths) - query_lengths
    positions = np.arange(len(slots)) - np.repeat(slot_starts, slot_lengths)
    # Past a document's end any id will do: nothing is taught there.
    chain_reads = np.minimum(reads, end - 1)[1:, chains]
    tensors = {
        "tokens": docs.tokens,
        "supervised": docs.supervised,
        "slots": slots,
        "next_ids": docs.tokens[slots + 1],
        "positions": positions,
        "chains": chains,
        "chain_positions": positions[chains],
        "chain_ids": docs.tokens[chain_reads],
        "chain_queries": chains - first[chain_document] + query_starts[chain_document],
        "pairs": step * len(chains) + chain,
        "pair_targets": targets[reads[:, chains][step, chain]],
        "cu_queries": np.concatenate(([0], np.cumsum(query_lengths))),
        "cu_slots": np.concatenate(([0], np.cumsum(slot_lengths))),
    }
    on_device = _send(tensors, device)
    for name in ("cu_queries", "cu_slots"):
        on_device[name] = on_device[name].to(torch.int32)
    return Unroll(
        **on_device,
        lengths=lengths.tolist(),
        query_lengths=query_lengths.tolist(),
        pair_sizes=taught.sum(axis=1).tolist(),
        chain_counts=np.logical_and.accumulate(taught, axis=0).sum(axis=1).tolist(),
        total=docs.total,
    )


def _send(arrays: dict[str, np.ndarray], device: torch.device) -> dict[str, torch.Tensor]:
    """Send integer arrays to ``device`` in one copy out of pinned memory."""
    flat = torch.from_numpy(np.concatenate([a.reshape(-1) for a in arrays.values()]).astype(np.int64, copy=False))
    if device.type == "cuda":
        flat = flat.pin_memory()
    parts = flat.to(device, non_blocking=True).split([a.size for a in arrays.values()])
    return {name: part.view(a.shape) for (name, a), part in zip(arrays.items(), parts, strict=True)}


TENSORS = tuple(field.name for field in fields(Unroll) if field.type == "torch.Tensor")
