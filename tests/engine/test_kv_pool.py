"""The KV pool: sized to a micro-batch, and more than it holds."""

from __future__ import annotations

import torch

VOCAB = 500


def test_the_pool_is_one_micro_batchs_under_auto(open_runner):
    half, tokens = open_runner(), torch.arange(100)
    half.set_aux_layers([1, 3, 4])
    expected = half.forward(tokens, [60, 40])
    half_tokens = half.capacity.tokens
    half.close()
    small = open_runner(request={"kv_pool": "auto", "seq_length": 64, "micro_batch_size": 2})
    assert 128 <= small.capacity.tokens <= 160 < half_tokens
    small.set_aux_layers([1, 3, 4])
    states = small.forward(tokens, [60, 40])
    assert torch.equal(states.aux, expected.aux)
    assert small.free_slots() == small.capacity.tokens


def test_more_than_the_pool_holds_is_run_in_turns(open_runner):
    runner = open_runner(request={"seq_length": 64, "micro_batch_size": 1, "options": {"max_total_tokens": 128}})
    runner.set_aux_layers([1, 3, 4])
    tokens = torch.randint(0, VOCAB, (300,), generator=torch.Generator().manual_seed(1))
    lengths = [60] * 5
    together = runner.forward(tokens, lengths)
    apart = torch.cat([runner.forward(part, [60]).aux for part in tokens.split(60)])
    torch.testing.assert_close(together.aux, apart, atol=1e-4, rtol=0)
    assert runner.free_slots() == runner.capacity.tokens
