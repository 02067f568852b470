"""What is asked of a sequence, as SGLang's own request id: it is all of a request that reaches every worker's forward.

A side channel would have to win a race against SGLang's scheduler and to reach the workers of every host; the id is
there already, with the rows that it is of.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

PREFIX = "eagle3"
ROWS = ("native", "fp8")
# Numbers of so many digits hold any context, and no array of so many indices is a burden.
_NUMBER = r"\d{1,8}"
_RUN = rf"{_NUMBER}\+{_NUMBER}"
_FORM = re.compile(
    rf"{PREFIX}:(?P<name>[0-9a-f]+):(?P<rows>{'|'.join(ROWS)}):(?P<length>{_NUMBER}):(?P<runs>({_RUN}(,{_RUN})*)?)\Z",
    re.ASCII,
)


@dataclass(frozen=True)
class Ask:
    """One sequence.

    Attributes:
        name: Hexadecimal, unique in the server's life.
        length: Tokens.
        supervised: ``[P]`` int64, ascending indices into the sequence.
        rows: ``native``: as the target computes them. ``fp8``: E4M3 with a scale per state.
    """

    name: str
    length: int
    supervised: np.ndarray
    rows: str = "native"

    def rid(self) -> str:
        """Return the request id: supervised tokens as runs, which chats have few of."""
        runs = ",".join(f"{start}+{count}" for start, count in _runs(self.supervised))
        return f"{PREFIX}:{self.name}:{self.rows}:{self.length}:{runs}"


def parse(rid: str) -> Ask | None:
    """Return what :meth:`Ask.rid` was made of; ``None`` for anybody else's id."""
    found = _FORM.match(rid)
    if found is None:
        return None
    length, end = int(found["length"]), -1
    runs = []
    for run in found["runs"].split(",") if found["runs"] else []:
        start, count = map(int, run.split("+"))
        if start <= end or not count or start + count > length:
            return None
        end = start + count
        runs.append((start, count))
    return Ask(found["name"], length, _indices(runs), found["rows"]) if length else None


def _runs(indices: np.ndarray) -> list[tuple[int, int]]:
    if not len(indices):
        return []
    parts = np.split(indices, np.flatnonzero(np.diff(indices) != 1) + 1)
    return [(int(part[0]), len(part)) for part in parts]


def _indices(runs: Iterable[tuple[int, int]]) -> np.ndarray:
    parts = [np.arange(start, start + count) for start, count in runs]
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
