"""Which commands are ours, and what running one means; AutoModel, the configuration and the recipe are stand-ins."""

import logging
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from nemo_eagle3_sglang import backends
from nemo_eagle3_sglang.config import load
from nemo_eagle3_sglang.errors import CaptureError, ConfigError
from nemo_eagle3_sglang.training import launch

AUTOMODEL_STATUS = 7
STOCK_SGLANG = {"recipe": "TrainEagle3Recipe", "recipe_args": {"target_model_backend": "sglang"}}
STOCK_HF = {"recipe": "TrainEagle3Recipe", "recipe_args": {"target_model_backend": "colocated"}}
OURS = {"recipe": launch.RECIPE}


@pytest.fixture(autouse=True)
def world(monkeypatch):
    """One process, one registered backend, and AutoModel to be found."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(backends, "registered", lambda: {"sglang": None})
    monkeypatch.setattr(launch, "find_spec", lambda name: object())


@pytest.fixture
def trained(monkeypatch):
    """Replace configuration and recipe; return the list that fills with what the recipe is given."""
    configs = []
    recipe = ModuleType("nemo_eagle3_sglang.training.recipe")
    recipe.run_recipe = configs.append
    monkeypatch.setitem(sys.modules, recipe.__name__, recipe)
    monkeypatch.setattr(
        load, "load_config", lambda path, overrides: (None, {"path": str(path), "set": list(overrides)})
    )
    return configs


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Return a function that runs ``automodel <config> <options>`` and returns (status, who ran it)."""

    def run(config: dict | str | None, *options: str):
        path = tmp_path / "config.yaml"
        if config is not None:
            path.write_text(config if isinstance(config, str) else yaml.safe_dump(config))
        monkeypatch.setattr(sys, "argv", ["automodel", str(path), *options])
        automodel = []
        status = launch.main(lambda: automodel.append(list(sys.argv)) or AUTOMODEL_STATUS)
        assert automodel in ([], [["automodel", str(path), *options]]), "AutoModel must see the arguments untouched"
        return status, "automodel" if automodel else "ours"

    return run


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (OURS, ()),
        ({"recipe": "TrainEagle3SGLangRecipe"}, ()),
        ({"recipe": f" {launch.RECIPE} "}, ()),
        ({"recipe": {"_target_": launch.RECIPE}}, ()),
        (OURS, ("--nproc-per-node", "1")),
        (OURS, ("--nproc_per_node=1",)),
        (OURS | {"skypilot": None, "nemo_run": {}}, ()),
        (STOCK_SGLANG, ()),
        (STOCK_SGLANG | {"recipe": {"_target_": launch.AUTOMODEL_RECIPE}}, ()),
        (STOCK_SGLANG | {"recipe": launch.AUTOMODEL_RECIPE}, ()),
        (STOCK_HF, ("--recipe_args.target_model_backend=sglang",)),
        (STOCK_HF, ("--recipe_args.target_model_backend", "sglang")),
        ({"recipe": "TrainEagle3Recipe"}, ("--a=1", "--recipe_args.target_model_backend=sglang")),
    ],
)
def test_ours(command, trained, config, options):
    assert command(config, *options) == (0, "ours")
    assert len(trained) == 1


@pytest.mark.parametrize(
    ("config", "options"),
    [
        ({"recipe": "TrainFinetuneRecipeForNextTokenPrediction"}, ()),
        ({"recipe": "elsewhere.TrainEagle3SGLangRecipe"}, ()),
        ({"recipe": 3}, ()),
        ({"recipe": {"class": launch.RECIPE}}, ()),
        ({"model": {}}, ()),
        (STOCK_HF, ()),
        (STOCK_HF | {"recipe_args": {"target_model_backend": "vllm"}}, ()),
        (STOCK_HF | {"recipe_args": {"target_model_backend": None}}, ()),
        (STOCK_HF | {"recipe_args": "sglang"}, ()),
        ({"recipe": "TrainEagle3Recipe"}, ()),
        (STOCK_SGLANG, ("--recipe_args.target_model_backend=colocated",)),
        (STOCK_HF, ("--recipe_args.target_model_backend=sglang", "--recipe_args.target_model_backend=colocated")),
        (STOCK_HF, ("--recipe_args.target_model_backend",)),
        (OURS, ("--help",)),
        (OURS, ("-h",)),
        (OURS, ("--nproc-per-node", "two")),
        (OURS | {"skypilot": {"cluster": "x"}}, ()),
        (OURS | {"nemo_run": {"executor": "x"}}, ()),
        ("recipe: [unclosed", ()),
        ("- a list", ()),
        ("", ()),
        (None, ()),
    ],
)
def test_automodels(command, trained, config, options):
    assert command(config, *options) == (AUTOMODEL_STATUS, "automodel")
    assert trained == []


@pytest.mark.parametrize("argv", [[], ["--help"], ["--nproc-per-node"]])
def test_no_config_is_automodels(monkeypatch, argv):
    monkeypatch.setattr(sys, "argv", ["automodel", *argv])
    assert launch.main(lambda: AUTOMODEL_STATUS) == AUTOMODEL_STATUS


def test_overrides_reach_the_configuration(command, trained, tmp_path):
    command(OURS, "--recipe_args.seq_length=64", "--nproc-per-node", "1", "--a.b", "2")
    assert trained == [{"path": str(tmp_path / "config.yaml"), "set": ["--recipe_args.seq_length=64", "--a.b", "2"]}]


@pytest.mark.parametrize("nproc", ["2", "8", "0", "-1"])
def test_several_processes_are_refused(command, trained, capsys, nproc):
    assert command(OURS, f"--nproc-per-node={nproc}") == (2, "ours")
    error = capsys.readouterr().err
    assert error.startswith(f"error: --nproc-per-node {nproc}: several processes are not supported yet")
    assert "Write --nproc-per-node 1" in error
    assert trained == []


@pytest.mark.parametrize("torchrun", [True, False])
def test_several_torchrun_workers_are_refused(command, trained, monkeypatch, capsys, torchrun):
    monkeypatch.setenv("WORLD_SIZE", "4")
    if torchrun:
        monkeypatch.setenv("LOCAL_RANK", "0")
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    assert command(OURS) == (2, "ours")
    assert capsys.readouterr().err.startswith("error: WORLD_SIZE=4 in the environment")
    assert trained == []


def test_one_torchrun_worker_trains(command, trained, monkeypatch):
    for name, value in {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "x"}.items():
        monkeypatch.setenv(name, value)
    assert command(OURS) == (0, "ours")
    assert len(trained) == 1


def test_config_error_is_one_line_without_traceback(command, trained, monkeypatch, capsys):
    def refuse(path, overrides):
        raise ConfigError("recipe_args.seq_length: -1 is not positive")

    monkeypatch.setattr(load, "load_config", refuse)
    assert command(OURS) == (2, "ours")
    assert capsys.readouterr().err == "error: recipe_args.seq_length: -1 is not positive\n"
    assert trained == []


def test_any_other_exception_propagates(command, trained, monkeypatch):
    def fail(config):
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(sys.modules["nemo_eagle3_sglang.training.recipe"], "run_recipe", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        command(OURS)


def test_missing_automodel_names_the_extra(command, trained, monkeypatch, capsys):
    monkeypatch.setattr(launch, "find_spec", lambda name: None)
    assert command(OURS) == (2, "ours")
    assert "pip install 'nemo-eagle3-sglang[all]'" in capsys.readouterr().err
    assert trained == []


@pytest.mark.parametrize(
    ("gpus", "options", "lines"), [(2, (), 1), (2, ("--nproc-per-node=1",), 0), (1, (), 0), (0, (), 0)]
)
def test_resting_gpus_are_told_in_one_line(command, trained, monkeypatch, caplog, gpus, options, lines):
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    with caplog.at_level(logging.INFO, logger=launch.__name__):
        command(OURS, *options)
    assert len(caplog.messages) == lines
    assert len(trained) == 1


def test_parser_agrees_with_automodels():
    """Where AutoModel is installed, its own parser must split arguments as ours does."""
    app = pytest.importorskip("nemo_automodel.cli.app")
    for argv in (
        ["x.yaml"],
        ["x.yaml", "--nproc-per-node", "2", "--a.b=1", "--c", "3"],
        ["--a.b=1", "x.yaml", "--nproc_per_node=2"],
        ["--a.b", "5", "x.yaml"],
        ["--nproc-p", "2", "x.yaml", "--flag"],
    ):
        args, rest = app.build_parser().parse_known_args(argv)
        assert launch.parse_command(argv) == launch.Command(Path(args.config), args.nproc_per_node, rest)


def test_a_capture_error_is_one_line_and_status_1(capsys):
    def action():
        raise CaptureError("this model's capture is not understood")

    assert launch.exit_status(action) == 1
    assert capsys.readouterr().err == "error: this model's capture is not understood\n"
