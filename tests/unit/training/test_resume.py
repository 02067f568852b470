"""The position in the data: what is left of an epoch, with the same ranks and with others."""

from __future__ import annotations

import itertools
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from nemo_eagle3_sglang.errors import ConfigError
from nemo_eagle3_sglang.training import resume

MICRO_BATCH, ACCUMULATION = 2, 3


class Rows(Dataset):
    """Rows that say which were rendered."""

    def __init__(self, count: int, first_token: int = 0) -> None:
        self.count, self.first_token, self.rendered = count, first_token, []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        self.rendered.append(index)
        return {"input_ids": [self.first_token + index, 7], "loss_mask": [0, 1]}


def collate(rows: list[dict[str, list[int]]]) -> list[int]:
    return [row["input_ids"][0] for row in rows]


class Run:
    """One rank's loader, trained as AutoModel does: whole windows, then a shorter one."""

    def __init__(self, data: Dataset, ranks: int = 1, rank: int = 0, **changes: Any) -> None:
        own = {"micro_batch": MICRO_BATCH, "accumulation": ACCUMULATION, "seed": 42, "shuffle": True, "workers": 0}
        own |= changes
        sampler = DistributedSampler(data, ranks, rank, shuffle=own["shuffle"]) if ranks > 1 else None
        given = DataLoader(
            data,
            own["micro_batch"],
            shuffle=own["shuffle"] and sampler is None,
            sampler=sampler,
            collate_fn=collate,
            num_workers=own["workers"],
            persistent_workers=own["workers"] > 0,
        )
        self.step, self.accumulation = 0, own["accumulation"]
        self.loader = resume.resumable(given, seed=own["seed"], accumulation=self.accumulation, step=lambda: self.step)
        self.sampler = self.loader.sampler

    def windows(self, epoch: int) -> list[list[list[int]]]:
        """Train an epoch and return the micro-batches of each optimizer step."""
        return list(self.train(epoch))

    def train(self, epoch: int):
        self.loader.sampler.set_epoch(epoch)
        self.length = len(self.loader)
        batches = iter(self.loader)
        while window := list(itertools.islice(batches, self.accumulation)):
            self.step += 1
            yield window


def flat(windows: list[list[list[int]]]) -> list[int]:
    return [row for window in windows for batch in window for row in batch]


def resumed(position: resume.Position, data: Dataset, folder: Path, **kwargs: Any) -> Run:
    run = Run(data, **kwargs)
    resume.write(folder, position)
    assert resume.restore(folder, run.sampler) == position
    return run


def stop_after(run: Run, steps: int, epoch: int = 0) -> list[Any]:
    return list(itertools.islice(run.train(epoch), steps))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("rows", [24, 25, 29])
def test_a_resumed_run_trains_what_is_left(tmp_path, rows, workers):
    whole, first = Run(Rows(rows), workers=workers), Run(Rows(rows), workers=workers)
    expected = [whole.windows(0), whole.windows(1)]
    full_length = whole.length
    assert stop_after(first, 2) == expected[0][:2]
    position = first.sampler.position(0, tokens=5)
    assert position.rows == 2 * MICRO_BATCH * ACCUMULATION
    second = resumed(position, Rows(rows), tmp_path, workers=workers)
    assert second.windows(0) == expected[0][2:]
    assert second.length == full_length - 2 * ACCUMULATION, "AutoModel finds the last micro-batch by it"
    assert second.windows(1) == expected[1], "no later epoch is cut"
    assert second.length == full_length


def test_the_length_is_whole_until_a_checkpoint_is_restored():
    run = Run(Rows(25))
    assert len(run.loader) == 13


def test_rows_that_were_trained_on_are_not_rendered(tmp_path):
    first = Run(Rows(24))
    stop_after(first, 2)
    position = first.sampler.position(0, 0)
    data = Rows(24)
    second = resumed(position, data, tmp_path)
    data.rendered.clear()
    second.windows(0)
    assert len(data.rendered) == 24 - position.rows


def test_a_resumed_run_is_resumed_again(tmp_path):
    expected = Run(Rows(40)).windows(0)
    first = Run(Rows(40))
    stop_after(first, 2)
    second = resumed(first.sampler.position(0, 0), Rows(40), tmp_path)
    assert stop_after(second, 2) == expected[2:4]
    third = resumed(second.sampler.position(0, 0), Rows(40), tmp_path)
    assert third.windows(0) == expected[4:]


@pytest.mark.parametrize("rows", [24, 25])
def test_a_checkpoint_of_the_last_step_leaves_nothing(tmp_path, rows):
    """Its last window may be a shorter one; the epoch's evaluation and checkpoint are still to come."""
    first = Run(Rows(rows))
    first.windows(0)
    position = first.sampler.position(0, 0)
    assert position.epoch_done
    second = resumed(position, Rows(rows), tmp_path)
    assert second.windows(0) == []
    assert second.length == 0
    assert second.sampler.position(0, 0).epoch_done
    assert second.windows(1) == Run(Rows(rows)).windows(1)


def test_a_checkpoint_that_ends_an_epoch_starts_the_next_at_its_first_row(tmp_path):
    first = Run(Rows(24))
    first.windows(0)
    position = first.sampler.position(1, 0)
    assert position.rows == 0
    assert not position.epoch_done
    assert resumed(position, Rows(24), tmp_path).windows(1) == Run(Rows(24)).windows(1)


def test_batches_handed_out_ahead_are_not_trained():
    run = Run(Rows(40))
    run.sampler.set_epoch(0)
    batches = iter(run.loader)
    for _ in range(ACCUMULATION + 2):
        next(batches)
    run.step = 1
    assert run.sampler.position(0, 0).rows == MICRO_BATCH * ACCUMULATION


def test_the_global_generator_is_left_alone():
    """AutoModel restores it to where the checkpoint was; an iterator that is made once more would move it."""
    torch.manual_seed(3)
    before = torch.get_rng_state()
    Run(Rows(24)).windows(0)
    assert torch.equal(torch.get_rng_state(), before)


def test_epochs_and_seeds_have_their_own_order():
    orders = [Run(Rows(24)).windows(0), Run(Rows(24)).windows(1), Run(Rows(24), seed=7).windows(0)]
    rows = [flat(order) for order in orders]
    assert all(sorted(order) == list(range(24)) for order in rows)
    assert len({tuple(order) for order in rows}) == 3
    unshuffled = Run(Rows(24), shuffle=False).windows(0)
    assert flat(unshuffled) == list(range(24))


def test_several_ranks_deal_out_the_order_of_one():
    one = flat(Run(Rows(24)).windows(0))
    for rank in range(3):
        assert flat(Run(Rows(24), ranks=3, rank=rank).windows(0)) == one[rank::3]


def trained(runs: list[Run], steps: int | None = None) -> set[int]:
    return {row for run in runs for row in flat(run.windows(0) if steps is None else stop_after(run, steps))}


@pytest.mark.parametrize("rows", [96, 97, 103])
@pytest.mark.parametrize(("then", "now"), [(1, 2), (2, 1), (2, 2), (3, 2)])
def test_with_other_ranks_no_row_is_left_out(tmp_path, caplog, rows, then, now):
    first = [Run(Rows(rows), ranks=then, rank=rank) for rank in range(then)]
    before = trained(first, 3)
    position = first[0].sampler.position(0, 0)
    assert position.rows == len(before) == 3 * then * MICRO_BATCH * ACCUMULATION
    with caplog.at_level(logging.WARNING):
        second = [resumed(position, Rows(rows), tmp_path, ranks=now, rank=rank) for rank in range(now)]
    after = trained(second)
    assert before | after == set(range(rows))
    step = now * MICRO_BATCH * ACCUMULATION
    again = position.rows % step
    # The ranks' last rows may be repetitions of the order's first.
    assert again <= len(before & after) <= again + (-rows) % now
    assert (f"An optimizer step was of {then * 6} rows and is of {step}: {again} rows" in caplog.text) == (then != now)


def test_another_micro_batch_and_accumulation_of_the_same_step_go_on_exactly(tmp_path, caplog):
    first = Run(Rows(40))
    stop_after(first, 2)
    with caplog.at_level(logging.WARNING):
        second = resumed(first.sampler.position(0, 0), Rows(40), tmp_path, micro_batch=3, accumulation=2)
    found = [flat([window]) for window in second.windows(0)]
    assert found == [flat([window]) for window in Run(Rows(40)).windows(0)[2:]]
    assert not caplog.text


@pytest.mark.parametrize(
    ("data", "changes", "words"),
    [
        (Rows(41), {}, "rows: 40 -> 41"),
        (Rows(40), {"seed": 7}, "shuffle_seed: 42 -> 7"),
        (Rows(40), {"shuffle": False}, "train_shuffle: True -> False"),
        (Rows(40, first_token=1), {}, "other rows, chat template, seq_length or packed_sequence_size"),
    ],
)
def test_other_data_starts_the_epoch_afresh(tmp_path, caplog, data, changes, words):
    first = Run(Rows(40))
    stop_after(first, 2)
    resume.write(tmp_path, first.sampler.position(0, 0))
    second = Run(data, **changes)
    with caplog.at_level(logging.WARNING):
        assert resume.restore(tmp_path, second.sampler) is None
    assert "The epoch starts at its first row" in caplog.text
    assert words in caplog.text
    assert second.windows(0) == Run(data, **changes).windows(0)


def test_a_checkpoint_of_an_earlier_version_starts_the_epoch_afresh(tmp_path, caplog):
    run = Run(Rows(24))
    with caplog.at_level(logging.WARNING):
        assert resume.restore(tmp_path, run.sampler) is None
    assert f"{tmp_path} keeps no position in the data" in caplog.text
    assert run.windows(0) == Run(Rows(24)).windows(0)


@pytest.mark.parametrize("text", ['{"epoch": 1', json.dumps({"epoch": 1}), "[]"])
def test_a_damaged_position_is_an_error(tmp_path, text):
    (tmp_path / resume.FILE).write_text(text)
    with pytest.raises(ConfigError, match=r"data_position.json cannot be read.*remove it"):
        resume.restore(tmp_path, Run(Rows(24)).sampler)


def test_what_is_written():
    run = Run(Rows(30))
    stop_after(run, 1, epoch=4)
    position = run.sampler.position(4, tokens=12)
    assert (position.epoch, position.rows, position.rows_per_step, position.tokens) == (4, 6, 6, 12)
    assert position.data.keys() == {"rows", "shuffle", "seed", "sample"}
