"""The position in the data: what a checkpoint has been trained on in its epoch, and how a run goes on behind it.

AutoModel keeps the epoch and the optimizer step, and starts a resumed epoch at its first row again. Its order could
not be gone on with either: with one process it is drawn from torch's global generator, whose state in the middle of an
epoch no longer tells it; with several it does not depend on ``shuffle_seed``. Here one permutation of ``seed + epoch``
serves any number of processes: rank r of R takes its rows r, r + R, r + 2R, …, so what R ranks have trained on after
n rows each is its first n * R rows. Rows that were trained on are left out by index and never rendered.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler

from nemo_eagle3_sglang.errors import ConfigError

logger = logging.getLogger(__name__)

FILE = "data_position.json"
# Rows, evenly spaced, by which other data is told from the same.
SAMPLE = 16


@dataclass(frozen=True)
class Position:
    """Where in an epoch a checkpoint stands; what ``data_position.json`` holds.

    Attributes:
        epoch: The epoch that a resumed run starts with.
        rows: First rows of its order that the draft has been trained on, over all ranks.
        rows_per_step: Rows of one optimizer step, over all ranks.
        tokens: Tokens that the run has been trained on, as ``metrics.jsonl`` counts them.
        data: What the order is an order of, see :attr:`ResumableSampler.data`.
    """

    epoch: int
    rows: int
    rows_per_step: int
    tokens: int
    data: dict[str, Any]

    @property
    def epoch_done(self) -> bool:
        """Whether no row of the epoch is left: what remains of it is its evaluation and its checkpoint."""
        return self.rows >= self.data["rows"]


class ResumableSampler(DistributedSampler[Any]):
    """A rank's rows in each epoch's order, less those that a checkpoint has been trained on.

    The position is counted in optimizer steps, not in batches handed out: worker processes and prefetching run ahead
    of what is trained, and a checkpoint is only made between two steps.

    Args:
        dataset: Map-style data set.
        num_replicas: Ranks among which the rows are dealt.
        rank: This one.
        shuffle: Whether the order is a permutation.
        seed: Of the permutation, with the epoch added.
        rows_per_step: Rows of this rank in one optimizer step.
        step: Returns the optimizer steps that the run has done.
    """

    def __init__(
        self,
        dataset: Any,
        num_replicas: int,
        rank: int,
        *,
        shuffle: bool,
        seed: int,
        rows_per_step: int,
        step: Callable[[], int],
    ) -> None:
        super().__init__(dataset, num_replicas=num_replicas, rank=rank, shuffle=shuffle, seed=seed)
        self._own_rows_per_step, self._step = rows_per_step, step
        self._first_step = 0
        self._resumed_epoch, self._behind = 0, 0

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch; AutoModel calls this before it iterates."""
        super().set_epoch(epoch)
        self._first_step = self._step()

    def __iter__(self) -> Iterator[int]:
        """Yield the rows of this rank that are left in the epoch."""
        return islice(super().__iter__(), self._skipped, None)

    def __len__(self) -> int:
        """Return how many are left: AutoModel looks for the epoch's last micro-batch by it."""
        return self.num_samples - self._skipped

    @property
    def _skipped(self) -> int:
        return self._behind if self.epoch == self._resumed_epoch else 0

    @property
    def rows_per_step(self) -> int:
        """Rows of one optimizer step, over all ranks."""
        return self._own_rows_per_step * self.num_replicas

    @cached_property
    def data(self) -> dict[str, Any]:
        """What a position is only right for: number of rows, order, and a digest of some rows as they are trained on.

        The digest stands for the files, the chat template, ``seq_length`` and the packing. A change of single rows
        passes where it leaves their number, since the position is right then as well.
        """
        count, digest = len(self.dataset), hashlib.sha256()
        for index in sorted({i * (count - 1) // (SAMPLE - 1) for i in range(SAMPLE)}):
            row = self.dataset[index]
            digest.update(
                json.dumps([[int(value) for value in row[key]] for key in ("input_ids", "loss_mask")]).encode()
            )
        return {"rows": count, "shuffle": self.shuffle, "seed": self.seed, "sample": digest.hexdigest()}

    def position(self, epoch: int, tokens: int) -> Position:
        """Return where a checkpoint made now stands.

        Args:
            epoch: The epoch that a run resumed from it starts with; the next one when the checkpoint ends an epoch.
            tokens: See :class:`Position`.
        """
        trained = 0
        if epoch == self.epoch:
            steps = self._step() - self._first_step
            # The last step of an epoch may be of fewer rows.
            trained = min(self._skipped + steps * self._own_rows_per_step, self.num_samples)
        # The last rows of the ranks may be repetitions, to make them equally many.
        rows = min(trained * self.num_replicas, len(self.dataset))
        return Position(epoch, rows, self.rows_per_step, tokens, self.data)

    def go_on_behind(self, position: Position) -> int:
        """Leave out what a checkpoint has been trained on, in its epoch; return the rows left out, over all ranks.

        Whole optimizer steps of this run are left out. Those are all its rows, unless a step was of another number.
        """
        steps = position.rows // self.rows_per_step
        behind = self.num_samples if position.epoch_done else steps * self._own_rows_per_step
        self._resumed_epoch, self._behind = position.epoch, behind
        return min(behind * self.num_replicas, position.rows)


def resumable(loader: DataLoader[Any], *, seed: int, accumulation: int, step: Callable[[], int]) -> DataLoader[Any]:
    """Return ``loader`` with a :class:`ResumableSampler` over the same ranks.

    Args:
        loader: AutoModel's, of a map-style data set, with a sampler of one or of several processes.
        seed: ``recipe_args.shuffle_seed``.
        accumulation: Micro-batches of an optimizer step.
        step: Returns the optimizer steps that the run has done.
    """
    was = loader.sampler
    several = isinstance(was, DistributedSampler)
    assert loader.batch_size is not None, "batches are of whole rows"
    sampler = ResumableSampler(
        loader.dataset,
        num_replicas=was.num_replicas if several else 1,
        rank=was.rank if several else 0,
        shuffle=was.shuffle if several else isinstance(was, RandomSampler),
        seed=seed,
        rows_per_step=loader.batch_size * accumulation,
        step=step,
    )
    return DataLoader(
        loader.dataset,
        batch_size=loader.batch_size,
        sampler=sampler,
        collate_fn=loader.collate_fn,
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory,
        drop_last=loader.drop_last,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
        # Its own, so that an iterator that is made once more does not move the global generator, which AutoModel
        # restores to where the checkpoint was.
        generator=torch.Generator().manual_seed(seed),
    )


def write(folder: Path, position: Position) -> None:
    """Write a position into a checkpoint."""
    (folder / FILE).write_text(json.dumps(asdict(position)) + "\n", encoding="utf-8")


def restore(folder: Path, sampler: ResumableSampler) -> Position | None:
    """Let ``sampler`` go on where a checkpoint stands.

    Args:
        folder: The checkpoint.
        sampler: Of the run that is resumed.

    Returns:
        The position; ``None``, with a warning, where the epoch starts afresh: none was kept, or it is of other data.

    Raises:
        ConfigError: The file is not what :func:`write` writes.
    """
    path = folder / FILE
    if not path.is_file():
        logger.warning(
            "%s keeps no position in the data (an earlier version wrote it): the epoch starts at its first row", folder
        )
        return None
    position = _read(path)
    if changed := _changed(position.data, sampler.data):
        logger.warning("The epoch starts at its first row: the position in %s is of other data (%s)", folder, changed)
        return None
    left_out, now = sampler.go_on_behind(position), sampler.rows_per_step
    logger.info("Epoch %d goes on behind its first %d rows", position.epoch, left_out)
    if now != position.rows_per_step:
        logger.warning(
            "An optimizer step was of %d rows and is of %d: %d rows are trained on again, and the learning rate goes "
            "by the number of steps",
            position.rows_per_step,
            now,
            position.rows - left_out,
        )
    return position


def _read(path: Path) -> Position:
    try:
        return Position(**json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"{path} cannot be read: {error}; remove it to start the epoch at its first row, or set "
            "checkpoint.restore_from to another checkpoint"
        ) from error


def _changed(then: dict[str, Any], now: dict[str, Any]) -> str:
    names = {"rows": "rows", "shuffle": "train_shuffle", "seed": "shuffle_seed"}
    changed = [f"{name}: {then.get(key)} -> {now[key]}" for key, name in names.items() if then.get(key) != now[key]]
    if not changed and then.get("sample") != now["sample"]:
        changed = ["other rows, chat template, seq_length or packed_sequence_size"]
    return "; ".join(changed)
