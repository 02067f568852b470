"""Supervision from a runner in this process."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nemo_eagle3_sglang.contracts import NUM_AUX_LAYERS, AuxPlan, HiddenStates, Sequences, Supervision, TargetRunner
from nemo_eagle3_sglang.supervision.head import draft_targets


class RunnerSource:
    """A :class:`~nemo_eagle3_sglang.contracts.SupervisionSource` over any runner.

    Attributes:
        runner: The runner.
    """

    def __init__(self, runner: TargetRunner) -> None:
        self.runner = runner
        self.info, self.device, self.dtype = runner.info, runner.device, runner.dtype
        self._mapping: tuple[torch.Tensor, torch.Tensor] | None = None

    def set_aux_layers(self, aux_layer_ids: Sequence[int]) -> None:
        """See :meth:`TargetRunner.set_aux_layers`."""
        self.runner.set_aux_layers(aux_layer_ids)

    def plan_aux_layers(self, aux_layer_ids: Sequence[int]) -> AuxPlan | None:
        """Return the runner's own plan, or None where it makes none; see :class:`TargetRunner`."""
        planner = getattr(self.runner, "plan_aux_layers", None)
        return planner(aux_layer_ids) if planner else None

    def set_vocab_mapping(self, selected_token_ids: torch.Tensor, selected_token_mask: torch.Tensor) -> None:
        """Set the draft vocabulary.

        Raises:
            ValueError: The mask is for another vocabulary.
        """
        vocab = self.info.vocab_size
        if selected_token_mask.shape != (vocab,):
            raise ValueError(
                f"vocabulary mapping for {selected_token_mask.shape[0]} tokens; the target's head has {vocab}"
            )
        self._mapping = selected_token_ids.to(self.device), selected_token_mask.to(self.device)

    @torch.no_grad()
    def supervise(self, sequences: Sequences) -> Supervision:
        """See :meth:`SupervisionSource.supervise`. The head runs at the supervised positions only."""
        mapping = self.vocab_mapping()
        states = self.forward(sequences)
        supervised = sequences.device_supervised
        if supervised is None:
            supervised = torch.from_numpy(sequences.supervised).to(self.device)
        return Supervision(
            states.aux, draft_targets(self.runner.head(), states.last.index_select(0, supervised), *mapping)
        )

    def vocab_mapping(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the ids and the mask on the device.

        Raises:
            RuntimeError: None was set.
        """
        if self._mapping is None:
            raise RuntimeError("set_vocab_mapping must be called before the first batch")
        return self._mapping

    def forward(self, sequences: Sequences) -> HiddenStates:
        """Run the engine; a micro-batch without tokens has no forward."""
        if sequences.lengths:
            tokens = sequences.device_tokens
            if tokens is None:
                tokens = torch.from_numpy(sequences.tokens).to(self.device)
            return self.runner.forward(tokens, sequences.lengths)
        empty = torch.empty((0, self.info.hidden_size), dtype=self.dtype, device=self.device)
        return HiddenStates(aux=empty.new_empty((0, NUM_AUX_LAYERS * self.info.hidden_size)), last=empty)

    def input_embeddings(self) -> torch.Tensor:
        """See :meth:`TargetRunner.input_embeddings`."""
        return self.runner.input_embeddings()

    def close(self) -> None:
        """Free the target."""
        self.runner.close()
