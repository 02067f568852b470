"""Supervision from states that come from elsewhere: a server, or a disk."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nemo_eagle3_sglang.contracts import AuxPlan, Sequences, StatesProvider, Supervision, TargetStates
from nemo_eagle3_sglang.head_rows import HeadRows
from nemo_eagle3_sglang.supervision.head import targets_of


class StatesSource:
    """A :class:`~nemo_eagle3_sglang.contracts.SupervisionSource` that makes targets of shipped states.

    The draft vocabulary is this side's alone: the head at its tokens is fetched once, and the provider never learns
    which they are, so that there is no mapping there that could be an old one.

    Args:
        provider: Gives the states; its micro-batches come in the order in which they were submitted.
        device: Where the draft trains.
    """

    def __init__(self, provider: StatesProvider, device: torch.device) -> None:
        self.provider, self.device = provider, device
        self.info, self.dtype = provider.info, provider.dtype
        self._rows: HeadRows | None = None
        self._mask: torch.Tensor | None = None
        self._pending = 0

    def set_aux_layers(self, aux_layer_ids: Sequence[int]) -> None:
        """See :meth:`TargetRunner.set_aux_layers`.

        Raises:
            ConfigError: The provider has the states of other layers.
        """
        self.provider.set_aux_layers(aux_layer_ids)

    def plan_aux_layers(self, aux_layer_ids: Sequence[int]) -> AuxPlan | None:
        """Return the provider's plan; see :class:`TargetRunner`."""
        return self.provider.plan_aux_layers(aux_layer_ids)

    def set_vocab_mapping(self, selected_token_ids: torch.Tensor, selected_token_mask: torch.Tensor) -> None:
        """Fetch the head at the draft vocabulary; see :meth:`SupervisionSource.set_vocab_mapping`.

        Raises:
            ValueError: The mask is for another vocabulary.
        """
        if selected_token_mask.shape != (self.info.vocab_size,):
            raise ValueError(
                f"vocabulary mapping for {selected_token_mask.shape[0]} tokens; the target's head has "
                f"{self.info.vocab_size}"
            )
        rows = self.provider.head_rows(selected_token_ids.cpu())
        bias = None if rows.bias is None else rows.bias.to(self.device)
        self._rows = HeadRows(rows.weight.to(self.device), bias, rows.scale, rows.softcap)
        self._mask = selected_token_mask.to(self.device)

    def supervise(self, sequences: Sequences) -> Supervision:
        """See :meth:`SupervisionSource.supervise`. What was submitted and not collected is dropped."""
        while self._pending:
            self._states()
        self.submit(sequences)
        return self.collect()

    def submit(self, sequences: Sequences) -> None:
        """Ask for a micro-batch; :meth:`collect` returns it, in the order of the calls."""
        if self._rows is None:
            raise RuntimeError("set_vocab_mapping must be called before the first batch")
        self.provider.submit(sequences)
        self._pending += 1

    @torch.no_grad()
    def collect(self) -> Supervision:
        """Return the supervision of the micro-batch that was submitted first of those that are not collected."""
        found = self._states()
        assert self._rows is not None
        assert self._mask is not None
        # As where the target runs: the head is handed what the logits processor would be, in its own dtype.
        last = found.last.to(self._rows.weight.dtype)
        return Supervision(found.aux.to(self.dtype), targets_of(self._rows, last, self._mask[found.choices]))

    def _states(self) -> TargetStates:
        self._pending -= 1
        found = self.provider.collect()
        return TargetStates(
            *(tensor.to(self.device, non_blocking=True) for tensor in (found.aux, found.last, found.choices))
        )

    def states(self, sequences: Sequences) -> TargetStates:
        """Return the states themselves; see :meth:`RunnerSource.states`."""
        self.provider.submit(sequences)
        self._pending += 1
        return self._states()

    def head_rows(self, token_ids: torch.Tensor) -> HeadRows:
        """Return the head at ``token_ids``; see :meth:`RunnerSource.head_rows`."""
        return self.provider.head_rows(token_ids)

    def input_embeddings(self) -> torch.Tensor:
        """Return the input embedding ``[V, H]`` on ``device``."""
        return self.provider.input_embeddings().to(self.device)

    def close(self) -> None:
        """Close the provider."""
        self.provider.close()
