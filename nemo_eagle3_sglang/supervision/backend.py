"""The supervision of a micro-batch from any :class:`~nemo_eagle3_sglang.contracts.TargetRunner`."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import torch

from nemo_eagle3_sglang.contracts import NUM_AUX_LAYERS, HiddenStates, TargetBatch, TargetRunner
from nemo_eagle3_sglang.supervision.align import Sequences, pad, shift_left, unpad
from nemo_eagle3_sglang.supervision.aux_layers import resolve_aux_layer_ids
from nemo_eagle3_sglang.supervision.head import draft_distribution


class RunnerBackend:
    """Target backend in the sense of AutoModel's ``Eagle3TargetBackend``, over a runner of any engine.

    Duck-typed, so that only the recipe imports AutoModel, and neither a module nor stateful, so that
    ``BaseRecipe.__setattr__`` does not track it.

    Attributes:
        aux_layer_ids: The ids captured, in the order of the columns of ``aux_hidden_states``.
        supports_async: Whether ``generate_batch_async`` exists; never here.
    """

    supports_async = False

    def __init__(self, runner: TargetRunner, aux_layer_ids: Sequence[int] | None = None) -> None:
        self.runner = runner
        self.aux_layer_ids = resolve_aux_layer_ids(aux_layer_ids, runner.info.num_hidden_layers)
        runner.set_aux_layers(self.aux_layer_ids)
        self._selected_token_ids: torch.Tensor | None = None
        self._selected_token_mask: torch.Tensor | None = None

    def set_vocab_mapping(self, selected_token_ids: torch.Tensor, selected_token_mask: torch.Tensor) -> None:
        """Set the draft vocabulary: target id of each draft id ``[D]``, and membership ``[V]`` bool."""
        vocab = self.runner.info.vocab_size
        if selected_token_mask.shape != (vocab,):
            raise ValueError(
                f"vocabulary mapping for {selected_token_mask.shape[0]} tokens; the target's head has {vocab}"
            )
        self._selected_token_ids = selected_token_ids.to(self.runner.device)
        self._selected_token_mask = selected_token_mask.to(self.runner.device)

    def get_input_embeddings(self) -> SimpleNamespace:
        """Return an object whose ``weight`` ``[V, H]`` is the target's input embedding."""
        return SimpleNamespace(weight=self.runner.input_embeddings())

    @torch.no_grad()
    def generate_batch(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, loss_mask: torch.Tensor
    ) -> TargetBatch:
        """Run the target on padded rows and return their supervision.

        Args:
            input_ids: ``[B, S]`` int64, padded left or right.
            attention_mask: ``[B, S]``, non-zero at real tokens.
            loss_mask: ``[B, S]``, non-zero at the tokens to be learnt (unshifted).

        Raises:
            RuntimeError: ``set_vocab_mapping`` was never called.
        """
        if self._selected_token_ids is None or self._selected_token_mask is None:
            raise RuntimeError("set_vocab_mapping must be called before generate_batch")
        device, (rows, length) = self.runner.device, input_ids.shape
        input_ids, attention_mask, loss_mask = (x.to(device) for x in (input_ids, attention_mask, loss_mask))
        if loss_mask.shape != input_ids.shape:
            raise ValueError(f"loss_mask {tuple(loss_mask.shape)} must be as input_ids, {tuple(input_ids.shape)}")
        sequences = unpad(input_ids, attention_mask)
        states = self._forward(sequences)
        # The distribution at token u supervises slot u - 1 (shift to next-token positions); slot -1 does not exist.
        learnt = loss_mask.reshape(-1).index_select(0, sequences.slots).bool() & (sequences.slots % length != 0)
        supervised = learnt.nonzero().squeeze(-1)
        probs, in_draft_vocab = draft_distribution(
            self.runner.head(),
            states.last.index_select(0, supervised),
            self._selected_token_ids,
            self._selected_token_mask,
        )
        target_slots = sequences.slots.index_select(0, supervised) - 1
        return TargetBatch(
            aux_hidden_states=pad(states.aux, sequences.slots, rows, length),
            input_ids=shift_left(input_ids),
            attention_mask=attention_mask,
            loss_mask=shift_left(loss_mask),
            target_probs=pad(probs, target_slots, rows, length),
            position_mask=pad(in_draft_vocab.unsqueeze(-1), target_slots, rows, length),
        )

    def _forward(self, sequences: Sequences) -> HiddenStates:
        """Run the engine; a micro-batch of empty rows only has no forward."""
        if sequences.lengths:
            return self.runner.forward(sequences.tokens, sequences.lengths)
        hidden = self.runner.info.hidden_size
        empty = torch.empty((0, hidden), dtype=self.runner.dtype, device=self.runner.device)
        return HiddenStates(aux=empty.new_empty((0, NUM_AUX_LAYERS * hidden)), last=empty)

    def close(self) -> None:
        """Free the target."""
        self.runner.close()
