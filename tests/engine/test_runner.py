"""Life of a runner: KV slots, splitting, failing, closing, the trainer's process group."""

from __future__ import annotations

import gc
import weakref

import pytest
import tiny_models
import torch
import torch.distributed as dist

from nemo_eagle3_sglang.engine.runner import SGLangRunner
from nemo_eagle3_sglang.errors import CaptureError, ConfigError


def tokens_of(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 500, (count,), generator=torch.Generator().manual_seed(seed))


def test_life_of_a_runner(open_runner, monkeypatch):
    runner = open_runner()
    runner.set_aux_layers([1, 3, 4])
    total = runner.capacity.tokens
    assert runner.free_slots() == total

    # All slots come back, also after an exception in the middle of the forward.
    runner.forward(tokens_of(60), [10, 50])
    assert runner.free_slots() == total
    layer = runner._capture.text_model.layers[5]

    def fail(*_args, **_kwargs):
        raise RuntimeError("mid-forward")

    handle = layer.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="mid-forward"):
        runner.forward(tokens_of(60), [10, 50])
    handle.remove()
    assert runner.free_slots() == total
    assert not runner._capture._states
    expected = runner.forward(tokens_of(60), [10, 50])

    # A micro-batch larger than a forward may be is split, with the same states.
    monkeypatch.setattr(runner, "_max_tokens", 25)
    calls = []
    forward = runner._forward
    monkeypatch.setattr(runner, "_forward", lambda *a: calls.append(a[1]) or forward(*a))
    split = runner.forward(tokens_of(60), [10, 12, 3, 30, 5])
    assert calls == [[10, 12, 3], [30], [5]]
    monkeypatch.setattr(runner, "_max_tokens", 10_000)
    whole = runner.forward(tokens_of(60), [10, 12, 3, 30, 5])
    torch.testing.assert_close(split.aux, whole.aux, atol=1e-4, rtol=0)
    torch.testing.assert_close(split.last, whole.last, atol=1e-4, rtol=0)
    assert runner.free_slots() == total

    # Ids chosen again replace the former ones; nothing stays hooked.
    runner.set_aux_layers([0, 2, 6])
    other = runner.forward(tokens_of(60), [10, 50])
    assert not torch.equal(other.aux, expected.aux)
    assert torch.equal(other.last, expected.last)
    assert len(runner._capture._hooks) == 3

    for tokens, lengths in (
        (tokens_of(5), [4]),
        (tokens_of(5), [5, 0]),
        (tokens_of(4).view(2, 2), [4]),
        (tokens_of(0), []),
    ):
        with pytest.raises(ValueError, match="one after another"):
            runner.forward(tokens, lengths)
    with pytest.raises(ValueError, match="max_total_tokens"):
        runner.forward(tokens_of(600), [600])

    # close() is final, can be repeated, and lets everything go.
    model = weakref.ref(runner._model_runner.model)
    held = [*runner._model_runner.model.parameters(), *runner._model_runner.token_to_kv_pool.k_buffer]
    runner.close()
    # Storages go even where something still refers to the tensors, as happens inside SGLang on a GPU.
    assert not any(tensor.untyped_storage().nbytes() for tensor in held)
    del held
    runner.close()
    gc.collect()
    assert model() is None
    from sglang.srt.model_executor import input_buffers

    assert not input_buffers._forward_input_buffer_pool
    assert not dist.is_initialized()
    with pytest.raises(RuntimeError, match="closed"):
        runner.forward(tokens_of(5), [5])

    # A second runner of another model after close().
    second = open_runner("qwen3")
    second.set_aux_layers([1, 3, 4])
    assert second.forward(tokens_of(5), [5]).aux.shape == (5, 192)


def test_the_trainers_process_group_is_used_and_left_alone(open_runner):
    threads = torch.get_num_threads()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        for _ in range(2):
            runner = open_runner()
            runner.set_aux_layers([1, 3, 4])
            assert runner.forward(tokens_of(8), [8]).aux.shape == (8, 192)
            runner.close()
            assert dist.group.WORLD is group
        dist.barrier()
    finally:
        dist.destroy_process_group()
    assert torch.get_num_threads() == threads


def test_tied_head_and_odd_vocabulary(open_runner):
    runner = open_runner(tie_word_embeddings=True, vocab_size=333)
    model = tiny_models.make_model("llama", tie_word_embeddings=True, vocab_size=333)
    runner.set_aux_layers([1, 3, 4])
    tokens = tokens_of(30) % 333
    logits = runner.head()(runner.forward(tokens, [30]).last)
    with torch.no_grad():
        torch.testing.assert_close(logits, model(tokens[None]).logits[0], atol=1e-3, rtol=0)
    assert torch.equal(runner.input_embeddings(), model.get_input_embeddings().weight)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"seq_length": 4000}, "context is 51"),
        ({"seq_length": 400, "options": {"max_total_tokens": 256}}, "longer than sglang_args.max_total_tokens: 256"),
    ],
)
def test_rows_longer_than_the_target_takes(open_runner, request_, message):
    with pytest.raises(ConfigError, match=message):
        open_runner(request=request_)
    # What failed has been taken down again.
    assert not dist.is_initialized()
    assert open_runner().free_slots() > 0


def test_a_model_whose_stream_is_not_understood_is_refused(tmp_path, monkeypatch):
    """A final hidden state that no candidate leads to: training on it would be training on junk."""
    from sglang.srt.models import llama

    forward = llama.LlamaModel.forward

    def other(self, *args, **kwargs):
        output = forward(self, *args, **kwargs)
        return output + torch.randn(output.shape, generator=torch.Generator().manual_seed(0)) * output.abs().mean()

    monkeypatch.setattr(llama.LlamaModel, "forward", other)
    folder = tiny_models.save_target(tmp_path / "target")
    with pytest.raises(CaptureError, match="not understood"):
        SGLangRunner.build(tiny_models.make_request(folder))
    assert not dist.is_initialized()


def test_a_second_runner_at_the_same_time_is_refused_and_harms_nothing(open_runner):
    runner = open_runner()
    runner.set_aux_layers([1, 3, 4])
    expected = runner.forward(tokens_of(9), [9]).aux
    with pytest.raises(RuntimeError, match="another SGLangRunner is open"):
        open_runner()
    with pytest.raises(IndexError):
        runner.set_aux_layers([1, 99, 3])
    assert torch.equal(runner.forward(tokens_of(9), [9]).aux, expected)


def test_damaged_weights_are_refused(tmp_path):
    """One row of the head: no hidden state shows it, but every distribution over the vocabulary is nan."""
    from safetensors.torch import load_file, save_file

    folder = tiny_models.save_target(tmp_path / "target")
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"][7] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CaptureError, match="inf or nan"):
        SGLangRunner.build(tiny_models.make_request(folder))
    assert not dist.is_initialized()


def test_a_quantised_head_is_projected_by_its_own_method(open_runner):
    """An int8 head, as a quantised checkpoint leaves it: the weight alone is not what the logits come from."""

    class Int8:
        def apply(self, layer, x, bias=None):
            return x @ (layer.weight.float() * layer.scale).T

    runner = open_runner()
    runner.set_aux_layers([1, 3, 4])
    hidden = runner.forward(tokens_of(12), [12]).last
    plain = runner.head()(hidden)
    lm_head = runner._runner().model.lm_head
    lm_head.scale = lm_head.weight.detach().abs().amax(dim=1, keepdim=True).clamp_min(1e-6) / 127
    quantised = (lm_head.weight.detach() / lm_head.scale).round().to(torch.int8)
    lm_head.weight = torch.nn.Parameter(quantised, requires_grad=False)
    lm_head.quant_method = Int8()
    logits = runner.head()(hidden)
    # SGLang's own processor, the one that the tap replaced, on the same positions.
    processor = runner._capture._taps[0].processor
    assert torch.equal(logits, processor._get_logits(hidden, lm_head, None, use_logits_buffer=False))
    assert logits.shape == (12, 500)
    assert not torch.equal(logits, plain)
    torch.testing.assert_close(logits, plain, atol=0.5, rtol=0)
