"""The `automodel` command after a real installation: by pip and by uv, normal and editable.

Each environment is new and holds a real ``pip install`` / ``uv pip install`` of this package (built from a copy of the
checkout) and of nemo-automodel from PyPI, with the `automodel` script, the metadata and the start-up line that these
installers write. Only the 9 GB below them (torch, sglang, transformers …) are not installed again: a path file that
sorts last lets the new interpreter see the running one's site-packages, in which Python executes no further .pth lines.

This proves that the start-up line is shipped, found and executed, that it finds the package in either layout, that the
backend registry is read from the installed metadata, and that the forms of the command reach our launcher through
AutoModel's own script. It does not prove that the dependencies resolve: ``uv sync --locked`` in CI's set-up line does.
"""

import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import distribution, version
from pathlib import Path

import pytest
import stub_recipe
import tiny_models
import yaml

from nemo_eagle3_sglang import __version__

pytestmark = pytest.mark.slow
pytest.importorskip("nemo_automodel", reason="nemo-automodel is not installed in the running environment")

REPO = Path(__file__).parents[2]
SHIPPED = ("pyproject.toml", "README.md", "LICENSE", "nemo_eagle3_sglang", "nemo_eagle3_sglang_automodel.pth")
AUTOMODEL = f"nemo-automodel=={version('nemo-automodel')}"
NO_HOOK = "NEMO_EAGLE3_SGLANG_NO_HOOK"
# `uv run` names itself in UV, wherever it was installed.
UV = os.environ.get("UV") or shutil.which(
    "uv", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
)


def run(*command: str | Path, cwd: Path, check: bool = True, **env: str) -> subprocess.CompletedProcess:
    """Run a command outside the checkout and without the running environment's variables."""
    foreign = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "WORLD_SIZE", "RANK", "LOCAL_RANK", NO_HOOK)
    clean = {name: value for name, value in os.environ.items() if name not in foreign}
    done = subprocess.run([*map(str, command)], cwd=cwd, env=clean | env, capture_output=True, text=True, timeout=280)
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


class Environment:
    """A fresh virtual environment made by ``installer``."""

    def __init__(self, root: Path, installer: str):
        self.root, self.installer = root / "env", installer
        root.mkdir(parents=True, exist_ok=True)
        if installer == "uv":
            if UV is None:
                pytest.skip("uv is not installed")
            run(UV, "venv", "--python", sys.executable, self.root, cwd=root)
        else:
            run(sys.executable, "-m", "venv", self.root, cwd=root)
        (self.packages,) = self.root.glob("lib/python*/site-packages")
        self.path_file = self.packages / "zz_running_environment.pth"

    # Installers must not see the running environment: they would take its distributions for installed ones, and could
    # even remove them. So the path file is there for programs only.
    def install(self, *what: str | Path) -> None:
        self.path_file.unlink(missing_ok=True)
        python = self.root / "bin/python"
        pip = (
            [python, "-m", "pip", "install"] if self.installer == "pip" else [UV, "pip", "install", "--python", python]
        )
        run(*pip, "--no-deps", *what, cwd=self.root)

    def uninstall(self, name: str) -> None:
        self.path_file.unlink(missing_ok=True)
        python = self.root / "bin/python"
        pip = [python, "-m", "pip", "uninstall", "-y"] if self.installer == "pip" else []
        run(*(pip or [UV, "pip", "uninstall", "--python", python]), name, cwd=self.root)

    def program(self, name: str, *args: str | Path, check: bool = True, **env: str) -> subprocess.CompletedProcess:
        self.path_file.write_text(f"{distribution('nemo-automodel').locate_file('')}\n")
        return run(self.root / "bin" / name, *args, cwd=self.root, check=check, **env)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Return a copy of what a build reads, so that nothing else of the checkout can be what makes it work."""
    copy = tmp_path_factory.mktemp("source")
    for name in SHIPPED:
        original = REPO / name
        if original.is_dir():
            shutil.copytree(original, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(original, copy / name)
    return copy


# The order of the two installations is mixed in: test_no_file_is_shared says why it cannot matter.
ENVIRONMENTS = [
    ("pip", "normal", "automodel first"),
    ("pip", "editable", "automodel last"),
    ("uv", "normal", "automodel last"),
    ("uv", "editable", "automodel first"),
]
# Every start of `automodel` imports torch, five seconds, so what does not depend on the installer is looked at once.
once = pytest.mark.parametrize("environment", ENVIRONMENTS[-1:], indirect=True, ids=" ".join)


@pytest.fixture(scope="module", params=ENVIRONMENTS, ids=" ".join)
def environment(request, source, tmp_path_factory):
    installer, mode, order = request.param
    environment = Environment(tmp_path_factory.mktemp("environment"), installer)
    environment.mode = mode
    ours = [source] if mode == "normal" else ["-e", source]
    for what in sorted([[AUTOMODEL], ours], key=lambda what: what == [AUTOMODEL], reverse=order == "automodel first"):
        environment.install(*what)
    return environment


@pytest.fixture(scope="module")
def configs(tmp_path_factory):
    """Return the YAML files that must reach our launcher, and one of AutoModel's own, by name."""
    folder = tmp_path_factory.mktemp("configs")
    common = {"recipe_args": {"target_model_backend": "sglang"}}
    contents = {
        "ours": {"recipe": "nemo_eagle3_sglang.training.recipe.TrainEagle3SGLangRecipe"} | common,
        "stock": {"recipe": "TrainEagle3Recipe"} | common,
        "other": {"recipe": "TrainFinetuneRecipeForNextTokenPrediction"},
    }
    for name, content in contents.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(content))
    return {name: folder / f"{name}.yaml" for name in contents}


FORMS = {
    "finetune llm -c ours": lambda configs: ["automodel", "finetune", "llm", "-c", configs["ours"]],
    "automodel ours": lambda configs: ["automodel", configs["ours"]],
    "automodel stock": lambda configs: ["automodel", configs["stock"]],
}
OTHER_FORMS = {
    "am stock": lambda configs: ["am", configs["stock"]],
    "python -m stock": lambda configs: ["python", "-m", "nemo_automodel.cli.app", configs["stock"]],
    "own script": lambda configs: ["nemo-eagle3-sglang", "train", configs["ours"]],
}


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory):
    """Return the YAML keys of a training of two steps on a tiny target."""
    folder = tmp_path_factory.mktemp("tiny")
    tiny_models.save_target(folder / "target")
    tiny_models.write_chat(folder / "train.jsonl", 8)
    return {
        "recipe_args": {
            "target_model_name_or_path": str(folder / "target"),
            "target_model_backend": "sglang",
            "train_data_path": str(folder / "train.jsonl"),
            "seq_length": 64,
            "micro_batch_size": 4,
            "num_epochs": 1,
            "ttt_steps": 2,
            "draft_vocab_size": 100,
            "log_every_steps": 1,
        },
        "optimizer": {"lr": 1.0e-3},
    }


# One form in each environment: what follows the launcher does not know by which form it was reached. Two of the four
# train to the end, half a minute each; in the others the form must reach the launcher.
ENVIRONMENT_FORMS = dict(
    zip(
        (environment[:2] for environment in ENVIRONMENTS),
        ("finetune llm -c ours", "automodel stock", "automodel ours", "finetune llm -c ours"),
        strict=True,
    )
)


@pytest.mark.parametrize("environment", ENVIRONMENTS[1:3], indirect=True, ids=" ".join)
def test_a_form_reaches_our_launcher_in_every_environment(environment, configs):
    form = ENVIRONMENT_FORMS[environment.installer, environment.mode]
    refused_by_our_launcher(environment, FORMS[form](configs))


@pytest.mark.parametrize("environment", ENVIRONMENTS[::3], indirect=True, ids=" ".join)
def test_a_draft_is_trained(environment, configs, tiny_run, tmp_path):
    form = ENVIRONMENT_FORMS[environment.installer, environment.mode]
    *command, config = FORMS[form](configs)
    run = yaml.safe_load(config.read_text()) | tiny_run
    run["recipe_args"] = run["recipe_args"] | {"output_dir": str(tmp_path / "out")}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    done = environment.program(*command, tmp_path / "run.yaml", CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1")
    steps = [json.loads(line)["step"] for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2]
    assert "Trained: loss" in done.stdout
    assert list((tmp_path / "out/checkpoints").glob("epoch_*/model/consolidated/config.json"))


# A request that only our launcher refuses, and before it reads any configuration, shows that the form arrives there.
@once
@pytest.mark.parametrize("form", FORMS)
def test_form_reaches_our_launcher(environment, configs, form):
    refused_by_our_launcher(environment, FORMS[form](configs))


@once
@pytest.mark.parametrize("form", OTHER_FORMS)
def test_other_form_reaches_our_launcher(environment, configs, form):
    refused_by_our_launcher(environment, OTHER_FORMS[form](configs))


@once
def test_torchrun_workers_reach_our_launcher(environment, configs):
    app = ["--nproc-per-node", "2", "-m", "nemo_automodel.cli.app", configs["stock"]]
    done = environment.program("python", "-m", "torch.distributed.run", "--standalone", *app, check=False)
    assert done.returncode == 1
    assert done.stderr.count(f"error: {configs['stock']}: ") == 1


def test_several_processes_in_every_environment(environment, tmp_path):
    config, env = stub_recipe.write(tmp_path)
    done = environment.program("automodel", "finetune", "llm", "-c", config, "--nproc-per-node", "2", **env)
    assert sorted(done.stdout.splitlines()) == [f"rank {rank} of 2 at 127.0.0.1: out" for rank in (0, 1)]


def refused_by_our_launcher(environment, command):
    done = environment.program(*command, "--nproc-per-node", "0", check=False)
    assert done.returncode == 2, done.stderr
    assert "error: --nproc-per-node 0: write how many processes to start" in done.stderr
    assert "Traceback" not in done.stderr


@once
def test_switched_off_is_plain_automodel(environment, configs):
    done = environment.program("automodel", "finetune", "llm", "-c", configs["ours"], check=False, **{NO_HOOK: "1"})
    assert done.returncode == 1
    assert "FileNotFoundError" in done.stderr
    assert "nemo_eagle3_sglang" not in done.stderr


@once
def test_help_stays_automodels(environment):
    done = environment.program("automodel", "--help")
    assert "CLI for NeMo AutoModel recipes" in done.stdout


@once
def test_other_recipes_stay_automodels(environment, configs):
    done = environment.program("automodel", configs["other"], check=False)
    assert done.returncode == 1
    assert "nemo_eagle3_sglang" not in done.stderr.splitlines()[-1]
    assert "nemo_automodel" in done.stderr


def test_registry_is_read_from_the_installed_metadata(environment):
    lines = environment.program("nemo-eagle3-sglang", "backends").stdout.splitlines()
    (sglang,) = [line.split() for line in lines if line.startswith("sglang ")]
    assert sglang == ["sglang", "nemo-eagle3-sglang", __version__, "nemo_eagle3_sglang.engine:build_runner"]


def test_no_file_is_shared(environment):
    """No file is owned by both distributions, so neither the order nor the installer can lose one."""
    code = """if True:
        from importlib.metadata import distribution
        files = [{str(path) for path in distribution(name).files} for name in ("nemo-eagle3-sglang", "nemo-automodel")]
        assert all(files) and "nemo_eagle3_sglang_automodel.pth" in files[0], files[0]
        print(*sorted(files[0] & files[1]))
    """
    assert environment.program("python", "-c", code).stdout.split() == []
    assert (environment.packages / "nemo_eagle3_sglang_automodel.pth").is_file()


@pytest.mark.parametrize("installer", ["pip", "uv"])
def test_uninstalling_leaves_plain_automodel(source, tmp_path, installer):
    environment = Environment(tmp_path, installer)
    environment.install(source)
    environment.install(AUTOMODEL)
    environment.uninstall("nemo-eagle3-sglang")
    assert not list(environment.packages.glob("*eagle3*"))
    assert (environment.root / "bin/automodel").is_file()
    assert (environment.packages / "nemo_automodel/cli/app.py").is_file()


@pytest.mark.skipif(UV is None, reason="uv is not installed")
def test_sdist_holds_the_start_up_line(source, tmp_path):
    """`uv build` makes the wheel from the sdist, so a file that the sdist lacks breaks it."""
    run(UV, "build", "--out-dir", tmp_path, source, cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    environment = Environment(tmp_path / "from_wheel", "uv")
    environment.install(wheel)
    assert (environment.packages / "nemo_eagle3_sglang_automodel.pth").read_text() == (REPO / SHIPPED[-1]).read_text()
