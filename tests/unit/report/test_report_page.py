"""The page: what is on it, that a run's text stays text, and that it loads nothing."""

from __future__ import annotations

import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from nemo_eagle3_sglang.cli import main
from nemo_eagle3_sglang.report.page import PALETTE, write_report
from nemo_eagle3_sglang.report.plots import MEMORY_PARTS
from nemo_eagle3_sglang.training import memory

pytest.importorskip("matplotlib", reason="the extra `report`")

EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>$\\frac{1}{0}$ & \"'"
SVG_NAMESPACES = {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}


class Page(HTMLParser):
    """Tags, attributes and text of a page, as a browser would take them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        self.text += data


def points(steps: int = 5, **more: Any) -> list[dict[str, Any]]:
    lines = []
    for step in range(1, steps + 1):
        common = {"step": step, "tokens": 1000 * step}
        scores = {"loss": 4 - step / steps, "accuracy": step / steps / 2, "tau_sim": 1 + step / steps}
        scores |= {f"acceptance_{k}": step / steps / 2**k for k in (1, 2, 3)}
        speed = {"tokens_per_second": 500.0, "time_target": 0.5, "time_data": 0.1, "time_draft": 0.4}
        speed |= {"lr": 1e-4, "grad_norm": 0.5, "peak_memory_gib": 2.5}
        lines.append({**common, **{f"train/{name}": value for name, value in {**scores, **speed, **more}.items()}})
        lines.append({**common, **{f"val/{name}": value for name, value in scores.items()}})
    return lines


def start(**more: Any) -> dict[str, Any]:
    return {
        "step": 0,
        "device": "NVIDIA H200",
        "world_size": 2,
        "trainer": "flat",
        "versions": {"torch": "2.11.0", "sglang": "0.5.17"},
        "config": {"optimizer": {"lr": 1e-4}, "recipe_args": {"ttt_steps": 3}},
        "memory": {
            "parts": {"target weights": 2**34, "target forward": 2**30, "draft activations": 2**31},
            "peak": 2**35,
        },
        **more,
    }


def write_run(folder: Path, lines: list[dict[str, Any]] | None = None, *starts: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in (("metrics.jsonl", lines or points()), ("run.jsonl", starts or (start(),))):
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in content))
    return folder


def page_of(*folders: Path) -> tuple[Page, str]:
    text = write_report(folders, folders[0] / "report.html").read_text(encoding="utf-8")
    return Page(text), text


def plots_of(text: str) -> dict[str, str]:
    return dict(re.findall(r'<figure role="img" aria-label="([^"]+)">(.*?)</figure>', text, flags=re.DOTALL))


def test_a_run_on_a_page(tmp_path):
    page, text = page_of(write_run(tmp_path / "run"))
    assert list(plots_of(text)) == [
        "Loss, accuracy and simulated accept length",
        "Acceptance by position, at the end",
        "Acceptance by position, over the training",
        "Where the time goes",
        "Speed, learning rate and gradient norm",
        "Memory of a GPU",
    ]
    for words in ("3.800 → 3.000", "1.20 → 2.00", "5,000", "2 × NVIDIA H200", "2.11.0", "optimizer.lr", "0.0001"):
        assert words in page.text
    for title in ("Loss", "Accuracy", "Simulated accept length", "Position 3", "Target", "target weights", "GiB"):
        assert re.search(rf">{title}</text>", text), f"{title} is text in a drawing"
    assert "Notes on" not in page.text


def test_nothing_is_loaded_and_nothing_runs(tmp_path):
    page, text = page_of(write_run(tmp_path / "run"), write_run(tmp_path / "other"))
    assert not {"script", "link", "img", "iframe", "object", "embed", "base", "form", "image"} & set(page.tags)
    loaded = [
        (name, value) for name, value in page.attributes if name in ("src", "href", "xlink:href", "srcset", "data")
    ]
    assert loaded, "markers are referred to"
    assert all(value.startswith("#") for _, value in loaded)
    assert set(re.findall(r"https?://[^\s\"'<)]+", text)) <= SVG_NAMESPACES
    assert not re.search(r"@import|url\((?!#)", text)
    assert "default-src 'none'" in text


def test_a_runs_text_stays_text(tmp_path):
    folder = tmp_path / EVIL.replace("/", "∕")
    lines = points(**{EVIL: 1})
    evil = start(
        device=EVIL,
        versions={EVIL: EVIL},
        config={EVIL: {EVIL: EVIL}},
        memory={"reason": EVIL, "parts": {EVIL: 1}},
        world_size=EVIL,
    )
    page, text = page_of(write_run(folder, lines, evil, {**evil, "step": 2, "config": {"a": EVIL}}))
    assert not {"script", "img"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert "<script" not in text
    assert page.text.count(EVIL) >= 6
    assert folder.name in page.text


def test_a_reference_points_into_its_own_drawing(tmp_path):
    _, text = page_of(write_run(tmp_path / "run"))
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids)) > 20
    references = set(re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', text))
    assert {a or b for a, b in references} <= set(ids)


def test_several_runs_are_drawn_over_each_other(tmp_path):
    page, text = page_of(
        write_run(tmp_path / "a"), write_run(tmp_path / "b", None, start(config={"optimizer": {"lr": 7}}))
    )
    for title, svg in plots_of(text).items():
        assert {"var(--series-0)", "var(--series-1)"} <= set(re.findall(r"var\(--series-\d\)", svg)), title
    assert re.search(r"a</span>.*b</span>", text, flags=re.DOTALL), "a legend"
    assert re.search(r'<tr class="differs"><th>optimizer.lr</th><td>0.0001</td><td>7</td>', text)
    assert "recipe_args.ttt_steps" in page.text


def test_more_runs_than_colours(tmp_path):
    from nemo_eagle3_sglang.report.plots import style

    assert len({style(index) for index in range(32)}) == 32
    _, text = page_of(*(write_run(tmp_path / f"run{i}") for i in range(10)))
    assert text.count("</span>") == 10


def test_colours_are_the_pages(tmp_path):
    _, text = page_of(write_run(tmp_path / "run"))
    for title, svg in plots_of(text).items():
        colors = set(re.findall(r"(?:fill|stroke): (#[0-9a-f]+)", svg))
        assert not colors, f"{title}: {colors} would be the same in light and dark"
    assert all(f"--series-{i}: {light}" in text for i, (light, _) in enumerate(PALETTE))
    assert all(f"--series-{i}: {dark}" in text for i, (_, dark) in enumerate(PALETTE))


def test_a_run_of_an_older_version_is_drawn(tmp_path):
    """Neither run.jsonl nor acceptance by position nor a time split."""
    lines = [{"step": s, "tokens": 10 * s, "train/loss": 3.0, "train/accuracy": 0.1, "train/lr": 1e-4} for s in (1, 2)]
    folder = write_run(tmp_path / "run", lines)
    (folder / "run.jsonl").unlink()
    page, text = page_of(folder)
    assert list(plots_of(text)) == [
        "Loss, accuracy and simulated accept length",
        "Speed, learning rate and gradient norm",
    ]
    assert page.text.count("Nothing to draw") == 4
    assert "no run.jsonl" in page.text


def test_values_of_every_wrong_kind(tmp_path):
    odd: list[Any] = [None, "x", [1], {"a": 1}, float("nan"), float("inf"), 10**400, True]
    lines = points(len(odd))
    for value, line in zip(odd, lines[::2], strict=True):
        line |= {key: value for key in line if key.startswith("train/")}
    wrong = [start(**dict.fromkeys(("versions", "config", "memory", "device"), value)) for value in odd]
    wrong.append(start(memory={"parts": dict.fromkeys(("target weights", "KV pool"), "big"), "peak": []}))
    for number, line in enumerate(wrong):
        page_of(write_run(tmp_path / f"run{number}", lines, line))


def test_text_without_utf8_is_written(tmp_path):
    folder = write_run(tmp_path / "run", None, start(device="\ud800"))
    assert "\\ud800" in page_of(folder)[1]


def test_a_resumption_says_what_changed(tmp_path):
    later = start(step=3, world_size=1, config={"optimizer": {"lr": 2}, "recipe_args": {"ttt_steps": 3}})
    page, _ = page_of(write_run(tmp_path / "run", None, start(), later, {**later, "step": 4}))
    assert "at step 3: config.optimizer.lr: 0.0001 → 2; world_size: 2 → 1" in page.text
    assert "at step 4: nothing changed" in page.text


def test_why_there_is_no_memory_estimate(tmp_path):
    page, _ = page_of(write_run(tmp_path / "run", None, start(memory={"reason": "KeyError: 'x'"})))
    assert "No memory estimate of run: KeyError: 'x'" in page.text


def test_a_long_run_stays_small(tmp_path):
    folder = write_run(tmp_path / "run", points(3000))
    assert write_report([folder]).stat().st_size < 4 * 2**20


def test_the_command_says_where_the_file_is(tmp_path, capsys):
    folder = write_run(tmp_path / "run")
    assert main(["report", str(folder)]) == 0
    out = folder / "report.html"
    assert capsys.readouterr().out == f"Report on 1 run: {out} ({out.stat().st_size / 1024:,.0f} KiB)\n"
    assert main(["report", str(folder), str(write_run(tmp_path / "b")), "--out", str(tmp_path / "both.html")]) == 0
    assert f"Report on 2 runs: {tmp_path / 'both.html'} (" in capsys.readouterr().out
    assert sorted(file.name for file in folder.iterdir()) == ["metrics.jsonl", "report.html", "run.jsonl"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], "RUN_DIR nowhere does not exist"),
        (["run", "--out", "run/metrics.jsonl"], "ends in .html"),
        (["run", "--out", "no/such/x.html"], "which is no folder"),
        (["run", "--out", "folder.html"], "is a folder"),
        (["run", "run"], "is given 2 times"),
    ],
)
def test_what_the_user_can_mend(tmp_path, capsys, monkeypatch, arguments, words):
    before = (write_run(tmp_path / "run") / "metrics.jsonl").read_bytes()
    (tmp_path / "folder.html").mkdir()
    monkeypatch.chdir(tmp_path)
    assert main(["report", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert words in captured.err
    assert captured.out == ""
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == before


def test_without_matplotlib(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["report", str(write_run(tmp_path / "run"))]) == 2
    assert "pip install 'nemo-eagle3-sglang[report]'" in capsys.readouterr().err
    assert not (tmp_path / "run/report.html").exists()


def test_help_has_examples(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["report", "--help"])
    assert stop.value.code == 0
    assert "nemo-eagle3-sglang report outputs/my_draft" in capsys.readouterr().out


def test_the_memory_parts_are_those_of_the_plan():
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    config = dict.fromkeys((*names, "draft_vocab_size"), 8)
    parts = memory.Run(target=config, draft=config, world=1, tp=1, rows=1, length=8, ttt_steps=1).parts()
    assert set(MEMORY_PARTS) - set(parts) == {"KV pool beyond a forward"}
    assert set(parts) <= set(MEMORY_PARTS)
