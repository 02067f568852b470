"""The start-up line and what it installs, seen from real interpreter starts in a venv with a stand-in AutoModel."""

import json
import os
import site
import statistics
import subprocess
import sys
import textwrap
import time
import venv
from pathlib import Path

import pytest

from nemo_eagle3_sglang.startup import rewrite_argv

REPO = Path(__file__).parents[2]
PTH = REPO / "nemo_eagle3_sglang_automodel.pth"
NO_HOOK = "NEMO_EAGLE3_SGLANG_NO_HOOK"
OURS = "nemo_eagle3_sglang"

# What pip and uv write for AutoModel's entry point, with a look at the process before and after the import.
SCRIPT = """
    import json, sys
    before = list(sys.modules)
    finders = sum(type(finder).__name__ == "_AppFinder" for finder in sys.meta_path)
    from nemo_automodel.cli.app import main
    import nemo_automodel.cli.app as app
    print(json.dumps({"before": before, "finders": finders, "whole": hasattr(app, "other"), "status": main()}))
"""
APP = """
    import json, sys
    other = "something else that AutoModel's module holds"
    def main():
        print(json.dumps(sys.argv[1:]))
        return 7
    if __name__ == "__main__":
        main()
"""


class Environment:
    """A venv without pip whose site-packages hold the start-up line and a stand-in ``nemo_automodel``."""

    def __init__(self, root: Path, ours: Path | None = REPO):
        venv.create(root, symlinks=True)
        self.bin = root / "bin"
        (self.packages,) = root.glob("lib/python*/site-packages")
        self.write("nemo_automodel/__init__.py", "")
        self.write("nemo_automodel/cli/__init__.py", "")
        self.write("nemo_automodel/cli/app.py", APP)
        for name in ("automodel", "am", "other"):
            (self.bin / name).write_text(textwrap.dedent(SCRIPT))
        self.write(PTH.name, PTH.read_text())
        if ours is not None:
            # As an editable install does; the name sorts before the start-up line's. PyYAML comes from the running one.
            running = [path for path in sys.path if path.endswith("site-packages")]
            self.write(f"_editable_impl_{OURS}.pth", "\n".join([str(ours), *running]))

    def write(self, name: str, text: str) -> None:
        path = self.packages / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))

    def python(self, *args: str, **env: str) -> subprocess.CompletedProcess:
        clean = {name: value for name, value in os.environ.items() if name not in (NO_HOOK, "WORLD_SIZE", "PYTHONPATH")}
        return subprocess.run(
            [self.bin / "python", *args], env=clean | env, capture_output=True, text=True, cwd=self.packages, timeout=60
        )

    def automodel(self, *args: str, program: str = "automodel", **env: str) -> tuple[list[str], dict]:
        """Run the script; return the arguments that AutoModel's main saw and what the script saw."""
        result = self.python(str(self.bin / program), *args, **env)
        assert (result.returncode, result.stderr) == (0, "")
        seen, report = map(json.loads, result.stdout.splitlines())
        return seen, report


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    return Environment(tmp_path_factory.mktemp("environment"))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("finetune llm -c x.yaml", "x.yaml"),
        ("finetune llm --config x.yaml", "x.yaml"),
        ("finetune llm --config=x.yaml", "x.yaml"),
        ("finetune llm -c=x.yaml", "x.yaml"),
        ("finetune llm -cx.yaml", "x.yaml"),
        ("-c x.yaml finetune llm", "x.yaml"),
        ("finetune -c x.yaml llm", "x.yaml"),
        ("finetune llm -c x.yaml --a.b=1 --c.d 2 --e.f -3", "x.yaml --a.b=1 --c.d 2 --e.f -3"),
        ("finetune llm --a.b=1 -c x.yaml --c.d=2", "x.yaml --a.b=1 --c.d=2"),
        ("finetune llm -c x.yaml --nproc-per-node 2 --a=1", "x.yaml --nproc-per-node 2 --a=1"),
        ("--nproc_per_node=2 finetune llm -c x.yaml", "x.yaml --nproc-per-node 2"),
        ("finetune llm -c x.yaml --confidence=1 --n=2", "x.yaml --confidence=1 --n=2"),
        ("finetune llm --help", "--help"),
        ("finetune llm", ""),
        ("finetune llm x.yaml", "x.yaml"),
        # Left alone.
        ("x.yaml --a.b=1", None),
        ("--help", None),
        ("", None),
        ("finetune vlm -c x.yaml", None),
        ("pretrain llm -c x.yaml", None),
        ("llm finetune -c x.yaml", None),
        ("finetune", None),
        ("-c finetune --config llm", None),
        ("x.yaml --mode finetune --kind llm", None),
    ],
)
def test_old_command_becomes_todays(old, new):
    argv = old.split()
    assert rewrite_argv(argv) == (argv if new is None else new.split())
    assert rewrite_argv(rewrite_argv(argv)) == rewrite_argv(argv)


@pytest.mark.parametrize("program", ["automodel", "am"])
def test_old_command_reaches_automodel(environment, program):
    seen, report = environment.automodel("finetune", "llm", "-c", "x.yaml", "--a.b=1", program=program)
    assert seen == ["x.yaml", "--a.b=1"]
    assert report["status"] == 7
    assert report["whole"]


@pytest.mark.parametrize("options", [["-m"], ["-u", "-m"]], ids=["python -m", "torchrun -m"])
def test_old_command_under_python_m(environment, options):
    result = environment.python(*options, "nemo_automodel.cli.app", "finetune", "llm", "-c", "x.yaml")
    assert (result.returncode, result.stderr) == (0, "")
    assert json.loads(result.stdout) == ["x.yaml"]


@pytest.mark.parametrize("start", [["bin/automodel"], ["-m", "nemo_automodel.cli.app"]], ids=["script", "python -m"])
def test_our_config_is_taken_from_automodel(environment, tmp_path, start):
    config = tmp_path / "ours.yaml"
    config.write_text("recipe: TrainEagle3SGLangRecipe\n")
    start = [str(environment.bin / "automodel")] if start == ["bin/automodel"] else start
    result = environment.python(*start, "finetune", "llm", "-c", str(config), "--nproc-per-node", "0")
    assert result.stderr.startswith("error: --nproc-per-node 0: write how many processes to start")
    assert "Traceback" not in result.stderr
    if start[0] == "-m":
        assert result.returncode == 2
    else:
        assert json.loads(result.stdout)["status"] == 2


def test_switched_off(environment):
    seen, report = environment.automodel("finetune", "llm", "-c", "x.yaml", **{NO_HOOK: "1"})
    assert seen == ["finetune", "llm", "-c", "x.yaml"]
    assert report["finders"] == 0
    assert not any(name.startswith(OURS) for name in report["before"])


@pytest.mark.parametrize("value", ["0", ""])
def test_not_switched_off_by_zero(environment, value):
    assert environment.automodel("x.yaml", **{NO_HOOK: value})[1]["finders"] == 1


def test_other_programs_see_nothing(environment):
    _, report = environment.automodel("finetune", "llm", "-c", "x.yaml", program="other")
    assert report["finders"] == 0
    assert not any(name.startswith(OURS) for name in report["before"])


@pytest.mark.parametrize(
    "args", [["-c", "pass"], ["-m", "this"], ["-c", "pass", "nemo_automodel.cli.app", "automodel"]]
)
def test_other_starts_import_nothing_of_ours(environment, args):
    result = environment.python("-X", "importtime", *args)
    assert result.returncode == 0
    assert OURS not in result.stderr


def test_automodel_starts_without_anything_heavy(environment):
    """Before AutoModel is imported, the hook has brought in itself and a little of the standard library."""
    with_hook = set(environment.automodel("x.yaml")[1]["before"])
    without = set(environment.automodel("x.yaml", **{NO_HOOK: "1"})[1]["before"])
    brought = with_hook - without
    assert {name for name in brought if name.split(".")[0] not in sys.stdlib_module_names} == {OURS, f"{OURS}.startup"}
    assert brought.isdisjoint({"argparse", "typing", "importlib.metadata", "logging", "pathlib"})


def test_line_run_twice_installs_once(tmp_path):
    environment = Environment(tmp_path)
    environment.write("zz_again.pth", PTH.read_text())
    seen, report = environment.automodel("finetune", "llm", "-c", "x.yaml")
    assert seen == ["x.yaml"]
    assert report["finders"] == 1


@pytest.mark.parametrize("broken", ["missing", "raises"])
def test_broken_package_is_silent_elsewhere_and_does_not_stop_automodel(tmp_path, broken):
    environment = Environment(tmp_path, ours=None)
    if broken == "raises":
        environment.write(f"{OURS}/__init__.py", "raise RuntimeError('half an upgrade')")
    other = environment.python("-c", "print('fine')")
    assert (other.stdout, other.stderr) == ("fine\n", "")

    result = environment.python(str(environment.bin / "automodel"), "x.yaml")
    assert result.returncode == 0
    assert json.loads(result.stdout.splitlines()[0]) == ["x.yaml"]
    # Python's site module names the file and the reason, and goes on.
    assert PTH.name in result.stderr


@pytest.mark.parametrize("argv", [[], None], ids=["empty", "absent"])
def test_embedded_interpreter_without_argv(monkeypatch, argv):
    if argv is None:
        monkeypatch.delattr(sys, "argv")
    else:
        monkeypatch.setattr(sys, "argv", argv)
    before = list(sys.meta_path)
    exec(PTH.read_text(), {})
    assert sys.meta_path == before


def test_cost_for_other_programs(tmp_path, monkeypatch):
    """What a start pays: site opens the file, reads the line, executes it. Measured 0.08 to 0.10 ms; 0.5 has room.

    ``site.addpackage`` is the very function that an interpreter start calls for each .pth file. It is timed on its own
    because two whole starts differ by more than a millisecond from run to run.
    """
    (tmp_path / PTH.name).write_text(PTH.read_text())
    monkeypatch.setattr(sys, "argv", ["/usr/bin/some-program", "--option"])
    times = []
    for _ in range(200):
        start = time.perf_counter()
        site.addpackage(str(tmp_path), PTH.name, set())
        times.append(time.perf_counter() - start)
    assert statistics.median(times) < 0.5e-3


def test_line_is_one_line():
    (line,) = PTH.read_text().splitlines()
    assert line.startswith("import ")
