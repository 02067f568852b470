"""The files of a run, ``metrics.jsonl`` and ``run.jsonl``, as the report needs them.

Whatever is in the files is taken for a stranger's: a line, a key or a value that cannot be used is left out, counted,
and said in :attr:`Run.notes`.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_eagle3_sglang.errors import ConfigError

METRICS, STARTS = "metrics.jsonl", "run.jsonl"
# Of a configuration; AutoModel's are at most 4 deep.
MAX_DEPTH = 10
ACCEPTANCE = re.compile(r"(train|val)/acceptance_([1-9]\d?)")
DRAWN = {
    *("step", "tokens", "time", "train/epoch"),
    *(f"{part}/{name}" for part in ("train", "val") for name in ("loss", "accuracy", "tau_sim")),
    *(f"train/time_{name}" for name in ("target", "draft", "data")),
    *(f"train/{name}" for name in ("tokens_per_second", "peak_memory_gib", "lr", "grad_norm", "mfu", "tau_real")),
}


@dataclass(frozen=True)
class Run:
    """What one run left.

    Attributes:
        name: Its folder's name, with as many parents as tell it from the other runs.
        points: Lines of ``metrics.jsonl`` in order, each step once; ``step`` and ``tokens`` are numbers in all.
        starts: Lines of ``run.jsonl`` of the run and its resumptions; empty for a run of an older version.
        notes: What was left out, for the reader of the report.
    """

    name: str
    points: Sequence[Mapping[str, Any]]
    starts: Sequence[Mapping[str, Any]] = ()
    notes: Sequence[str] = ()

    def series(self, key: str) -> tuple[list[float], list[float]]:
        """Return tokens and values of the points that have ``key``; a value that is no finite number is a NaN."""
        points = [point for point in self.points if key in point]
        return [number(point["tokens"]) for point in points], [number(point[key]) for point in points]

    def last(self, key: str) -> float:
        """Return the last finite value of ``key``, or NaN."""
        return next((value for value in reversed(self.series(key)[1]) if math.isfinite(value)), math.nan)

    def first(self, key: str) -> float:
        """Return the first finite value of ``key``, or NaN."""
        return next((value for value in self.series(key)[1] if math.isfinite(value)), math.nan)

    def positions(self, part: str) -> list[int]:
        """Return the drafted positions for which ``part`` (``train`` or ``val``) has an acceptance, in order."""
        found = (ACCEPTANCE.fullmatch(key) for point in self.points for key in point)
        return sorted({int(match[2]) for match in found if match and match[1] == part})

    @property
    def start(self) -> Mapping[str, Any]:
        """The last start, or nothing."""
        return self.starts[-1] if self.starts else {}

    def flat(self, section: str) -> dict[str, Any]:
        """Return a section of the last start with dotted keys."""
        return flatten(self.start.get(section))


def read_runs(folders: Iterable[str | Path]) -> list[Run]:
    """Read the runs of ``folders`` in their order.

    Raises:
        ConfigError: A folder is given twice, is none, or holds no ``metrics.jsonl`` with something to draw.
    """
    paths = [Path(folder) for folder in folders]
    for path in paths:
        _check(path)
    resolved = [path.resolve() for path in paths]
    for path, count in Counter(resolved).items():
        if count > 1:
            raise ConfigError(f"RUN_DIR {path} is given {count} times; give each run once")
    return [_read(path, name) for path, name in zip(resolved, _names(resolved), strict=True)]


def _check(folder: Path) -> None:
    if not folder.exists():
        raise ConfigError(f"RUN_DIR {folder} does not exist; give the output_dir of a run")
    if not folder.is_dir():
        raise ConfigError(f"RUN_DIR {folder} is a file; give the folder it is in, the output_dir of a run")
    if not (folder / METRICS).is_file():
        raise ConfigError(
            f"RUN_DIR {folder} holds no {METRICS}; give the output_dir of a run that has reached a log point"
        )


def _names(folders: Sequence[Path]) -> list[str]:
    """Return for each folder its name, led by the parents that two of one name need."""

    def name(folder: Path, depth: int) -> str:
        return "/".join(folder.parts[-depth:])

    depths = [1] * len(folders)
    for _ in range(max(len(folder.parts) for folder in folders)):
        names = [name(folder, depth) for folder, depth in zip(folders, depths, strict=True)]
        count = Counter(names)
        depths = [depth + (count[given] > 1) for given, depth in zip(names, depths, strict=True)]
    return [name(folder, depth) for folder, depth in zip(folders, depths, strict=True)]


def _read(folder: Path, name: str) -> Run:
    lines, broken = _lines(folder / METRICS)
    usable = [line for line in lines if _is_point(line)]
    notes = []
    if broken:
        notes.append(f"{broken} {_plural(broken, 'line')} of {METRICS} cut off or no JSON, left out")
    if unusable := len(lines) - len(usable):
        notes.append(f"{unusable} {_plural(unusable, 'line')} of {METRICS} without step and tokens, left out")
    points = _once(usable)
    if repeated := len(usable) - len(points):
        notes.append(f"{repeated} {_plural(repeated, 'log point')} that a resumed run logged again, drawn once")
    if not any(key in DRAWN and key.startswith(("train/", "val/")) for point in points for key in point):
        raise ConfigError(
            f"{folder / METRICS} holds no log point ({'; '.join(notes) or 'it is empty'}); a run writes its first "
            "after recipe_args.log_every_steps steps"
        )
    starts: list[dict[str, Any]] = []
    if (folder / STARTS).is_file():
        found, broken = _lines(folder / STARTS)
        starts = _starts([line for line in found if _finite(line.get("step"))])
        if broken:
            notes.append(f"{broken} {_plural(broken, 'line')} of {STARTS} cut off or no JSON, left out")
    else:
        notes.append(f"no {STARTS}: configuration, versions and memory plan are not known")
    return Run(name, points, starts, [*notes, *_odd_values(points), *_unknown_keys(points)])


def _lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the objects of a file of JSON lines, and how many other lines it has."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    found, broken = [], 0
    for line in raw.splitlines():
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            # No JSON, no UTF-8, or nested without end.
            value = None
        if isinstance(value, dict):
            found.append(value)
        else:
            broken += 1
    return found, broken


def _is_point(line: Mapping[str, Any]) -> bool:
    return _finite(line.get("step")) and _finite(line.get("tokens"))


def _once(points: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Leave out what was logged before a resumption and came again after it.

    A run moves such lines away itself (``training/meter.py``); files that were put together by hand, or written by an
    older version, have them.
    """
    kept: list[dict[str, Any]] = []
    for point in points:
        while kept and kept[-1]["step"] > point["step"]:
            kept.pop()
        same = len(kept)
        while same and kept[same - 1]["step"] == point["step"]:
            same -= 1
        # An evaluation follows the training record of its step, and goes with it.
        again = (i for i in range(same, len(kept)) if _kind(kept[i]) == _kind(point) != "other")
        del kept[next(again, len(kept)) :]
        kept.append(point)
    return kept


def _kind(point: Mapping[str, Any]) -> str:
    return next((part for part in ("train", "val") if f"{part}/loss" in point), "other")


def _starts(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the starts that led to the run: one at step s puts an end to those that began at s or later."""
    kept: list[dict[str, Any]] = []
    for line in lines:
        kept = [old for old in kept if old["step"] < line["step"]]
        kept.append(line)
    return kept


def _odd_values(points: Iterable[Mapping[str, Any]]) -> list[str]:
    odd = Counter(
        key
        for point in points
        for key, value in point.items()
        if (key in DRAWN or ACCEPTANCE.fullmatch(key)) and not _finite(value)
    )
    return [f"{key}: {count} {_plural(count, 'value')} no finite number, not drawn" for key, count in odd.items()]


def _unknown_keys(points: Iterable[Mapping[str, Any]]) -> list[str]:
    unknown = sorted({key for point in points for key in point if key not in DRAWN and not ACCEPTANCE.fullmatch(key)})
    return [f"not drawn: {', '.join(unknown)}"] if unknown else []


def number(value: Any) -> float:
    """Return ``value`` as a float, NaN for what is no finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        found = float(value)
    except OverflowError:
        return math.nan
    return found if math.isfinite(found) else math.nan


def _finite(value: Any) -> bool:
    return math.isfinite(number(value))


def flatten(value: Any, prefix: str = "", depth: int = MAX_DEPTH) -> dict[str, Any]:
    """Return a nested mapping with dotted keys; an empty one has none, what is nested deeper than ``depth`` is cut."""
    if not isinstance(value, Mapping):
        return {prefix: value} if prefix else {}
    if depth == 0:
        return {prefix: "…"}
    return {
        key: leaf
        for name, part in value.items()
        for key, leaf in flatten(part, f"{prefix}.{name}" if prefix else str(name), depth - 1).items()
    }


def _plural(count: int, word: str) -> str:
    return word if count == 1 else word + "s"
