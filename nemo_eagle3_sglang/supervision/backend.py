"""The supervision of a micro-batch from any :class:`~nemo_eagle3_sglang.contracts.SupervisionSource`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace

import torch

from nemo_eagle3_sglang.contracts import (
    FlatBatch,
    Sequences,
    Supervision,
    SupervisionSource,
    TargetBatch,
    TargetRunner,
)
from nemo_eagle3_sglang.supervision.align import pad, shift_left
from nemo_eagle3_sglang.supervision.aux_layers import resolve_aux_layer_ids
from nemo_eagle3_sglang.supervision.documents import documents
from nemo_eagle3_sglang.supervision.head import distribution
from nemo_eagle3_sglang.supervision.source import RunnerSource
from nemo_eagle3_sglang.supervision.unroll import Unroll, unroll


class RunnerBackend:
    """Target backend in the sense of AutoModel's ``Eagle3TargetBackend``, over a source or over a bare runner.

    Duck-typed, so that only the recipe imports AutoModel, and neither a module nor stateful, so that
    ``BaseRecipe.__setattr__`` does not track it.

    Attributes:
        source: Where the supervision comes from.
        aux_layer_ids: The ids captured, in the order of the columns of ``aux_hidden_states``.
        supports_async: Whether ``generate_batch_async`` exists; never here.
    """

    supports_async = False

    def __init__(self, source: SupervisionSource | TargetRunner, aux_layer_ids: Sequence[int] | None = None) -> None:
        self.source = source if isinstance(source, SupervisionSource) else RunnerSource(source)
        self.aux_layer_ids = resolve_aux_layer_ids(aux_layer_ids, self.source.info.num_hidden_layers)
        self.source.set_aux_layers(self.aux_layer_ids)

    def set_vocab_mapping(self, selected_token_ids: torch.Tensor, selected_token_mask: torch.Tensor) -> None:
        """Set the draft vocabulary: target id of each draft id ``[D]``, and membership ``[V]`` bool."""
        self.source.set_vocab_mapping(selected_token_ids, selected_token_mask)

    def get_input_embeddings(self) -> SimpleNamespace:
        """Return an object whose ``weight`` ``[V, H]`` is the target's input embedding."""
        return SimpleNamespace(weight=self.source.input_embeddings())

    @property
    def works_ahead(self) -> bool:
        """Whether the source can run a micro-batch while the draft trains on the one before."""
        return hasattr(self.source, "submit")

    def submit(self, batch: Mapping[str, torch.Tensor], ttt_steps: int) -> Unroll:
        """Have the source begin with a micro-batch; :meth:`collect` returns it, in the order of the calls.

        Args:
            batch: See :meth:`flat_batch`.
            ttt_steps: Steps that the trainer unrolls.
        """
        plan, sequences = self._lay_out(batch, ttt_steps)
        self.source.submit(sequences)
        return plan

    def collect(self, plan: Unroll) -> FlatBatch:
        """Return the supervision of the micro-batch that ``plan`` was returned for."""
        return _flat(plan, self.source.collect())

    @torch.no_grad()
    def flat_batch(self, batch: Mapping[str, torch.Tensor], ttt_steps: int) -> FlatBatch:
        """Run the target on a micro-batch and return its supervision without padding.

        Nothing waits for the device when the masks are on the host.

        Args:
            batch: A batch of AutoModel's data loader, padded or packed: ``input_ids``, ``attention_mask`` and
                ``loss_mask`` ``[B, S]``; ``seq_lens`` ``[B, max_docs]`` where rows are packed.
            ttt_steps: Steps that the trainer unrolls.

        Raises:
            RuntimeError: ``set_vocab_mapping`` was never called.
        """
        plan, sequences = self._lay_out(batch, ttt_steps)
        return _flat(plan, self.source.supervise(sequences))

    def _lay_out(self, batch: Mapping[str, torch.Tensor], ttt_steps: int) -> tuple[Unroll, Sequences]:
        masks = (batch["attention_mask"], batch["loss_mask"], batch.get("seq_lens"))
        docs = documents(batch["input_ids"], *masks, trim=True)
        plan = unroll(docs, ttt_steps, self.source.device)
        return plan, Sequences(docs.tokens, plan.lengths, docs.supervised, plan.tokens, plan.supervised)

    @torch.no_grad()
    def generate_batch(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        loss_mask: torch.Tensor,
        *,
        position_ids: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        doc_remaining: torch.Tensor | None = None,
    ) -> TargetBatch:
        """Run the target on padded or packed rows and return their supervision, row by row.

        The contract of AutoModel's trainer, to the last real token; :meth:`flat_batch` is the lean form. Each document
        is a sequence of its own in the engine, so that packed rows need no mask there.

        Args:
            input_ids: ``[B, S]`` int64, padded left or right.
            attention_mask: ``[B, S]``, non-zero at real tokens.
            loss_mask: ``[B, S]``, non-zero at the tokens to be learnt (unshifted).
            position_ids: ``[B, S]``, AutoModel's packing; passed on to the trainer.
            seq_lens: ``[B, max_docs]``, AutoModel's packing: slots of each document.
            doc_remaining: ``[B, S]``, AutoModel's packing; passed on to the trainer.

        Raises:
            RuntimeError: ``set_vocab_mapping`` was never called.
        """
        device, (rows, length) = self.source.device, input_ids.shape
        docs = documents(input_ids, attention_mask, loss_mask, seq_lens, trim=False)
        slots = torch.from_numpy(docs.slots).to(device)
        supervised = torch.from_numpy(docs.supervised).to(device)
        found = self.source.supervise(Sequences(docs.tokens, docs.lengths.tolist(), docs.supervised))
        # The distribution at token u supervises slot u - 1 (shift to next-token positions).
        target_slots = slots.index_select(0, supervised) - 1
        return TargetBatch(
            aux_hidden_states=pad(found.aux, slots, rows, length),
            input_ids=shift_left(input_ids.to(device)),
            attention_mask=attention_mask.to(device),
            loss_mask=shift_left(loss_mask.to(device)),
            target_probs=pad(distribution(found.targets), target_slots, rows, length),
            position_mask=pad(found.targets.in_draft_vocab.unsqueeze(-1), target_slots, rows, length),
            position_ids=_on(device, position_ids),
            seq_lens=_on(device, seq_lens),
            doc_remaining=_on(device, doc_remaining),
        )

    def close(self) -> None:
        """Free the target."""
        self.source.close()


def _flat(plan: Unroll, found: Supervision) -> FlatBatch:
    targets = found.targets
    return FlatBatch(
        unroll=plan,
        aux=found.aux,
        draft_logits=targets.logits,
        draft_lse=targets.lse,
        draft_choices=targets.choices,
        in_draft_vocab=targets.in_draft_vocab,
    )


def _on(device: torch.device, tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.to(device)
