"""A ``ForwardBatch`` for bare sequences; KV slots are taken for one forward and always given back.

Built straight from the pools: neither ``Req`` nor ``ScheduleBatch`` is needed (they change in most releases), and no
scheduler runs beside it, so the rows and slots of the pools are this module's alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from nemo_eagle3_sglang.engine import versions

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


@dataclass(frozen=True)
class Capacity:
    """What one forward can take.

    Attributes:
        tokens: KV slots, in tokens.
        rows: Sequences.
        sequence: Tokens of one sequence.
        page: Tokens of a KV page; a sequence takes whole pages.
    """

    tokens: int
    rows: int
    sequence: int
    page: int

    def slots(self, length: int) -> int:
        """Return the KV slots that a sequence of ``length`` tokens takes: whole pages."""
        return -(-length // self.page) * self.page


def capacity(model_runner: ModelRunner) -> Capacity:
    """Read the capacity off freshly allocated pools."""
    allocator, table = model_runner.token_to_kv_pool_allocator, model_runner.req_to_token_pool.req_to_token
    page = int(allocator.page_size)
    tokens = int(allocator.available_size()) // page * page
    # Row 0 of the table is the padding row of CUDA graphs.
    return Capacity(tokens=tokens, rows=table.shape[0] - 1, sequence=min(table.shape[1], tokens), page=page)


def plan(lengths: Sequence[int], limits: Capacity, max_tokens: int) -> list[range]:
    """Group consecutive sequences into forwards of at most ``max_tokens`` slots (a longer sequence goes alone).

    Args:
        lengths: Tokens of each sequence.
        limits: What the pools can take; no sequence may exceed ``limits.sequence``.
        max_tokens: Bound on a forward's tokens, for its activations.

    Returns:
        Ranges of indices into ``lengths``, in order, covering all of them.
    """
    budget = min(max_tokens, limits.tokens)
    groups: list[range] = []
    start = used = 0
    for i, length in enumerate(lengths):
        need = limits.slots(length)
        if i > start and (used + need > budget or i - start >= limits.rows):
            groups.append(range(start, i))
            start, used = i, 0
        used += need
    groups.append(range(start, len(lengths)))
    return groups


@contextlib.contextmanager
def forward_batch(model_runner: ModelRunner, tokens: torch.Tensor, lengths: list[int]) -> Iterator[ForwardBatch]:
    """Yield an EXTEND batch of whole sequences without prefix; its KV slots are freed on every way out.

    Args:
        model_runner: SGLang's runner, with pools.
        tokens: ``[T]`` int64 on the runner's device.
        lengths: Tokens of each sequence, summing to T.

    Raises:
        RuntimeError: The KV pool has too few free slots, which :func:`plan` rules out unless slots were lost.
    """
    allocator = model_runner.token_to_kv_pool_allocator
    page = int(allocator.page_size)
    paged = [-(-n // page) * page for n in lengths]
    slots = allocator.alloc(sum(paged))
    if slots is None:
        raise RuntimeError(f"the KV pool has {allocator.available_size()} free slots, {sum(paged)} are needed")
    try:
        yield versions.make_forward_batch(**_fields(model_runner, tokens, lengths, slots.split(paged)))
    finally:
        allocator.free(slots)


def _fields(
    model_runner: ModelRunner, tokens: torch.Tensor, lengths: list[int], slots: Sequence[torch.Tensor]
) -> dict[str, Any]:
    """Return the fields of a ``ForwardBatch``; rows 1.. of the request table point at the slots."""
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    device, count, total = tokens.device, len(lengths), sum(lengths)
    used = torch.cat([part[:n] for part, n in zip(slots, lengths, strict=True)])
    encoder = _encoder_fields(count, device) if model_runner.model_config.is_encoder_decoder else {}
    lens_cpu = torch.tensor(lengths, dtype=torch.int64)
    lens = lens_cpu.to(device, non_blocking=True)
    starts = lens.cumsum(0) - lens
    rows = torch.arange(1, count + 1, device=device)
    positions = torch.arange(total, device=device) - starts.repeat_interleave(lens, output_size=total)
    # One write for all sequences: a packed micro-batch has hundreds.
    table_rows = rows.repeat_interleave(lens, output_size=total)
    model_runner.req_to_token_pool.write((table_rows, positions), used.to(torch.int32))
    zeros = torch.zeros(count, dtype=torch.int32, device=device)
    return {
        "forward_mode": ForwardMode.EXTEND,
        "batch_size": count,
        "input_ids": tokens,
        "req_pool_indices": rows,
        "seq_lens": lens,
        "seq_lens_cpu": lens_cpu,
        "orig_seq_lens": lens.to(torch.int32),
        "seq_lens_sum": total,
        "out_cache_loc": used,
        "positions": positions,
        "mrope_positions": _mrope_positions(model_runner, positions),
        "extend_num_tokens": total,
        "extend_seq_lens": lens.to(torch.int32),
        "extend_seq_lens_cpu": lengths,
        "extend_prefix_lens": zeros,
        "extend_prefix_lens_cpu": [0] * count,
        "extend_start_loc": starts.to(torch.int32),
        "extend_logprob_start_lens_cpu": [0] * count,
        "capture_hidden_mode": CaptureHiddenMode.FULL,
        "num_token_non_padded_cpu": total,
        "spec_algorithm": SpeculativeAlgorithm.NONE,
        "lora_ids": [None] * count,
        "mm_inputs": [None] * count,
        "rids": [str(i) for i in range(count)],
        **encoder,
    }


def _encoder_fields(count: int, device: torch.device) -> dict[str, Any]:
    """Return the fields that say "nothing to encode", for a target with cross-attention (Mllama): text only here."""
    return {
        "encoder_lens": torch.zeros(count, dtype=torch.int64, device=device),
        "encoder_lens_cpu": [0] * count,
        "encoder_cached": [True] * count,
        "encoder_out_cache_loc": torch.empty(0, dtype=torch.int64, device=device),
    }


def _mrope_positions(model_runner: ModelRunner, positions: torch.Tensor) -> torch.Tensor | None:
    """Return ``[3, T]`` positions for a target with multimodal RoPE: text has the same one on all three axes."""
    return positions.expand(3, -1) if model_runner.model_config.model_is_mrope else None
