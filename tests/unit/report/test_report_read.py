"""The files of a run as the report reads them: what a killed, resumed, foreign or broken run leaves."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from nemo_eagle3_sglang.errors import ConfigError
from nemo_eagle3_sglang.report.read import flatten, read_runs
from nemo_eagle3_sglang.training import record
from nemo_eagle3_sglang.training.meter import RunMeter


def train(step: int, loss: float = 3.0, **more: Any) -> dict[str, Any]:
    return {"step": step, "tokens": 100 * step, "train/loss": loss, **more}


def val(step: int, loss: float = 2.0) -> dict[str, Any]:
    return {"step": step, "tokens": 100 * step, "val/loss": loss}


def write(folder: Path, *lines: Any, name: str = "metrics.jsonl") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    (folder / name).write_text(text, encoding="utf-8")
    return folder


def read(folder: Path):
    (run,) = read_runs([folder])
    return run


def notes(run) -> str:
    return "\n".join(note for note in run.notes if "run.jsonl" not in note)


def test_what_the_meter_writes_is_read(tmp_path):
    meter = RunMeter(tmp_path / "metrics.jsonl")
    for step in (2, 4):
        meter.count(100)
        meter.log({"train/loss": 4.0 - step / 2, "train/accuracy": 0.5, "train/lr": 1e-4}, step)
        meter.log({"val/loss": 5.0 - step}, step)
    run = read(tmp_path)
    assert run.series("train/loss") == ([100.0, 200.0], [3.0, 2.0])
    assert run.series("val/loss") == ([100.0, 200.0], [3.0, 1.0])
    assert notes(run) == "", "every key of the meter's is known"


def test_the_files_have_the_names_that_the_run_gives_them():
    from nemo_eagle3_sglang.report import read as module

    assert module.STARTS == record.NAME


def test_a_resumed_runs_steps_are_there_once(tmp_path):
    """Killed at step 6 after a checkpoint of step 4, and put together without the meter's own moving away."""
    lines = [train(2), val(2), train(4), val(4), train(6, 9.0), val(6, 9.0), train(6, 1.0), val(6, 1.5), train(8, 0.5)]
    run = read(write(tmp_path, *lines))
    assert run.series("train/loss") == ([200, 400, 600, 800], [3, 3, 1, 0.5])
    assert run.series("val/loss") == ([200, 400, 600], [2, 2, 1.5])
    assert "2 log points that a resumed run logged again" in notes(run)


def test_a_stale_evaluation_goes_with_its_step(tmp_path):
    run = read(write(tmp_path, train(2), train(4), val(4, 9.0), train(3), train(4)))
    assert [point["step"] for point in run.points] == [2, 3, 4]
    assert run.series("val/loss") == ([], [])


def test_a_last_line_that_was_cut_off_is_left_out(tmp_path):
    write(tmp_path, train(2), train(4))
    with (tmp_path / "metrics.jsonl").open("a") as sink:
        sink.write('{"step": 6, "tok')
    run = read(tmp_path)
    assert [point["step"] for point in run.points] == [2, 4]
    assert "1 line of metrics.jsonl cut off or no JSON" in notes(run)


@pytest.mark.parametrize(
    ("line", "note"),
    [
        ("[1, 2]", "1 line of metrics.jsonl cut off or no JSON"),
        ("[" * 100_000, "1 line of metrics.jsonl cut off or no JSON"),
        ('{"tokens": 3, "train/loss": 1}', "1 line of metrics.jsonl without step and tokens"),
        ('{"step": "4", "tokens": 3}', "1 line of metrics.jsonl without step and tokens"),
        ('{"step": true, "tokens": 3}', "1 line of metrics.jsonl without step and tokens"),
        ('{"step": NaN, "tokens": 3}', "1 line of metrics.jsonl without step and tokens"),
        ('{"step": ' + "9" * 400 + ', "tokens": 3}', "1 line of metrics.jsonl without step and tokens"),
    ],
)
def test_a_line_that_cannot_be_used_is_counted(tmp_path, line, note):
    run = read(write(tmp_path, train(2), line, train(4)))
    assert [point["step"] for point in run.points] == [2, 4]
    assert note in notes(run)


def test_bytes_that_are_no_text_are_counted(tmp_path):
    write(tmp_path, train(2))
    with (tmp_path / "metrics.jsonl").open("ab") as sink:
        sink.write(b'{"step": 4, "tokens": 1, "x": "\xff\xfe"}\n')
    assert "1 line of metrics.jsonl cut off or no JSON" in notes(read(tmp_path))


def test_values_that_are_no_finite_number_are_gaps(tmp_path):
    lines = [train(2, 3.0, **{"train/grad_norm": math.inf}), train(4, math.nan), train(6, 1.0), '{"step":8,"tokens":9}']
    run = read(write(tmp_path, *lines, train(8, "low")))
    _, losses = run.series("train/loss")
    assert [math.isnan(loss) for loss in losses] == [False, True, False, True]
    assert (run.first("train/loss"), run.last("train/loss")) == (3.0, 1.0)
    assert "train/loss: 2 values no finite number" in notes(run)
    assert "train/grad_norm: 1 value no finite number" in notes(run)


def test_unknown_fields_are_named(tmp_path):
    run = read(write(tmp_path, train(2, **{"train/beauty": 3, "train/acceptance_1": 0.5, "train/acceptance_x": 1})))
    assert notes(run) == "not drawn: train/acceptance_x, train/beauty"
    assert run.positions("train") == [1]


def test_a_missing_folder_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        read_runs([tmp_path / "nowhere"])


def test_a_file_is_an_error(tmp_path):
    write(tmp_path, train(2))
    with pytest.raises(ConfigError, match="is a file; give the folder"):
        read_runs([tmp_path / "metrics.jsonl"])


def test_a_folder_without_metrics_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match=r"holds no metrics\.jsonl"):
        read_runs([tmp_path])


@pytest.mark.parametrize(("lines", "reason"), [((), "it is empty"), (("{",), "1 line"), (({"step": 1},), "1 line")])
def test_a_run_without_a_log_point_is_an_error(tmp_path, lines, reason):
    with pytest.raises(ConfigError, match=f"holds no log point \\({reason}"):
        read_runs([write(tmp_path, *lines)])


def test_one_run_twice_is_an_error(tmp_path):
    write(tmp_path / "a", train(2))
    with pytest.raises(ConfigError, match="is given 2 times"):
        read_runs([tmp_path / "a", tmp_path / "b/../a"] if (tmp_path / "b").mkdir() is None else [])


def test_runs_of_one_name_are_told_apart_by_their_parents(tmp_path):
    folders = [write(tmp_path / name, train(2)) for name in ("x/out", "y/out", "other", "deep/x/out")]
    assert [run.name for run in read_runs(folders)] == [f"{tmp_path.name}/x/out", "y/out", "other", "deep/x/out"]


def test_the_starts_are_those_that_led_to_the_run(tmp_path):
    write(tmp_path, train(2))
    starts = [{"step": s, "config": {"n": n}} for n, s in enumerate((0, 8, 0, 4, 6, 4))]
    run = read(write(tmp_path, *starts, '{"step": 9', '{"step": "x"}', name="run.jsonl"))
    assert [(start["step"], start["config"]["n"]) for start in run.starts] == [(0, 2), (4, 5)]
    assert run.flat("config") == {"n": 5}
    assert "1 line of run.jsonl cut off or no JSON, left out" in run.notes


def test_a_run_of_an_older_version_has_no_starts(tmp_path):
    run = read(write(tmp_path, train(2)))
    assert run.start == {}
    assert run.flat("config") == {}
    assert any("no run.jsonl" in note for note in run.notes)


def test_nesting_without_end_is_cut():
    value: Any = 1
    for _ in range(50):
        value = {"a": value}
    assert flatten(value) == {".".join("a" * 10): "…"}
    assert flatten({"a": {"b": 1, "c": {}}, "d": [1]}) == {"a.b": 1, "d": [1]}
