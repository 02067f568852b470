"""The unrolled attention against one softmax over all columns, in float64."""

from __future__ import annotations

import pytest
import torch

from nemo_eagle3_sglang.training.attention import Bounds, unrolled_attention

HEADS, DIM = 4, 3


def bounds(query_lengths: list[int], slot_lengths: list[int]) -> Bounds:
    def cumulative(lengths: list[int]) -> torch.Tensor:
        return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)

    return Bounds(cumulative(query_lengths), cumulative(slot_lengths), query_lengths, slot_lengths)


def naive(query, key, value, keys, values, slots, document, scale):
    """One softmax a chain: the document's keys up to its own slot, then its own later ones."""
    out = []
    for chain, slot in enumerate(slots):
        seen = [s for s in range(key.shape[0]) if document[s] == document[slot] and s <= slot]
        heads = []
        for head in range(HEADS):
            group = head // (HEADS // key.shape[1])
            columns = torch.cat([key[seen, group], *(k[chain, group][None] for k in keys)])
            rows = torch.cat([value[seen, group], *(v[chain, group][None] for v in values)])
            heads.append(torch.softmax(columns @ query[chain, head] * scale, dim=0) @ rows)
        out.append(torch.stack(heads))
    return torch.stack(out)


CASES = {
    "every slot is a chain": ([4, 1, 3], [[0, 1, 2, 3], [0], [0, 1, 2]]),
    "the end of each document": ([5, 2], [[3, 4], [1]]),
    "gaps": ([6, 4, 2], [[1, 2, 5], [0, 3], [1]]),
}


def setup(case: str, later: int, groups: int = 2, seed: int = 0):
    slot_lengths, chosen = CASES[case]
    starts = [sum(slot_lengths[:i]) for i in range(len(slot_lengths))]
    slots = [start + s for start, part in zip(starts, chosen, strict=True) for s in part]
    document = [i for i, n in enumerate(slot_lengths) for _ in range(n)]
    query_lengths = [n - part[0] for n, part in zip(slot_lengths, chosen, strict=True)]
    query_starts = [sum(query_lengths[:i]) for i in range(len(query_lengths))]
    queries = [q + s - part[0] for q, part in zip(query_starts, chosen, strict=True) for s in part]
    generator = torch.Generator().manual_seed(seed)

    def draw(rows: int, heads: int) -> torch.Tensor:
        return torch.randn(rows, heads, DIM, generator=generator, dtype=torch.float64).requires_grad_()

    tensors = [draw(len(slots), HEADS), draw(len(document), groups), draw(len(document), groups)]
    tensors += [draw(len(slots), groups) for _ in range(2 * later)]
    dense = sum(query_lengths) == len(slots)
    return tensors, bounds(query_lengths, slot_lengths), None if dense else torch.tensor(queries), slots, document


@pytest.mark.parametrize("later", [0, 1, 2, 3, 4, 5, 9])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("groups", [1, 2, HEADS])
def test_equal_to_one_softmax(case, later, groups):
    tensors, limits, queries, slots, document = setup(case, later, groups)
    query, key, value, *rest = tensors
    keys, values = rest[:later], rest[later:]
    got = unrolled_attention(query, key, value, keys, values, limits, queries, 0.7)
    want = naive(query, key, value, keys, values, slots, document, 0.7)
    assert torch.allclose(got, want, atol=1e-12)
    weights = torch.randn(got.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    for a, b in zip(
        torch.autograd.grad((got * weights).sum(), tensors),
        torch.autograd.grad((want * weights).sum(), tensors),
        strict=True,
    ):
        assert torch.allclose(a, b, atol=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_gradients_numerically(case):
    tensors, limits, queries, *_ = setup(case, 2)

    def function(query, key, value, *rest):
        return unrolled_attention(query, key, value, rest[:2], rest[2:], limits, queries, 0.5)

    assert torch.autograd.gradcheck(function, tensors, fast_mode=True)


def test_documents_do_not_see_one_another():
    tensors, limits, queries, *_ = setup("every slot is a chain", 1)
    query, key, value, k, v = (x.detach() for x in tensors)
    before = unrolled_attention(query, key, value, [k], [v], limits, queries, 0.5)
    key, value = key.clone(), value.clone()
    key[4:], value[4:] = 99.0, -99.0
    after = unrolled_attention(query, key, value, [k], [v], limits, queries, 0.5)
    assert torch.equal(before[:4], after[:4])
    assert not torch.equal(before[4:], after[4:])


@pytest.mark.parametrize("case", CASES)
def test_no_gradient_crosses_from_one_document_to_another(case):
    """The loss is taken in the last document alone: exactly zero in every other."""
    tensors, limits, queries, slots, document = setup(case, 2)
    query, key, value, *rest = tensors
    out = unrolled_attention(query, key, value, rest[:2], rest[2:], limits, queries, 0.5)
    in_last = torch.tensor([document[slot] == document[-1] for slot in slots])
    of_chains = [query, *rest]
    grads = torch.autograd.grad(out[in_last].square().sum(), [key, value, *of_chains])
    elsewhere = torch.tensor([d != document[-1] for d in document])
    for grad in grads[:2]:
        assert not grad[elsewhere].any()
        assert grad[~elsewhere].any()
    for grad in grads[2:]:
        assert not grad[~in_last].any()
        assert grad[in_last].any()


def test_query_slots_that_are_all_chains_may_be_named():
    """The spread path gives what the dense path gives, bit for bit."""
    tensors, limits, queries, slots, _ = setup("every slot is a chain", 2)
    assert queries is None
    query, key, value, *rest = tensors
    results = []
    for places in (None, torch.arange(len(slots))):
        out = unrolled_attention(query, key, value, rest[:2], rest[2:], limits, places, 0.5)
        results.append([out, *torch.autograd.grad(out.square().sum(), tensors)])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_scores_of_a_thousand():
    """One column takes all of the weight; a softmax that is not rescaled would overflow."""
    tensors, limits, queries, slots, document = setup("gaps", 2)
    tensors = [(t * (30 if i != 2 else 1)).detach().requires_grad_() for i, t in enumerate(tensors)]
    query, key, value, *rest = tensors
    got = unrolled_attention(query, key, value, rest[:2], rest[2:], limits, queries, 1.0)
    want = naive(query, key, value, rest[:2], rest[2:], slots, document, 1.0)
    torch.testing.assert_close(got, want, atol=1e-9, rtol=1e-9)
    for a, b in zip(torch.autograd.grad(got.sum(), tensors), torch.autograd.grad(want.sum(), tensors), strict=True):
        torch.testing.assert_close(a, b, atol=1e-8, rtol=1e-8)
