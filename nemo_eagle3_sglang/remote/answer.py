"""What an engine gives for a micro-batch: rows where they lie, and a way to say that they have been read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from nemo_eagle3_sglang.contracts import AuxPlan, Sequences, TargetInfo
from nemo_eagle3_sglang.head_rows import HeadRows


class Busy(RuntimeError):
    """Too much is under way; the same request may succeed later."""


class Refused(RuntimeError):
    """The request cannot be answered, now or later; the message is for the client."""


@dataclass(frozen=True)
class Answer:
    """The rows of a micro-batch.

    Attributes:
        parts: By name of :func:`~nemo_eagle3_sglang.remote.rows.shapes`, the bytes of sequence after sequence.
        release: Says that they have been read; they may be written over then.
    """

    parts: dict[str, list[memoryview]]
    release: Callable[[], None]


@dataclass(frozen=True)
class TargetCard:
    """What a server says of its target.

    Attributes:
        name: Last part of the target's path or hub id.
        engine: Name and version of what runs it.
        info: Dimensions.
        dtype: Of its hidden states.
        limit: Tokens of the longest sequence.
        plan: The aux layers whose states are given, and the ids by which SGLang captures them; ``None`` for the ids as
            they are.
        capture: ``serving`` or ``residual``; see ``recipe_args.capture``.
        config: The target's config.json, the keys that describe the model.
        fingerprint: Of dimensions, aux layers, config.json, embedding and head.
    """

    name: str
    engine: str
    info: TargetInfo
    dtype: torch.dtype
    limit: int
    plan: AuxPlan
    capture: str
    config: dict[str, object]
    fingerprint: str


class TargetEngine(Protocol):
    """What runs the target behind a server's front; its methods are called in one event loop."""

    card: TargetCard

    async def states(self, sequences: Sequences, rows: str) -> Answer:
        """Run the target.

        Raises:
            Busy: See :class:`Busy`.
            Refused: See :class:`Refused`.
        """

    def head_rows(self, token_ids: torch.Tensor) -> HeadRows:
        """Return the head at ``token_ids`` ``[n]`` int64, on the CPU."""

    def input_embeddings(self) -> torch.Tensor:
        """Return the input embedding ``[V, H]`` on the CPU."""

    def alive(self) -> bool:
        """Return whether the engine still runs."""

    def close(self) -> None:
        """End the engine."""


def joined(answers: Sequence[dict[str, memoryview]], release: Callable[[], None]) -> Answer:
    """Return the answer of sequences whose rows lie apart."""
    names = answers[0] if answers else {}
    return Answer({name: [rows[name] for rows in answers] for name in names}, release)
