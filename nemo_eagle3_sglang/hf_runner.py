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
        return self._logits

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        model = self._model()
        logits = model.get_output_embeddings()(hidden)
        config = model.config.get_text_config()
        logits = logits * (getattr(config, "logit_scale", None) or 1.0)
        if cap := getattr(config, "final_logit_softcapping", None):
            logits = torch.tanh(logits / cap) * cap
        return logits[..., : self.info.vocab_size]

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


def build_runner(request: BackendRequest) -> HFRunner:
    """Load ``request.target`` with transformers; ``request.options`` goes to ``from_pretrained``."""
    options = {"dtype": request.dtype, **request.options}
    model = AutoModelForCausalLM.from_pretrained(request.target, trust_remote_code=request.trust_remote_code, **options)
    return HFRunner(model.to(request.device))
