"""The report in a real Chromium, in light and in dark: `scripts/check_report.py` on written and on broken pages."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from pathlib import Path
from types import ModuleType

import pytest

from nemo_eagle3_sglang.report.page import write_report

ROOT = Path(__file__).parents[2]


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_report", ROOT / "scripts/check_report.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


check_report = load_script()
BROWSER = check_report.find_browser()

pytest.importorskip("matplotlib", reason="the extra `report`")
pytest.importorskip("playwright", reason="development dependency")
pytestmark = pytest.mark.skipif(
    BROWSER is None,
    reason="no Chromium: apt-get install chromium-headless-shell (Debian), or set CHROMIUM to one",
)


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> Path:
    """Nine runs, so that each colour is used, with hostile names, a gap and a single point."""
    folder = tmp_path_factory.mktemp("runs")
    folders = []
    for index in range(9):
        run = folder / f"{index} <b onclick=alert(1)>&amp; {'long ' * (10 if index == 3 else 1)}"
        run.mkdir()
        lines = []
        for step in range(1, 2 if index == 4 else 30):
            scores = {"loss": 5 - math.log(step + index), "accuracy": step / 60, "tau_sim": 1 + step / 30}
            scores |= {f"acceptance_{k}": step / 30 / k for k in (1, 2, 3, 4)}
            scores |= {"time_target": 0.5, "time_draft": 0.4, "time_data": 0.1, "tokens_per_second": 900.0 + step}
            scores |= {"lr": 1e-4, "grad_norm": math.nan if step == 7 else 1.0, "peak_memory_gib": 4.0 + index}
            lines.append({"step": step, "tokens": 1000 * step, **{f"train/{k}": v for k, v in scores.items()}})
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        memory = {"parts": {"target weights": 2**33, "KV pool": 2**31}, "peak": 2**34, "gpu": 2**36}
        start = {"step": 0, "device": "cpu", "world_size": 1, "versions": {"torch": "2"}, "memory": memory}
        start["config"] = {"optimizer": {"lr": index}, "path": "/a-very-long-path" * 20}
        (run / "run.jsonl").write_text(json.dumps(start) + "\n")
        folders.append(run)
    return write_report(folders, folder / "report.html")


@pytest.mark.parametrize("width", [1100, 400])
def test_every_plot_is_seen_in_light_and_in_dark(report, tmp_path, width):
    light, dark = check_report.look(report, BROWSER, tmp_path, width)
    assert light.problems() == dark.problems() == []
    assert len(light.plots) == len(dark.plots) == 6
    assert min(plot["series"] for plot in light.plots) >= 9, "each run is in each plot"
    assert len(light.texts) > 300
    assert light.paper == "rgb(255, 255, 255)"
    assert dark.paper == "rgb(20, 23, 28)"
    for scheme in ("light", "dark"):
        assert (tmp_path / f"report_{scheme}.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("found", "instead", "problem"),
    [
        ("--ink: #e6e9ee", "--ink: #30343a", "dark: text 'EAGLE-3 training': contrast"),
        ("--series-2: #1a7a45", "--series-2: #f0fff0", "light: plot 'Memory of a GPU': a line's contrast"),
        ("figure > svg { display: block;", "figure > svg { display: none;", "light: plot 'Memory of a GPU' is 0 × 0"),
        ("var(--series-", "var(--serie-", "light: plot 'Memory of a GPU' paints nothing"),
        ("<h1>", "<script>console.log('hello')</script><h1>", "light: the page has a script"),
        ("<h1>", "<img src='http://127.0.0.1:9/x.png'><h1>", "light: console: Loading the image"),
    ],
)
def test_what_is_wrong_is_found(report, tmp_path, found, instead, problem):
    """Each fault of the kind that the check is for, put into a page."""
    broken = tmp_path / "broken.html"
    text = report.read_text(encoding="utf-8")
    assert found in text
    broken.write_text(text.replace(found, instead), encoding="utf-8")
    problems = [line for seen in check_report.look(broken, BROWSER) for line in seen.problems()]
    assert any(line.startswith(problem) for line in problems), problems[:10]


def test_a_request_is_found(report, tmp_path):
    """Without the page's own policy, which would stop it."""
    broken = tmp_path / "broken.html"
    text = report.read_text(encoding="utf-8").replace("Content-Security-Policy", "x-nothing")
    broken.write_text(text.replace("<h1>", "<img src='http://127.0.0.1:9/x.png'><h1>"), encoding="utf-8")
    light, _ = check_report.look(broken, BROWSER)
    assert "light: request: http://127.0.0.1:9/x.png" in light.problems()
