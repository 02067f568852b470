"""The unroll's index sets against loops over the definition."""

from __future__ import annotations

import random

import pytest
import torch

from nemo_eagle3_sglang.supervision.documents import documents
from nemo_eagle3_sglang.supervision.unroll import TENSORS, unroll

CPU = torch.device("cpu")


def batch(seed: int, count: int, loss_share: float):
    """Documents of 1 to 9 tokens in one packed row, no token twice, and the loss of each token."""
    rng = random.Random(seed)
    lengths = [rng.randint(1, 9) for _ in range(count)]
    loss = [[rng.random() < loss_share for _ in range(n)] for n in lengths]
    total = sum(lengths)
    ids = torch.tensor([rng.sample(range(1000), total)])
    mask = torch.ones(1, total, dtype=torch.long)
    return ids, mask, torch.tensor([[int(x) for part in loss for x in part]]), torch.tensor([lengths]), loss


def expected(ids: list[int], loss: list[list[bool]], steps: int) -> dict:
    """Walk every chain of every document."""
    want = {
        "slots": [],
        "next": [],
        "positions": [],
        "chains": [],
        "reads": [[] for _ in range(steps)],
        "pairs": [],
        "queries": [],
    }
    valid_counts, row_start = [0] * steps, 0
    for marks in loss:
        tokens = ids[row_start : row_start + len(marks)]
        row_start += len(marks)
        last = max((i for i, m in enumerate(marks) if m and i), default=None)
        if last is None:
            continue
        base, first = len(want["slots"]), None
        for t in range(last):
            want["slots"].append(tokens[t])
            want["next"].append(tokens[t + 1])
            want["positions"].append(t)
            taught = [t + 1 + k <= last and marks[t + 1 + k] for k in range(steps)]
            if not any(taught):
                continue
            first = t if first is None else first
            chain = len(want["chains"])
            want["chains"].append(base + t)
            for k in range(steps):
                want["reads"][k].append(tokens[t + 1 + k] if t + 1 + k <= last else None)
                if taught[k]:
                    want["pairs"].append((k, chain, tokens[t + 1 + k]))
                valid_counts[k] += all(taught[: k + 1])
        want["queries"].append(last - first)
    want["pairs"].sort(key=lambda pair: pair[:2])
    want["counts"] = valid_counts
    return want


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 12])
@pytest.mark.parametrize("share", [0.15, 0.6, 1.0])
@pytest.mark.parametrize("seed", range(6))
def test_index_sets(steps, share, seed):
    ids, mask, loss_mask, seq_lens, loss = batch(seed, 8, share)
    plan = unroll(documents(ids, mask, loss_mask, seq_lens, trim=True), steps, CPU)
    want = expected(ids[0].tolist(), loss, steps)
    tokens = plan.tokens
    assert tokens[plan.slots].tolist() == want["slots"]
    assert plan.next_ids.tolist() == want["next"]
    assert plan.chains.tolist() == want["chains"]
    assert plan.positions.tolist() == want["positions"]
    assert plan.chain_positions.tolist() == [want["positions"][chain] for chain in want["chains"]]
    for k in range(1, steps):
        for got, read in zip(plan.chain_ids[k - 1].tolist(), want["reads"][k], strict=True):
            assert read is None or got == read
    step, chain = plan.pairs // max(len(want["chains"]), 1), plan.pairs % max(len(want["chains"]), 1)
    targets = tokens[plan.supervised][plan.pair_targets]
    assert list(zip(step.tolist(), chain.tolist(), targets.tolist(), strict=True)) == want["pairs"]
    assert plan.pair_sizes == [sum(pair[0] == k for pair in want["pairs"]) for k in range(steps)]
    assert plan.chain_counts == want["counts"]
    assert plan.query_lengths == want["queries"]
    assert plan.cu_slots.tolist() == [0, *torch.tensor(plan.slot_lengths).cumsum(0).tolist()]
    assert plan.cu_queries.tolist() == [0, *torch.tensor(plan.query_lengths).cumsum(0).tolist()]
    assert plan.total == mask.sum()
    # A chain's query stands as far from its document's last query as its slot from the last slot.
    document = torch.searchsorted(plan.cu_slots, plan.chains, right=True) - 1
    from_end = plan.cu_slots[document + 1] - plan.chains
    assert torch.equal(plan.cu_queries[document + 1] - plan.chain_queries, from_end)
    assert plan.dense == (sum(want["queries"]) == len(want["chains"]))


def test_no_documents():
    ids, mask, loss_mask, seq_lens, _ = batch(0, 3, 0.0)
    plan = unroll(documents(ids, mask, loss_mask, seq_lens, trim=True), 3, CPU)
    assert plan.lengths == []
    assert plan.steps == 3
    assert plan.tokens.numel() == plan.pairs.numel() == 0
    assert plan.chain_ids.shape == (2, 0)
    assert plan.total == mask.sum()


def test_a_chain_written_out():
    """One document of five tokens, taught at the third and fifth, two steps."""
    ids, ones = torch.tensor([[10, 11, 12, 13, 14]]), torch.ones(1, 5, dtype=torch.long)
    plan = unroll(documents(ids, ones, torch.tensor([[0, 0, 1, 0, 1]]), trim=True), 2, CPU)
    # Slot t reads 11 + t, then 12 + t; slots 1 and 3 are taught at their first step, 0 and 2 at their second.
    assert plan.next_ids.tolist() == [11, 12, 13, 14]
    assert plan.chains.tolist() == [0, 1, 2, 3]
    assert plan.chain_ids.tolist() == [[12, 13, 14, 14]]
    assert plan.pairs.tolist() == [1, 3, 4, 6]
    assert plan.pair_targets.tolist() == [0, 1, 0, 1]
    assert plan.pair_sizes == [2, 2]
    assert plan.chain_counts == [2, 0]
    assert plan.dense


def test_tensors_are_int64_but_for_the_bounds():
    """FlashAttention takes its bounds as int32."""
    ids, mask, loss_mask, seq_lens, _ = batch(1, 4, 0.6)
    plan = unroll(documents(ids, mask, loss_mask, seq_lens, trim=True), 3, CPU)
    dtypes = {name: getattr(plan, name).dtype for name in TENSORS}
    assert {name for name, dtype in dtypes.items() if dtype == torch.int32} == {"cu_queries", "cu_slots"}
    assert set(dtypes.values()) == {torch.int32, torch.int64}
