"""The plots, as SVG drawn by matplotlib and coloured by the page.

matplotlib draws in placeholder colours that become CSS variables, so that one drawing serves light and dark. No text of
a run enters a drawing: names are in the page's legend.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nemo_eagle3_sglang.errors import ConfigError
from nemo_eagle3_sglang.report.read import Run, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MIB, GIB = 2**20, 2**30
COLORS = 8
DASHES = ("solid", "dashed", "dotted", "dashdot")
# Placeholders; none is a colour that matplotlib writes by itself.
INK, GRID = "#010203", "#040506"
SERIES = [f"#0708{10 + i}" for i in range(COLORS)]
VARIABLES = {INK: "var(--ink)", GRID: "var(--grid)", **{c: f"var(--series-{i})" for i, c in enumerate(SERIES)}}
# Parts of the memory plan (training/memory.py) from the bottom up; another version's are named in the page's notes.
MEMORY_PARTS = (
    "target weights",
    "KV pool",
    "KV pool beyond a forward",
    "draft, gradients, AdamW",
    "supervision",
    "target forward",
    "draft activations",
)
# Panels of one row, inches of a panel. The page scales a drawing to its width.
COLUMNS, WIDTH, HEIGHT = 3, 3.6, 2.7
STYLE = {
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.titlesize": 10,
    "lines.linewidth": 1.6,
    "lines.markersize": 4,
    "grid.color": GRID,
    "axes.edgecolor": GRID,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "xtick.color": GRID,
    "ytick.color": GRID,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
}


@dataclass(frozen=True)
class Plot:
    """One figure of the page.

    Attributes:
        title: Heading.
        caption: What is shown, in a sentence or two.
        svg: The drawing, or an empty string where no run has anything to draw.
    """

    title: str
    caption: str
    svg: str = ""


def draw(runs: Sequence[Run]) -> list[Plot]:
    """Return the plots of ``runs``, a run the same colour and dash in all.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError(
            "the report is drawn by matplotlib, which is not installed: pip install 'nemo-eagle3-sglang[report]'"
        ) from error
    # The user's own style would bring colours that the page does not know.
    defaults = {name: matplotlib.rcParamsDefault[name] for name in matplotlib.rcParamsDefault if name != "backend"}
    with matplotlib.rc_context({**defaults, **STYLE}):
        return [
            Plot(
                "Loss, accuracy and simulated accept length",
                "Lines: training, the mean of each log window. Circles: validation. The accept length is tokens a "
                "round at greedy chain drafting, the bonus token included.",
                _over_tokens(
                    "quality",
                    runs,
                    {
                        "Loss": "loss",
                        "Accuracy": "accuracy",
                        "Simulated accept length": "tau_sim",
                        "Accept length of decode_eval": "tau_real",
                    },
                    validation=True,
                ),
            ),
            Plot(
                "Acceptance by position, at the end",
                "Share of chains whose drafts are the target's up to this position, in each run's last record; 1 and "
                "their sum is the simulated accept length.",
                _acceptance_now(runs),
            ),
            Plot(
                "Acceptance by position, over the training",
                "One panel a position (training-time-test step). Lines: training. Circles: validation.",
                _acceptance_over_tokens(runs),
            ),
            Plot(
                "Where the time goes",
                "Share of each log window that the target took, that the draft and the optimizer took (and a "
                "checkpoint saved meanwhile), and that was spent waiting for data.",
                _over_tokens(
                    "time",
                    runs,
                    {"Target": "time_target", "Draft and optimizer": "time_draft", "Waiting for data": "time_data"},
                    percent=True,
                ),
            ),
            Plot(
                "Speed, learning rate and gradient norm",
                "Real tokens a second (padding not counted), over all ranks.",
                _over_tokens(
                    "speed",
                    runs,
                    {
                        "Tokens a second": "tokens_per_second",
                        "MFU": "mfu",
                        "Learning rate": "lr",
                        "Gradient norm": "grad_norm",
                    },
                ),
            ),
            Plot(
                "Memory of a GPU",
                "Estimated as nemo-eagle3-sglang plan does, for a GPU in bf16 (for a run on a CPU too); of target "
                "forward and draft activations the larger counts in the peak. Measured: the most that torch had "
                "allocated on rank 0 in any log window.",
                _memory(runs),
            ),
        ]


def style(index: int) -> tuple[int, str]:
    """Return colour and dash of a run by its place; neighbours differ in both, and the first 32 in one of them."""
    return index % COLORS, DASHES[(index + index // COLORS) % len(DASHES)]


def _over_tokens(
    name: str, runs: Sequence[Run], panels: dict[str, str], *, validation: bool = False, percent: bool = False
) -> str:
    """Draw one panel for each key that some run has."""
    parts = ("train", "val") if validation else ("train",)
    keys = {
        title: [f"{part}/{key}" for part in parts]
        for title, key in panels.items()
        if any(_has(run, f"{part}/{key}") for run in runs for part in parts)
    }
    if not keys:
        return ""
    with _figure(name, len(keys)) as (axes, result):
        for ax, (title, wanted) in zip(axes, keys.items(), strict=True):
            _lines(ax, title, runs, wanted)
            if percent:
                _as_share(ax)
    return result[0]


def _acceptance_over_tokens(runs: Sequence[Run]) -> str:
    both = [(run, part) for run in runs for part in ("train", "val")]
    positions = sorted({position for run, part in both for position in run.positions(part)})
    wanted = [p for p in positions if any(_has(run, f"{part}/acceptance_{p}") for run, part in both)]
    if not wanted:
        return ""
    with _figure("acceptance", len(wanted)) as (axes, result):
        for ax, position in zip(axes, wanted, strict=True):
            keys = [f"{part}/acceptance_{position}" for part in ("train", "val")]
            _lines(ax, f"Position {position}", runs, keys)
            _as_share(ax)
    return result[0]


def _acceptance_now(runs: Sequence[Run]) -> str:
    parts = {"Training": "train", "Validation": "val"}
    panels = {title: part for title, part in parts.items() if any(run.positions(part) for run in runs)}
    if not panels:
        return ""
    with _figure("positions", len(panels)) as (axes, result):
        for ax, (title, part) in zip(axes, panels.items(), strict=True):
            for index, run in enumerate(runs):
                positions = run.positions(part)
                _plot(ax, index, positions, [run.last(f"{part}/acceptance_{p}") for p in positions], marker="o")
            ax.set(title=title, xlabel="position")
            ax.xaxis.get_major_locator().set_params(integer=True)
            _as_share(ax)
    return result[0]


def _memory(runs: Sequence[Run]) -> str:
    estimates = [run.start.get("memory") for run in runs]
    estimates = [found if isinstance(found, dict) else {} for found in estimates]
    rows = {name: [number(_part(found, name)) for found in estimates] for name in MEMORY_PARTS}
    rows["peak, estimated"] = [number(found.get("peak")) for found in estimates]
    rows["peak, measured"] = [_peak(run) for run in runs]
    rows = {name: values for name, values in rows.items() if any(map(math.isfinite, values))}
    if not rows:
        return ""
    small = all(size < GIB for values in rows.values() for size in values if math.isfinite(size))
    unit, name = (MIB, "MiB") if small else (GIB, "GiB")
    height = 0.9 + len(rows) * max(0.3, 0.14 * len(runs))
    with _figure("memory", 1, columns=1, width=7.5, height=height) as ((ax,), result):
        thickness = 0.8 / len(runs)
        for index in range(len(runs)):
            places = [row + (index - (len(runs) - 1) / 2) * thickness for row in range(len(rows))]
            sizes = [values[index] / unit if math.isfinite(values[index]) else 0.0 for values in rows.values()]
            ax.barh(places, sizes, thickness * 0.9, color=SERIES[style(index)[0]])
        ax.set_yticks(range(len(rows)), list(rows))
        ax.invert_yaxis()
        ax.grid(visible=False, axis="y")
        ax.set_xlabel(name)
    return result[0]


def _part(memory: dict[str, Any], name: str) -> Any:
    """Return a part of a memory plan out of ``run.jsonl``, whatever is in its place."""
    parts = memory.get("parts")
    return parts.get(name) if isinstance(parts, dict) else None


def _peak(run: Run) -> float:
    return max((v * GIB for v in run.series("train/peak_memory_gib")[1] if math.isfinite(v)), default=math.nan)


def _has(run: Run, key: str) -> bool:
    return any(map(math.isfinite, run.series(key)[1]))


def _lines(ax: Axes, title: str, runs: Sequence[Run], keys: Sequence[str]) -> None:
    from matplotlib.ticker import EngFormatter

    for index, run in enumerate(runs):
        for key in keys:
            validation = key.startswith("val/")
            _plot(ax, index, *run.series(key), marker="o" if validation else "", thin=validation)
    ax.set(title=title, xlabel="tokens")
    ax.xaxis.set_major_formatter(EngFormatter(sep=""))
    ax.xaxis.get_major_locator().set_params(nbins=5)


def _plot(ax: Axes, index: int, x: Sequence[float], y: Sequence[float], marker: str, thin: bool = False) -> None:
    color, dash = style(index)
    # A single point is no line.
    marker = marker or ("o" if sum(map(math.isfinite, y)) == 1 else "")
    # Filled with nothing, so that circles are told from a line's end.
    ax.plot(x, y, color=SERIES[color], linestyle=dash, marker=marker, mfc="none", linewidth=0.7 if thin else None)


def _as_share(ax: Axes) -> None:
    from matplotlib.ticker import PercentFormatter

    ax.set_ylim(-0.02, 1.02)
    ax.yaxis.set_major_formatter(PercentFormatter(1.0))


@contextmanager
def _figure(
    name: str, panels: int, columns: int = COLUMNS, width: float = WIDTH, height: float = HEIGHT
) -> Iterator[tuple[Sequence[Axes], list[str]]]:
    """Yield the axes of a figure and a list, which holds the SVG afterwards."""
    from matplotlib.figure import Figure

    columns = min(columns, panels)
    rows = -(-panels // columns)
    # Not pyplot: it keeps every figure, and asks for a display.
    figure = Figure(figsize=(columns * width, rows * height), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for ax in axes[panels:]:
        ax.set_visible(False)
    result: list[str] = []
    yield axes[:panels], result
    result.append(_svg(figure, name))


def _svg(figure: Figure, name: str) -> str:
    """Return a figure as an element to be put into a page."""
    import matplotlib

    sink = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(
            sink, format="svg", transparent=True, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type"))
        )
    text = sink.getvalue()
    text = text[text.index("<svg") :]
    for placeholder, variable in VARIABLES.items():
        text = text.replace(placeholder, variable)
    # Ids are the page's: each drawing has its own.
    return re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", text)
