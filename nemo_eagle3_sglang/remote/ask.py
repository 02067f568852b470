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
_FORM = re.compile(rf"{PREFIX}:(?P<name>[0-9a-f]+):(?P<rows>[a-z0-9]+):(?P<length>\d+):(?P<runs>[\d+,]*)\Z", re.ASCII)


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
    runs = (run.split("+") for run in found["runs"].split(",") if run)
    return Ask(found["name"], int(found["length"]), _indices((int(a), int(b)) for a, b in runs), found["rows"])


def _runs(indices: np.ndarray) -> list[tuple[int, int]]:
    if not len(indices):
        return []
    parts = np.split(indices, np.flatnonzero(np.diff(indices) != 1) + 1)
    return [(int(part[0]), len(part)) for part in parts]


def _indices(runs: Iterable[tuple[int, int]]) -> np.ndarray:
    parts = [np.arange(start, start + count) for start, count in runs]
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
