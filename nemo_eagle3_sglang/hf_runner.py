"""The transformers model as a target runner: the reference that every engine is held against.

Registered as ``target_model_backend: hf``. Unlike AutoModel's ``colocated`` backend it goes through the same
supervision code as the engines (no ``[tokens, vocab]`` logits), at the speed of transformers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from nemo_eagle3_sglang.contracts import BackendRequest, Head, HiddenStates, TargetInfo
from nemo_eagle3_sglang.head_rows import HeadRows, read_rows


class HFRunner:
    """Runs a causal LM of transformers, one sequence after another, so that padding and masks cannot matter.

    Args:
        model: A causal LM in eval mode whose ``forward`` takes ``output_hidden_states``.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        config = model.config.get_text_config()
        self.model: PreTrainedModel | None = model.eval().requires_grad_(False)
        self.info = TargetInfo(config.num_hidden_layers, config.hidden_size, config.vocab_size)
        self.device = model.device
        self.dtype = model.dtype
        self.max_sequence_length = int(config.max_position_embeddings)
        self._aux_layer_ids: list[int] = []

    def set_aux_layers(self, aux_layer_ids: Sequence[int]) -> None:
        """See :meth:`TargetRunner.set_aux_layers`."""
        self._aux_layer_ids = list(aux_layer_ids)

    @torch.no_grad()
    def forward(self, tokens: torch.Tensor, lengths: Sequence[int]) -> HiddenStates:
        """See :meth:`TargetRunner.forward`."""
        parts = [self._forward_one(sequence) for sequence in tokens.to(self.device).split(list(lengths))]
        return HiddenStates(aux=torch.cat([p.aux for p in parts]), last=torch.cat([p.last for p in parts]))

    def _forward_one(self, tokens: torch.Tensor) -> HiddenStates:
        output = self._model().base_model(input_ids=tokens[None], output_hidden_states=True, use_cache=False)
        # hidden_states[0] is the embedding, hidden_states[i + 1] the output of layer i; the last entry is normed,
        # so the last layer's own output is not among them (resolve_aux_layer_ids refuses it).
        aux = torch.cat([output.hidden_states[i + 1][0] for i in self._aux_layer_ids], dim=-1)
        return HiddenStates(aux=aux, last=output.last_hidden_state[0])

    def head(self) -> Head:
        """See :meth:`TargetRunner.head`."""
        return HFHead(self._model(), self.info)

    def input_embeddings(self) -> torch.Tensor:
        """See :meth:`TargetRunner.input_embeddings`."""
        embeddings: nn.Module = self._model().get_input_embeddings()
        return embeddings.weight.detach()[: self.info.vocab_size]

    def close(self) -> None:
        """Drop the model."""
        self.model = None

    def _model(self) -> PreTrainedModel:
        if self.model is None:
            raise RuntimeError("this runner has been closed")
        return self.model


class HFHead:
    """The output head of a causal LM with what its ``forward`` does to the logits.

    Args:
        model: The causal LM.
        info: Its dimensions.
    """

    def __init__(self, model: PreTrainedModel, info: TargetInfo) -> None:
        config = model.config.get_text_config()
        self._project: nn.Module = model.get_output_embeddings()
        self._info, self._dtype = info, model.dtype
        self._scale: float | None = getattr(config, "logit_scale", None)
        self._softcap: float | None = getattr(config, "final_logit_softcapping", None)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits ``[n, V]`` of ``hidden`` ``[n, H]``."""
        logits = self._project(hidden) * (self._scale or 1.0)
        if self._softcap:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return logits[..., : self._info.vocab_size]

    @torch.no_grad()
    def rows_at(self, token_ids: torch.Tensor) -> HeadRows:
        """Return the rows of ``token_ids`` ``[n]`` int64."""
        return read_rows(
            self._project, token_ids, self._info.hidden_size, self._dtype, self._scale or None, self._softcap
        )


def build_runner(request: BackendRequest) -> HFRunner:
    """Load ``request.target`` with transformers; ``request.options`` goes to ``from_pretrained``."""
    options = {"dtype": request.dtype, **request.options}
    model = AutoModelForCausalLM.from_pretrained(request.target, trust_remote_code=request.trust_remote_code, **options)
    return HFRunner(model.to(request.device))
