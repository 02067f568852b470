"""Supervision from a runner in this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from nemo_eagle3_sglang.contracts import (
    NUM_AUX_LAYERS,
    AuxPlan,
    HiddenStates,
    Sequences,
    Supervision,
    TargetRunner,
    TargetStates,
)
from nemo_eagle3_sglang.errors import ConfigError
from nemo_eagle3_sglang.head_rows import HeadRows
from nemo_eagle3_sglang.supervision.head import choices, draft_targets


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
        last = states.last.index_select(0, self.supervised(sequences))
        return Supervision(states.aux, draft_targets(self.runner.head(), last, *mapping))

    @torch.no_grad()
    def states(self, sequences: Sequences) -> TargetStates:
        """Return what is shipped or kept on disk; no draft vocabulary is needed."""
        found = self.forward(sequences)
        last = found.last.index_select(0, self.supervised(sequences))
        return TargetStates(found.aux, last, choices(self.runner.head(), last, self.info.vocab_size))

    @torch.no_grad()
    def head_rows(self, token_ids: torch.Tensor) -> HeadRows:
        """Return the head at ``token_ids`` ``[n]`` int64, by which states become targets.

        Raises:
            ConfigError: The engine's head cannot be read.
        """
        return self._readable_head().rows_at(token_ids.to(self.device))

    def _readable_head(self) -> Any:
        head = self.runner.head()
        if not hasattr(head, "rows_at"):
            raise ConfigError(
                f"{type(head).__name__} of this target backend has no rows_at(token_ids): its states cannot be kept or "
                "shipped without the head that makes logits of them"
            )
        return head

    def supervised(self, sequences: Sequences) -> torch.Tensor:
        """Return the supervised tokens ``[P]`` on the device."""
        if sequences.device_supervised is not None:
            return sequences.device_supervised
        return torch.from_numpy(sequences.supervised).to(self.device)

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
