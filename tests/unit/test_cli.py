"""Dispatch of the console script."""

import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest
import yaml

import nemo_eagle3_sglang
from nemo_eagle3_sglang import backends, cli
from nemo_eagle3_sglang.config import load
from nemo_eagle3_sglang.errors import ConfigError
from nemo_eagle3_sglang.training import launch


def _exits(argv, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(argv)
    captured = capsys.readouterr()
    return stop.value.code, captured.out, captured.err


def test_train_passes_config_and_overrides_on(monkeypatch):
    calls = []
    monkeypatch.setattr(launch, "run", lambda *args, **kwargs: calls.append((args, kwargs)))
    assert cli.main(["train", "x.yaml", "--a.b=1", "--c.d", "2", "--n=3", "--nproc-per-node=1"]) == 0
    assert calls == [(("x.yaml", ["--a.b=1", "--c.d", "2", "--n=3"]), {"nproc_per_node": 1})]


def test_train_reports_a_config_error(monkeypatch, capsys):
    def refuse(*args, **kwargs):
        raise ConfigError("data_dir: 'x' does not exist")

    monkeypatch.setattr(launch, "run", refuse)
    assert cli.main(["train", "x.yaml"]) == 2
    assert capsys.readouterr().err == "error: data_dir: 'x' does not exist\n"


def test_train_returns_the_status_of_its_workers(monkeypatch):
    monkeypatch.setattr(launch, "run", lambda *args, **kwargs: 130)
    assert cli.main(["train", "x.yaml", "--nproc-per-node=2"]) == 130


def test_module_is_the_same_command():
    command = [sys.executable, "-m", "nemo_eagle3_sglang", "train", "x.yaml", "--nproc-per-node=0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr.partition(":")[0]) == (2, "error")
    assert "--nproc-per-node 0" in done.stderr


def test_validate_prints_the_resolved_config(monkeypatch, capsys):
    resolved = {"recipe": "TrainEagle3SGLangRecipe", "a": {"b": 1}, "text": "ä"}
    seen = []
    monkeypatch.setattr(load, "load_config", lambda path, overrides: seen.append((path, overrides)) or (None, resolved))
    assert cli.main(["validate", "x.yaml", "--a.b=1"]) == 0
    assert seen == [("x.yaml", ["--a.b=1"])]
    printed = capsys.readouterr().out
    assert yaml.safe_load(printed) == resolved
    assert list(yaml.safe_load(printed)) == list(resolved)


def test_validate_reports_what_is_wrong(tmp_path, capsys):
    missing = tmp_path / "missing.yaml"
    assert cli.main(["validate", str(missing)]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert str(missing) in captured.err
    assert captured.out == ""


def test_backends_lists_names_with_their_distribution(monkeypatch, capsys):
    entries = {name: EntryPoint(name, f"pkg_{name}:build", backends.GROUP) for name in ("sglang", "hf")}
    monkeypatch.setattr(backends, "registered", lambda: entries)
    assert cli.main(["backends"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.split() == ["hf", "(unknown", "distribution)", "pkg_hf:build"]
    assert second.split()[0] == "sglang"
    assert first.index("pkg_hf") == second.index("pkg_sglang")


def test_backends_says_when_there_are_none(monkeypatch, capsys):
    monkeypatch.setattr(backends, "registered", lambda: {})
    assert cli.main(["backends"]) == 2
    assert "reinstall" in capsys.readouterr().err


def test_version(capsys):
    status, out, _ = _exits(["--version"], capsys)
    assert (status, out) == (0, f"nemo-eagle3-sglang {nemo_eagle3_sglang.__version__}\n")


@pytest.mark.parametrize("command", ["train", "validate", "backends"])
def test_help_of_each_command_shows_an_example(command, capsys):
    status, out, _ = _exits([command, "--help"], capsys)
    assert status == 0
    assert f"nemo-eagle3-sglang {command}" in out.split("example")[1]


def test_help_lists_the_commands(capsys):
    _, out, _ = _exits(["--help"], capsys)
    assert all(f"\n    {command} " in out for command in ("train", "validate", "backends"))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["trian", "x.yaml"], "unknown command 'trian' (did you mean 'train'?); known: train, validate, plan"),
        (["xyzzy"], "unknown command 'xyzzy'; known: train, validate, plan, serve-target, report, backends"),
        ([], "the following arguments are required: COMMAND"),
        (["train"], "the following arguments are required: CONFIG"),
        (["train", "x.yaml", "--nproc-per-node=two"], "invalid int value: 'two'"),
        (["backends", "--verbose"], "backends takes no --verbose"),
    ],
)
def test_wrong_usage(argv, message, capsys):
    status, out, err = _exits(argv, capsys)
    assert (status, out) == (2, "")
    assert err.startswith("error: ")
    assert message in err


def test_help_imports_nothing_heavy():
    code = """if True:
        import sys
        from nemo_eagle3_sglang import cli
        try:
            cli.main(["--help"])
        except SystemExit:
            pass
        print(sorted({"torch", "transformers", "sglang", "nemo_automodel", "pydantic"} & set(sys.modules)))
    """
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.splitlines()[-1] == "[]"
