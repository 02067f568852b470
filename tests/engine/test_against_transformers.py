"""The real SGLang engine on a CPU against transformers in float32: the supervision, row by row.

The reference is transformers' own padded forward (attention mask, all positions), not our HF runner, so that a
mistake in unpadding or shifting cannot cancel out.
"""

from __future__ import annotations

import pytest
import torch

from nemo_eagle3_sglang.supervision.backend import RunnerBackend

VOCAB, DRAFT = 500, 96
SELECTED = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(7))[:DRAFT]
MEMBER = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, SELECTED, True)

# name -> (length, left padding) of each row, in rows of 40
SHAPES = {
    "equal": [(40, 0), (40, 0), (40, 0)],
    "unequal, right padded": [(40, 0), (13, 0), (27, 0)],
    "left padded": [(40, 0), (13, 27), (27, 13)],
    "padded on both sides": [(20, 10), (1, 20)],
    "one token": [(1, 0), (1, 39), (40, 0)],
    "empty rows": [(0, 0), (17, 0), (0, 0)],
    "one row": [(23, 0)],
}


def make_rows(shape: list[tuple[int, int]], seed: int = 0, length: int = 40) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (len(shape), length), generator=generator)
    attention = torch.zeros_like(ids)
    for row, (size, left) in enumerate(shape):
        attention[row, left : left + size] = 1
    # A gappy loss mask, as several assistant turns give.
    loss = attention * (torch.rand(ids.shape, generator=generator) < 0.7)
    return ids, attention, loss


def shift(rows: torch.Tensor) -> torch.Tensor:
    return torch.cat((rows[:, 1:], torch.zeros_like(rows[:, :1])), dim=1)


@torch.no_grad()
def reference(model, ids, attention, loss, aux_ids):
    """The contract of DESIGN.md, spelt out on a padded transformers forward with full logits."""
    model.set_attn_implementation("eager")
    output = model(input_ids=ids, attention_mask=attention, output_hidden_states=True, use_cache=False)
    aux = torch.cat([output.hidden_states[i + 1] for i in aux_ids], dim=-1)
    logits = shift(output.logits)
    mask = MEMBER[logits.argmax(-1)] & shift(loss).bool()
    return aux, logits.argmax(-1), torch.softmax(logits[..., SELECTED].float(), -1), mask.unsqueeze(-1)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("aux_ids", [None, [5, 0, 3]], ids=["default ids", "unsorted ids"])
def test_supervision_equals_transformers(pair, shape, aux_ids):
    runner, hf = pair
    ids, attention, loss = make_rows(shape)
    backend = RunnerBackend(runner, aux_ids)
    backend.set_vocab_mapping(SELECTED, MEMBER)
    batch = backend.generate_batch(ids, attention, loss)
    aux, _, probs, mask = reference(hf.model, ids, attention, loss, aux_ids or [1, 3, 4])

    real = attention.bool()
    assert batch.aux_hidden_states.shape == aux.shape
    torch.testing.assert_close(batch.aux_hidden_states[real], aux[real], atol=1e-3, rtol=0)
    assert not batch.aux_hidden_states[~real].any()
    assert torch.equal(batch.position_mask, mask)
    supervised = mask.squeeze(-1)
    torch.testing.assert_close(batch.target_probs[supervised], probs[supervised], atol=1e-3, rtol=0)
    assert torch.equal(batch.input_ids, shift(ids))
    assert torch.equal(batch.loss_mask, shift(loss))
    assert torch.equal(batch.attention_mask, attention)
    if shape == SHAPES["equal"]:
        assert supervised.sum() > 5, "the case must supervise something"


def test_argmax_and_logits_equal_transformers(pair):
    runner, hf = pair
    tokens = torch.randint(0, VOCAB, (57,), generator=torch.Generator().manual_seed(3))
    runner.set_aux_layers([1, 3, 4])
    logits = runner.head()(runner.forward(tokens, [57]).last)
    with torch.no_grad():
        expected = hf.model(tokens[None]).logits[0]
    assert logits.shape == (57, VOCAB)
    torch.testing.assert_close(logits, expected, atol=1e-3, rtol=0)
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))


def test_every_layer_is_the_layer_it_says(pair):
    runner, hf = pair
    tokens = torch.randint(0, VOCAB, (21,), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        states = hf.model(tokens[None], output_hidden_states=True).hidden_states
    for i in range(7):
        runner.set_aux_layers([i])
        aux = runner.forward(tokens, [21]).aux
        torch.testing.assert_close(aux, states[i + 1][0], atol=1e-3, rtol=0)


def test_sequences_do_not_see_each_other(pair):
    runner, _ = pair
    runner.set_aux_layers([1, 3, 4])
    tokens = torch.randint(0, VOCAB, (60,), generator=torch.Generator().manual_seed(5))
    together = runner.forward(tokens, [11, 1, 48])
    apart = [runner.forward(part, [len(part)]) for part in tokens.split([11, 1, 48])]
    torch.testing.assert_close(together.aux, torch.cat([s.aux for s in apart]), atol=1e-4, rtol=0)
    torch.testing.assert_close(together.last, torch.cat([s.last for s in apart]), atol=1e-4, rtol=0)


def test_repeat_runs_are_bit_identical_whatever_ran_between(pair):
    runner, _ = pair
    runner.set_aux_layers([1, 3, 4])
    generator = torch.Generator().manual_seed(6)
    tokens = torch.randint(0, VOCAB, (50,), generator=generator)
    first = runner.forward(tokens, [20, 30])
    for lengths in ([3], [7, 9, 1, 2], [64], [1]):
        runner.forward(torch.randint(0, VOCAB, (sum(lengths),), generator=generator), lengths)
    again = runner.forward(tokens, [20, 30])
    assert torch.equal(first.aux, again.aux)
    assert torch.equal(first.last, again.last)


def test_embeddings_are_the_targets_without_padding(pair):
    runner, hf = pair
    assert runner.input_embeddings().shape == (VOCAB, 64)
    assert torch.equal(runner.input_embeddings(), hf.input_embeddings())


def test_states_can_be_trained_on(pair):
    """Inference tensors or an autograd history would break or slow the draft's backward."""
    runner, _ = pair
    runner.set_aux_layers([1, 3, 4])
    aux = runner.forward(torch.arange(9), [9]).aux
    assert not aux.is_inference()
    assert not aux.requires_grad
    layer = torch.nn.Linear(aux.shape[-1], 2)
    layer(aux).sum().backward()
    assert layer.weight.grad is not None
