"""The start-up self-check: on real SGLang classes as they are, and on copies that were broken on purpose."""

from __future__ import annotations

import dataclasses

import pytest
import tiny_models
import torch

from nemo_eagle3_sglang.contracts import AuxPlan
from nemo_eagle3_sglang.engine import self_check
from nemo_eagle3_sglang.engine.runner import SGLangRunner
from nemo_eagle3_sglang.errors import CaptureError, ConfigError


def test_llama_is_served_with_what_it_is_trained_on(open_runner):
    runner = open_runner()
    model = runner._runner().model
    flags = self_check._flags(model), self_check._flags(model.model)
    runner.set_aux_layers([1, 3, 4])
    tokens = torch.arange(20)
    before = runner.forward(tokens, [20])
    assert runner.plan_aux_layers([1, 3, 4]) == AuxPlan(trained=[1, 3, 4], written=[1, 3, 4])
    # SGLang captures in ascending order, so that is the order to train in.
    assert runner.plan_aux_layers([5, 0, 3]) == AuxPlan(trained=[0, 3, 5], written=[0, 3, 5])
    # The check leaves the model and the hooks as they were.
    assert (self_check._flags(model), self_check._flags(model.model)) == flags
    assert torch.equal(runner.forward(tokens, [20]).aux, before.aux)
    assert runner.free_slots() == runner.capacity.tokens
    # The last layer is dropped by SGLang without a word: never trained on unnoticed.
    with pytest.raises(ConfigError, match="captures 2 states instead of 3"):
        runner.plan_aux_layers([1, 3, 7])


def test_residual_and_switched_off(open_runner):
    runner = open_runner(request={"capture": "residual"})
    assert runner.plan_aux_layers([5, 0, 3]) == AuxPlan(trained=[5, 0, 3], written=[5, 0, 3])
    runner._request = dataclasses.replace(runner._request, capture="serving", self_check=False)
    assert runner.plan_aux_layers([5, 0, 3]) == AuxPlan(trained=[5, 0, 3], written=[5, 0, 3])


def broken_setter(change):
    from sglang.srt.models.llama import LlamaForCausalLM

    original = LlamaForCausalLM.set_eagle3_layers_to_capture

    def setter(self, layer_ids=None):
        original(self, layer_ids)
        self.model.layers_to_capture = change(self.model.layers_to_capture)

    return setter


@pytest.mark.parametrize(
    ("change", "message"),
    [
        # Three steps away: no candidate ids make up for it.
        (lambda ids: [i + 2 for i in ids], r"for layer 1 it gives the output of layer 3, for layer 3 it gives .* 5"),
        (lambda ids: ids[:2], "captures 2 states instead of 3"),
        (lambda ids: [ids[0], ids[1], ids[1] + 2], "for layer 4 it gives the output of layer 5"),
    ],
    ids=["off by two", "a dropped layer", "one wrong layer"],
)
def test_a_setter_that_captures_other_layers_is_named(open_runner, monkeypatch, change, message):
    from sglang.srt.models.llama import LlamaForCausalLM

    runner = open_runner()
    monkeypatch.setattr(LlamaForCausalLM, "set_eagle3_layers_to_capture", broken_setter(change))
    with pytest.raises(ConfigError, match=message) as error:
        runner.plan_aux_layers([1, 3, 4])
    assert "capture: residual" in str(error.value)


def test_a_setter_that_is_off_by_one_gets_the_ids_that_make_up_for_it(open_runner, monkeypatch):
    """As deepseek_v2 does when the first id is not 1: SGLang then needs the ids plus one."""
    from sglang.srt.models.llama import LlamaForCausalLM

    runner = open_runner()
    monkeypatch.setattr(
        LlamaForCausalLM, "set_eagle3_layers_to_capture", broken_setter(lambda ids: [i - 1 for i in ids])
    )
    assert runner.plan_aux_layers([2, 4, 5]) == AuxPlan(trained=[2, 4, 5], written=[3, 5, 6])


def test_a_capture_before_the_residual_is_named(open_runner, monkeypatch):
    """As Gemma-3 in SGLang: the delta of the layer, without the stream it is added to."""
    from sglang.srt.models import llama

    class Delta(torch.Tensor):
        """Adds to anything as itself alone, so that ``hidden + residual`` is the delta."""

    runner = open_runner()
    forward = llama.LlamaModel.forward

    def before_residual(self, *args, **kwargs):
        output = forward(self, *args, **kwargs)
        if not self.layers_to_capture:
            return output
        hidden, aux = output
        return hidden, [state - 0.5 * state.mean(dim=-1, keepdim=True) - 0.4 * state for state in aux]

    monkeypatch.setattr(llama.LlamaModel, "forward", before_residual)
    with pytest.raises(ConfigError, match="no layer's residual stream"):
        runner.plan_aux_layers([1, 3, 4])


def test_a_model_without_eagle3_capture_cannot_be_served(open_runner, monkeypatch):
    from sglang.srt.models.llama import LlamaForCausalLM

    runner = open_runner()
    monkeypatch.setattr(LlamaForCausalLM, "set_eagle3_layers_to_capture", None)
    with pytest.raises(ConfigError, match="no EAGLE-3 capture"):
        runner.plan_aux_layers([1, 3, 4])


def test_a_decoy_logits_processor_is_named(tmp_path, monkeypatch):
    """A wrapper that keeps its real processor out of the module tree: the one that can be found never runs."""
    from sglang.srt.models.llama import LlamaForCausalLM

    construct = LlamaForCausalLM.__init__

    def with_decoy(self, *args, **kwargs):
        construct(self, *args, **kwargs)
        real = self.logits_processor
        decoy = type(real)(self.config)
        self.__dict__["_real"] = (real,)
        self.logits_processor = decoy

    def forward(self, input_ids, positions, forward_batch, **_):
        hidden = self.model(input_ids, positions, forward_batch)
        return self._real[0](input_ids, hidden, self.lm_head, forward_batch)

    monkeypatch.setattr(LlamaForCausalLM, "__init__", with_decoy)
    monkeypatch.setattr(LlamaForCausalLM, "forward", forward)
    folder = tiny_models.save_target(tmp_path / "target")
    with pytest.raises(CaptureError, match="0 of 1 logits processors ran"):
        SGLangRunner.build(tiny_models.make_request(folder))


def test_padded_rows_are_named():
    with pytest.raises(CaptureError, match="input embedding has 448 rows, its vocabulary 500"):
        self_check.check_rows("input embedding", 448, 500, 500, 448)
    with pytest.raises(CaptureError, match="says it holds 512 tokens, its config 500"):
        self_check.check_rows("input embedding", 512, 500, 500, 512)
    self_check.check_rows("input embedding", 512, 500, 500, 500)
    self_check.check_rows("output head", 512, 500, 500, None)


def test_a_padded_embedding_is_refused_at_start(tmp_path, monkeypatch):
    from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

    construct = VocabParallelEmbedding.__init__

    def padded(self, *args, **kwargs):
        construct(self, *args, **kwargs)
        self.org_vocab_size = self.weight.shape[0]

    folder = tiny_models.save_target(tmp_path / "target")
    monkeypatch.setattr(VocabParallelEmbedding, "__init__", padded)
    with pytest.raises((CaptureError, AssertionError), match="512"):
        SGLangRunner.build(tiny_models.make_request(folder))
