"""Text models inside wrappers that no list of names could hold, and what is refused there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import architectures
import pytest
import tiny_models
import torch
from architectures import CUSTOM, DEFAULT
from torch import nn

from nemo_eagle3_sglang.contracts import AuxPlan
from nemo_eagle3_sglang.engine import versions
from nemo_eagle3_sglang.engine.runner import SGLangRunner
from nemo_eagle3_sglang.errors import ConfigError

TOKENS = torch.randint(3, 490, (40,), generator=torch.Generator().manual_seed(1))


class Wrapper(nn.Module):
    """A multimodal wrapper with a processor of its own, which never runs, and a setter for what it wraps."""

    def __init__(self, model: nn.Module, name: str, decoy: nn.Module) -> None:
        super().__init__()
        self.logits_processor = decoy
        self.add_module(name, model)
        self._inner = (model,)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._inner[0](*args, **kwargs)


class ServedWrapper(Wrapper):
    def set_eagle3_layers_to_capture(self, layer_ids: list[int] | None = None) -> None:
        self._inner[0].set_eagle3_layers_to_capture(layer_ids)


@pytest.fixture
def build_wrapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., SGLangRunner]]:
    """Build a Llama inside wrappers of the given classes, the outermost last."""
    opened: list[SGLangRunner] = []
    construct = versions.construct

    def build(*wrappers: type[Wrapper]) -> SGLangRunner:
        def wrapped(*args: Any) -> Any:
            from sglang.srt.layers.logits_processor import LogitsProcessor

            model_runner = construct(*args)
            config = model_runner.model_config.hf_text_config
            for depth, wrapper in enumerate(wrappers):
                model_runner.model = wrapper(model_runner.model, f"part_{depth}", LogitsProcessor(config))
            return model_runner

        monkeypatch.setattr(versions, "construct", wrapped)
        folder = tiny_models.save_target(tmp_path / "target")
        opened.append(SGLangRunner.build(tiny_models.make_request(folder)))
        return opened[-1]

    yield build
    for runner in opened:
        runner.close()


def test_a_text_model_nested_twice_under_unknown_names(build_wrapped):
    runner = build_wrapped(ServedWrapper, ServedWrapper)
    assert runner._capture.text_model.path == "part_1.part_0.model"
    assert len(runner._capture._taps) == 3
    assert runner.plan_aux_layers(CUSTOM) == AuxPlan(trained=list(CUSTOM), written=list(CUSTOM))
    model = tiny_models.make_model("llama")
    expected = architectures.reference(model, TOKENS, [len(TOKENS)])
    runner.set_aux_layers(CUSTOM)
    states = runner.forward(TOKENS, [len(TOKENS)])
    streams = torch.cat([expected.streams[i] for i in CUSTOM], dim=-1)
    torch.testing.assert_close(states.aux, streams, atol=1e-3, rtol=0)
    torch.testing.assert_close(runner.head()(states.last), expected.logits, atol=1e-3, rtol=0)


def test_a_setter_on_the_text_model_alone_does_not_serve(build_wrapped):
    """SGLang calls the setter of the root; a text model that has one under a wrapper that has none is never asked."""
    runner = build_wrapped(ServedWrapper, Wrapper)
    with pytest.raises(ConfigError, match="Wrapper: SGLang has no EAGLE-3 capture"):
        runner.plan_aux_layers(DEFAULT)


def test_soft_capped_attention_is_refused_on_a_cpu(tmp_path):
    architectures.save(architectures.BY_NAME["Gemma-2"], tmp_path)
    with pytest.raises(ConfigError, match="ignores the soft cap of Gemma2ForCausalLM's attention"):
        SGLangRunner.build(tiny_models.make_request(tmp_path))
