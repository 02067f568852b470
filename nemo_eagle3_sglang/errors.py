"""The one exception that says: the user can mend this."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ConfigError(ValueError):
    """Something the user asked for cannot be; the message says what, with its value, and what to write instead."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `` (did you mean 'x'?)`` for the nearest of ``known``, or an empty string when none is near."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" (did you mean {near[0]!r}?)" if near else ""


class CaptureError(RuntimeError):
    """The engine's forward does not yield what training needs; going on would train on wrong hidden states."""
