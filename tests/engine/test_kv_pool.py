"""The KV pool: sized to a micro-batch, and more than it holds."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from unittest import mock

import architectures
import pytest
import tiny_models
import torch
from cpu_substitutes import substituted

from nemo_eagle3_sglang.contracts import HiddenStates
from nemo_eagle3_sglang.engine.runner import SGLangRunner
from nemo_eagle3_sglang.engine.server_args import PROBE_TOKENS
from nemo_eagle3_sglang.errors import ConfigError

VOCAB = 500
AUTO = {"kv_pool": "auto", "seq_length": 64, "micro_batch_size": 2}


def states(runner: SGLangRunner, tokens: torch.Tensor, lengths: list[int]) -> HiddenStates:
    runner.set_aux_layers([1, 3, 4])
    found = runner.forward(tokens, lengths)
    assert runner.free_slots() == runner.capacity.tokens
    return found


def random_tokens(count: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(1))


def equal(one: HiddenStates, other: HiddenStates) -> bool:
    return torch.equal(one.aux, other.aux) and torch.equal(one.last, other.last)


def test_the_pool_is_one_micro_batchs_under_auto(open_runner):
    half, tokens = open_runner(), random_tokens(128)
    # A full micro-batch, one of a single chat, and one of documents of a few tokens.
    cases = [(tokens, [64, 64]), (tokens[:40], [40]), (tokens, [2] * 64), (tokens[:100], [60, 1, 39])]
    expected = [states(half, *case) for case in cases]
    half_tokens = half.capacity.tokens
    half.close()
    small = open_runner(request=AUTO)
    assert small.capacity.tokens == 128 + 128 // 8 < half_tokens
    assert all(equal(states(small, *case), other) for case, other in zip(cases, expected, strict=True))


@pytest.mark.parametrize(("rows", "length"), [(1, 450), (8, 30), (1, 64), (3, 65), (1, 2)])
@pytest.mark.parametrize("page", [1, 64])
def test_every_row_fits_in_whole_pages(open_runner, page, rows, length):
    options = {"page_size": page}
    request = {"kv_pool": "auto", "seq_length": length, "micro_batch_size": rows, "options": options}
    runner = open_runner(request=request)
    assert runner.capacity.page == page
    assert runner.capacity.tokens >= max(rows * runner.capacity.slots(length), PROBE_TOKENS)
    assert runner.capacity.tokens <= rows * runner.capacity.slots(length) * 9 / 8 + PROBE_TOKENS + page
    with mock.patch.object(runner, "_forward", wraps=runner._forward) as forward:
        states(runner, random_tokens(rows * length), [length] * rows)
    assert forward.call_count == 1


@pytest.mark.parametrize("pool", [{"options": {"max_total_tokens": 128}}, {"kv_pool": "auto"}], ids=["set", "auto"])
def test_more_than_the_pool_holds_is_run_in_turns(open_runner, pool):
    runner = open_runner(request={"seq_length": 64, "micro_batch_size": 1, **pool})
    tokens, lengths = random_tokens(300), [60] * 5
    together = states(runner, tokens, lengths)
    apart = torch.cat([states(runner, part, [60]).aux for part in tokens.split(60)])
    torch.testing.assert_close(together.aux, apart, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["gpt-oss", "Llama-4"])
def test_a_sliding_window_has_a_pool_of_the_same_size(tmp_path, name):
    architecture = next(a for a in architectures.ARCHITECTURES if a.name == name)
    architectures.save(architecture, tmp_path)
    found = []
    for pool in ({}, {**AUTO, "seq_length": 32}):
        with substituted(architecture.substitutes):
            runner = SGLangRunner.build(tiny_models.make_request(tmp_path, trust_remote_code=True, **pool))
            try:
                found.append(states(runner, architectures.TOKENS, architectures.LENGTHS))
                sizes = runner._runner().token_to_kv_pool
                assert sizes.size == sizes.size_swa == (72 if pool else 4096)
            finally:
                runner.close()
    assert equal(*found)


def test_the_log_says_how_large_the_pool_is(open_runner, caplog):
    with caplog.at_level("INFO"):
        runner = open_runner(request=AUTO)
    assert "KV pool: 144 tokens (0.0 GiB) for one micro-batch of 128" in caplog.text
    with mock.patch("nemo_eagle3_sglang.engine.versions.kv_pool_bytes", return_value=2**30):
        with mock.patch("torch.cuda.mem_get_info", return_value=(95 * 2**30, 0)):
            assert runner.describe_pool(120 * 2**30).endswith(
                "(1.0 GiB) for one micro-batch of 128; 35.0 GiB of SGLang's half left to the draft"
            )
        with mock.patch("torch.cuda.mem_get_info", return_value=(20 * 2**30, 0)):
            assert runner.describe_pool(120 * 2**30).endswith("take 40.0 GiB more than SGLang's half")


def test_the_size_in_bytes_is_that_of_the_tensors(open_runner):
    from nemo_eagle3_sglang.engine import versions

    runner = open_runner(request=AUTO)
    # Keys and values of 8 layers, 2 heads of 16, float32; SGLang adds a page of padding, and tables of pointers.
    expected = 2 * 8 * 2 * 16 * 4 * (144 + 1)
    assert expected <= versions.kv_pool_bytes(runner._runner()) < expected + 1024


@contextlib.contextmanager
def memory_of_a_gpu(before: float, after: float) -> Iterator[None]:
    """Let SGLang find ``before`` GiB free when it starts and ``after`` when the weights are loaded."""
    from sglang.srt.model_executor.model_runner import ModelRunner

    alloc = ModelRunner.alloc_memory_pool

    def alloc_memory_pool(self: ModelRunner) -> None:
        self.pre_model_load_memory = before
        alloc(self)

    left = "sglang.srt.mem_cache.kv_cache_configurator.get_available_gpu_memory"
    with mock.patch.object(ModelRunner, "alloc_memory_pool", alloc_memory_pool), mock.patch(left, return_value=after):
        yield


@pytest.mark.parametrize("pool", ["half", "auto"])
def test_weights_that_leave_no_room_are_an_error_that_names_the_key(open_runner, pool):
    # Less than the tenth that auto leaves.
    with memory_of_a_gpu(before=20.0, after=1.0), pytest.raises(ConfigError) as error:
        open_runner(request={**AUTO, "kv_pool": pool})
    assert "recipe_args.sglang_args.mem_fraction_static" in str(error.value)
    assert "--" not in str(error.value)
    open_runner(request={**AUTO, "kv_pool": pool}).close()


def test_weights_above_half_are_no_obstacle_under_auto(open_runner):
    """SGLang may take nine tenths: what it refuses under ``half`` fits, since the pool is small."""
    with memory_of_a_gpu(before=20.0, after=6.0):
        runner = open_runner(request=AUTO)
        assert runner.capacity.tokens == 144
        runner.close()
        with pytest.raises(ConfigError, match=r"mem_fraction_static=0\.5"):
            open_runner()


def test_a_sliding_window_that_does_not_fit_is_an_error_that_names_the_key(tmp_path):
    """SGLang asks memory of its window pool for every request that may run, before it looks at the cap."""
    architecture = next(a for a in architectures.ARCHITECTURES if a.name == "gpt-oss")
    architectures.save(architecture, tmp_path)
    request = tiny_models.make_request(tmp_path, **AUTO)
    # 256 windows of 16, and what is added to each, take 32 MiB.
    with substituted(architecture.substitutes), memory_of_a_gpu(before=0.02, after=0.02):
        with pytest.raises(ConfigError, match=r"Reduce recipe_args\.sglang_args\.max_running_requests"):
            SGLangRunner.build(request)
        fewer = dataclasses.replace(request, options={"max_running_requests": 16})
        SGLangRunner.build(fewer).close()
