"""The draft-vocabulary distribution: chunked, and never more than asked for."""

from __future__ import annotations

import pytest
import torch

from nemo_eagle3_sglang.supervision import head as head_module
from nemo_eagle3_sglang.supervision.head import distribution, draft_targets

HIDDEN, VOCAB = 6, 41


class IntegerHead:
    """A head of small whole numbers, so that no shape of GEMM can round differently; notes how it was called."""

    def __init__(self, dtype: torch.dtype = torch.float32, vocab: int = VOCAB) -> None:
        self.weight = torch.randint(-3, 4, (vocab, HIDDEN), generator=torch.Generator().manual_seed(1)).to(dtype)
        self.rows: list[int] = []

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        self.rows.append(hidden.shape[0])
        return hidden @ self.weight.T


def states(positions: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randint(-3, 4, (positions, HIDDEN), generator=torch.Generator().manual_seed(2)).to(dtype)


def mapping(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(3))[:size]
    return ids, torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, ids, True)


def draft_distribution(*args) -> tuple[torch.Tensor, torch.Tensor]:
    targets = draft_targets(*args)
    return distribution(targets), targets.in_draft_vocab


def reference(head: IntegerHead, hidden: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    logits = hidden @ head.weight.T
    return torch.softmax(logits[:, ids].float(), dim=-1), torch.isin(logits.argmax(dim=-1), ids)


@pytest.mark.parametrize("positions", [1, 2, 41, 401])
@pytest.mark.parametrize("size", [1, 17, VOCAB])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_the_full_projection_bit_for_bit(monkeypatch, positions, size, dtype):
    # 13 positions a chunk: the last chunk is a rest.
    monkeypatch.setattr(head_module, "CHUNK_BYTES", 13 * VOCAB * dtype.itemsize)
    head, hidden, (ids, mask) = IntegerHead(dtype), states(positions, dtype), mapping(size)
    probs, member = draft_distribution(head, hidden, ids, mask)
    expected_probs, expected_member = reference(head, hidden, ids)
    assert probs.dtype == torch.float32
    assert torch.equal(probs, expected_probs)
    assert torch.equal(member, expected_member)
    assert head.rows == [13] * (positions // 13) + [positions % 13] * bool(positions % 13)


def test_argmax_is_over_the_whole_vocabulary():
    """Position 0's best token is outside the draft vocabulary, position 1's inside; the softmax is inside for both."""
    logits = torch.tensor([[1.0, 9.0, 2.0, 0.0], [1.0, 0.0, 5.0, 0.0]])
    ids = torch.tensor([2, 0])
    mask = torch.tensor([True, False, True, False])
    probs, member = draft_distribution(lambda hidden: hidden, logits, ids, mask)
    assert member.tolist() == [False, True]
    torch.testing.assert_close(probs, torch.softmax(logits[:, [2, 0]], dim=-1), atol=0, rtol=0)


def test_one_position_at_a_time_when_a_row_is_larger_than_a_chunk(monkeypatch):
    monkeypatch.setattr(head_module, "CHUNK_BYTES", 1)
    head = IntegerHead()
    probs, _ = draft_distribution(head, states(3), *mapping(5))
    assert head.rows == [1, 1, 1]
    assert probs.shape == (3, 5)


def test_a_chunk_fits_its_bytes():
    """A vocabulary of 150,000 in fp32: 223 positions in 128 MiB."""
    assert head_module.CHUNK_BYTES // (150_000 * 4) == 223


def test_no_positions_no_projection():
    head = IntegerHead()
    probs, member = draft_distribution(head, states(0), *mapping(5))
    assert probs.shape == (0, 5)
    assert member.shape == (0,)
    assert head.rows == []


def test_a_head_of_another_vocabulary_is_refused():
    """An engine that leaves its padding on (41 -> 64 rows) would give the argmax of a row that is no token."""
    with pytest.raises(ValueError, match="head gives 64 logits, the vocabulary mapping was made for 41"):
        draft_distribution(IntegerHead(vocab=64), states(2), *mapping(5))


@pytest.mark.parametrize("positions", [0, 1, 41])
@pytest.mark.parametrize("size", [1, 17, VOCAB])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 7, 1000])
def test_targets_hold_the_same_distribution(monkeypatch, positions, size, dtype, rows):
    monkeypatch.setattr(head_module, "CHUNK_BYTES", rows * VOCAB * 4)
    head, hidden, (ids, mask) = IntegerHead(dtype), states(positions, dtype), mapping(size)
    targets = draft_targets(head, hidden, ids, mask)
    probs, member = draft_distribution(head, hidden, ids, mask)
    assert targets.logits.shape == (positions, size)
    assert torch.allclose(torch.exp(targets.logits.float() - targets.lse[:, None]), probs, atol=1e-6)
    assert torch.equal(targets.choices, probs.argmax(-1))
    assert torch.equal(targets.in_draft_vocab, member)
    assert targets.lse.dtype == torch.float32
    if positions:
        assert targets.logits.dtype == head(hidden[:1]).dtype, "bf16 logits are kept as they are"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_targets_lose_nothing_of_the_heads_logits(monkeypatch, dtype):
    """No whole numbers: bf16 logits bit for bit, and a log-sum-exp good to float32."""
    generator = torch.Generator().manual_seed(4)
    hidden, (ids, mask) = torch.randn(23, HIDDEN, generator=generator).to(dtype), mapping(17)
    weight = torch.randn(VOCAB, HIDDEN, generator=generator).to(dtype)
    monkeypatch.setattr(head_module, "CHUNK_BYTES", 1)
    seen: list[torch.Tensor] = []

    def head(part: torch.Tensor) -> torch.Tensor:
        seen.append(part @ weight.T)
        return seen[-1].clone()

    targets = draft_targets(head, hidden, ids, mask)
    logits = torch.cat(seen)
    assert len(seen) == 23
    assert targets.logits.dtype == dtype
    assert torch.equal(targets.logits, logits[:, ids])
    torch.testing.assert_close(targets.lse, torch.logsumexp(logits[:, ids].double(), -1).float(), atol=1e-6, rtol=1e-6)


def test_targets_without_positions_run_no_head():
    head = IntegerHead(torch.bfloat16)
    targets = draft_targets(head, states(0, torch.bfloat16), *mapping(5))
    assert head.rows == []
    assert [tuple(x.shape) for x in vars(targets).values()] == [(0, 5), (0,), (0,), (0,)]


def test_targets_of_a_head_of_another_vocabulary_are_refused():
    with pytest.raises(ValueError, match="head gives 64 logits, the vocabulary mapping was made for 41"):
        draft_targets(IntegerHead(vocab=64), states(2), *mapping(5))
