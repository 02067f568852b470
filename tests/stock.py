"""SGLang's own forward over a fresh model, without this package's taps or hooks: what training must agree with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import nn

from nemo_eagle3_sglang.contracts import BackendRequest
from nemo_eagle3_sglang.engine import server_args, versions
from nemo_eagle3_sglang.engine.batch import forward_batch


@dataclass
class Stock:
    """What SGLang's own forward gave.

    Attributes:
        logits: ``[T, V]``, its logits processor at every position.
        last_logits: ``[sequences, V]``, what its forward returned.
        draft_input: ``[T, 3H]``, the hidden states it returned, which its draft worker reads.
        processors: Names of the logits processors in the model.
        model_class: Class of the root module.
        methods: Class of the quantisation method of each module that has one.
    """

    logits: torch.Tensor
    last_logits: torch.Tensor
    draft_input: torch.Tensor
    processors: list[str]
    model_class: str
    methods: dict[str, str]


@torch.no_grad()
def run_stock(
    request: BackendRequest, tokens: torch.Tensor, lengths: Sequence[int], written: Sequence[int] | None = None
) -> Stock:
    """Build the model anew, switch on SGLang's own capture of ``written`` as its server does, and run it."""
    from sglang.srt.layers.logits_processor import LogitsMetadata, LogitsProcessor

    handed: list[tuple[Any, ...]] = []
    forward = LogitsProcessor.forward

    def keep(self: Any, input_ids: Any, hidden: torch.Tensor, lm_head: nn.Module, batch: Any, *rest: Any, **kw: Any):
        handed.append((self, hidden.clone(), lm_head, batch))
        return forward(self, input_ids, hidden, lm_head, batch, *rest, **kw)

    model_runner = None
    try:
        with versions.build_environment(request.device):
            model_runner = versions.construct(server_args.build_server_args(request), request.device.index or 0)
        model = model_runner.model
        if written is not None:
            model.set_eagle3_layers_to_capture(list(written))
        names = [name for name, module in model.named_modules() if isinstance(module, LogitsProcessor)]
        methods = {n: type(m.quant_method).__name__ for n, m in model.named_modules() if getattr(m, "quant_method", 0)}
        tokens = tokens.to(request.device)
        watched = mock.patch.object(LogitsProcessor, "forward", keep)
        with watched, forward_batch(model_runner, tokens, list(lengths)) as batch:
            output = model_runner.forward(batch)
            output = getattr(output, "logits_output", output)
            ((processor, hidden, lm_head, batch),) = handed
            logits = processor._get_logits(hidden, lm_head, LogitsMetadata.from_forward_batch(batch))
        kept = [None if x is None else x.clone() for x in (logits, output.next_token_logits, output.hidden_states)]
        return Stock(*kept, names, type(model).__name__, methods)
    finally:
        if model_runner is not None and request.device.type == "cuda":
            versions.free_memory(model_runner)
        versions.release_groups(owned=True)
