"""The page: summary, plots, versions and configuration in one HTML file that loads nothing and runs no script."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import nemo_eagle3_sglang
from nemo_eagle3_sglang.errors import ConfigError
from nemo_eagle3_sglang.report import plots
from nemo_eagle3_sglang.report.read import Run, number, read_runs

NAME = "report.html"
# Colours of the runs on white and on black: at least 4.5:1 against the paper of page.html.
PALETTE = (
    ("#0b62c4", "#6db3ff"),
    ("#b4450b", "#ff9d5c"),
    ("#1a7a45", "#4fd18b"),
    ("#8a3ffc", "#c9a6ff"),
    ("#a5185c", "#ff8ac0"),
    ("#6b5900", "#e0c341"),
    ("#00707b", "#4fd6e0"),
    ("#5c5c66", "#b8b8c4"),
)
DASH_ARRAYS = {"solid": "none", "dashed": "8 4", "dotted": "3 4", "dashdot": "10 3 3 3"}
MISSING = "–"
# Name, a value for each run, and whether they differ.
Row = tuple[str, list[str], bool]


def write_report(folders: Sequence[str | Path], out: str | Path | None = None) -> Path:
    """Write the report on the runs of ``folders`` and return where it is.

    Args:
        folders: Each the ``output_dir`` of a run.
        out: The HTML file; by default ``report.html`` in the first folder.

    Raises:
        ConfigError: A run cannot be read (see ``read.py``), or the file cannot be written there.
    """
    runs = read_runs(folders)
    path = Path(out) if out is not None else Path(folders[0]) / NAME
    if path.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(f"--out {path}: the report is HTML; give a name that ends in .html")
    if path.is_dir() or not path.parent.is_dir():
        what = "is a folder" if path.is_dir() else f"is in {path.parent}, which is no folder"
        raise ConfigError(f"--out {path} {what}; give a file in a folder that exists")
    text = render(runs)
    whole = path.with_name(path.name + ".new")
    try:
        # A lone surrogate, which JSON can spell, has no UTF-8.
        whole.write_text(text, encoding="utf-8", errors="backslashreplace")
        whole.replace(path)
    except OSError as error:
        raise ConfigError(f"--out {path} cannot be written: {error.strerror}") from error
    return path


def render(runs: Sequence[Run]) -> str:
    """Return the page on ``runs``.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    # torch's own dependency; every text is escaped as it is put in.
    from jinja2 import Environment, StrictUndefined

    drawn = plots.draw(runs)
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
    return template.render(
        runs=runs,
        plots=drawn,
        palette=PALETTE,
        styles=[(color, DASH_ARRAYS[dash]) for color, dash in map(plots.style, range(len(runs)))],
        summary=_summary(runs),
        versions=_facts(runs, _versions),
        config=_facts(runs, lambda run: run.flat("config")),
        memory_reasons=_memory_reasons(runs),
        resumptions=_resumptions,
        version=nemo_eagle3_sglang.__version__,
        now=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    )


def _summary(runs: Sequence[Run]) -> list[Row]:
    rows: dict[str, Callable[[Run], str]] = {
        "optimizer steps": lambda run: f"{number(run.points[-1]['step']):,.0f}",
        "tokens": lambda run: f"{number(run.points[-1]['tokens']):,.0f}",
        "loss": lambda run: _moved(run, "train/loss", 3),
        "accuracy": lambda run: _moved(run, "train/accuracy", 3),
        "simulated accept length": lambda run: _moved(run, "train/tau_sim", 2),
        "validation loss": lambda run: _moved(run, "val/loss", 3),
        "validation accuracy": lambda run: _moved(run, "val/accuracy", 3),
        "validation accept length": lambda run: _moved(run, "val/tau_sim", 2),
        "tokens a second (median)": lambda run: _middle(run, "train/tokens_per_second", "{:,.0f}"),
        "time: target (median)": lambda run: _middle(run, "train/time_target", "{:.0%}"),
        "time: draft (median)": lambda run: _middle(run, "train/time_draft", "{:.0%}"),
        "time: data (median)": lambda run: _middle(run, "train/time_data", "{:.0%}"),
        "device": _device,
    }
    found = [(name, [value(run) for run in runs]) for name, value in rows.items()]
    return [(name, values, False) for name, values in found if set(values) != {MISSING}]


def _moved(run: Run, key: str, digits: int) -> str:
    first, last = run.first(key), run.last(key)
    if math.isnan(last):
        return MISSING
    return f"{first:.{digits}f} → {last:.{digits}f}"


def _middle(run: Run, key: str, form: str) -> str:
    values = [value for value in run.series(key)[1] if math.isfinite(value)]
    return form.format(statistics.median(values)) if values else MISSING


def _device(run: Run) -> str:
    if "device" not in run.start:
        return MISSING
    return f"{_show(run.start.get('world_size'))} × {_show(run.start['device'])}"


def _versions(run: Run) -> dict[str, Any]:
    return {**run.flat("versions"), **{key: run.start[key] for key in ("device", "world_size") if key in run.start}}


def _facts(runs: Sequence[Run], of: Callable[[Run], dict[str, Any]]) -> list[Row]:
    """Return a row for each key of any run: its values, and whether they differ."""
    facts = [of(run) for run in runs]
    rows = []
    for key in _union(facts):
        values = [_show(fact[key]) if key in fact else MISSING for fact in facts]
        rows.append((key, values, len(set(values)) > 1))
    return rows


def _union(facts: Iterable[dict[str, Any]]) -> list[str]:
    """Return all keys, those of the first run in its order."""
    return list(dict.fromkeys(key for fact in facts for key in fact))


def _show(value: Any) -> str:
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError:
        return "… (nested too deeply)"


def _memory_reasons(runs: Sequence[Run]) -> list[tuple[Run, str]]:
    found = []
    for run in runs:
        memory = run.start.get("memory")
        if isinstance(memory, dict) and "reason" in memory:
            found.append((run, _show(memory["reason"])))
    return found


def _resumptions(run: Run) -> list[str]:
    """Return a sentence for each start after the first: where, and what had changed."""
    lines = []
    for before, after in zip(run.starts, run.starts[1:], strict=False):
        changes = [
            f"{section}.{key}: {_show(old.get(key))} → {_show(new.get(key))}"
            for section in ("versions", "config")
            for old, new in [(_flat(before, section), _flat(after, section))]
            for key in _union([old, new])
            if old.get(key) != new.get(key)
        ]
        changes += [
            f"{key}: {_show(before.get(key))} → {_show(after.get(key))}"
            for key in ("device", "world_size", "trainer")
            if before.get(key) != after.get(key)
        ]
        what = "; ".join(changes) if changes else "nothing changed"
        lines.append(f"at step {number(after['step']):,.0f}: {what}")
    return lines


def _flat(start: Any, section: str) -> dict[str, Any]:
    return Run("", (), (start,)).flat(section)
