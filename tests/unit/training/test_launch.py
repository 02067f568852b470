"""Which commands are ours, and what running one means; AutoModel, the configuration and the recipe are stand-ins."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import yaml

from nemo_eagle3_sglang import backends
from nemo_eagle3_sglang.config import load
from nemo_eagle3_sglang.errors import CaptureError, ConfigError
from nemo_eagle3_sglang.training import elastic, launch

AUTOMODEL_STATUS = 7
JOB_STATUS = 9
STOCK_SGLANG = {"recipe": "TrainEagle3Recipe", "recipe_args": {"target_model_backend": "sglang"}}
STOCK_HF = {"recipe": "TrainEagle3Recipe", "recipe_args": {"target_model_backend": "colocated"}}
OURS = {"recipe": launch.RECIPE}


TORCHRUN = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "x"}
SCHEDULER = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "node7", "MASTER_PORT": "29500"}


@pytest.fixture(autouse=True)
def world(monkeypatch):
    """No job, no GPU, one registered backend, and AutoModel to be found."""
    for name in (*launch.JOB_VARIABLES, "TORCHELASTIC_RUN_ID", elastic.LAUNCHER_PID):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(launch, "RANK_0_FIRST", 0.0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(backends, "registered", lambda: {"sglang": None})
    monkeypatch.setattr(launch, "find_spec", lambda name: object())


@pytest.fixture
def trained(monkeypatch):
    """Replace configuration and recipe; return the list that fills with what the recipe is given."""
    configs = []
    recipe = ModuleType("nemo_eagle3_sglang.training.recipe")
    recipe.run_recipe = configs.append
    monkeypatch.setitem(sys.modules, recipe.__name__, recipe)
    config = SimpleNamespace(recipe_args=SimpleNamespace(device="auto"), dist_env=SimpleNamespace(backend="nccl"))
    monkeypatch.setattr(
        load, "load_config", lambda path, overrides: (config, {"path": str(path), "set": list(overrides)})
    )
    return configs


@pytest.fixture
def started(monkeypatch):
    """Replace torchrun; return the list that fills with what it is asked for."""
    jobs = []
    monkeypatch.setattr(elastic, "start_workers", lambda *args: jobs.append(args) or JOB_STATUS)
    return jobs


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


HERE = 1


@pytest.mark.parametrize(
    ("gpus", "env", "options", "where"),
    [
        (0, {}, (), HERE),
        (0, {}, ("--nproc-per-node=1",), HERE),
        (0, {}, ("--nproc-per-node=2",), 2),
        (1, {}, (), HERE),
        (1, {}, ("--nproc-per-node=1",), HERE),
        (4, {}, (), 4),
        (4, {}, ("--nproc-per-node", "1"), HERE),
        (4, {}, ("--nproc_per_node", "3"), 3),
        (4, {}, ("--nproc-per-node=4",), 4),
        (4, TORCHRUN, (), HERE),
        (4, TORCHRUN, ("--nproc-per-node=2",), HERE),
        (4, TORCHRUN | {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}, (), HERE),
        (4, SCHEDULER, (), HERE),
        (4, SCHEDULER, ("--nproc-per-node=1",), HERE),
        (4, SCHEDULER | {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}, (), HERE),
        (4, SCHEDULER | {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}, ("--nproc-per-node=2",), 2),
        # What other programs leave in the environment makes no job.
        (4, {"WORLD_SIZE": "1"}, (), 4),
        (4, {"WORLD_SIZE": "", "RANK": ""}, (), 4),
        (4, {"LOCAL_RANK": "0", "RANK": "3"}, (), 4),
        (4, {"TORCHELASTIC_RUN_ID": "x"}, (), 4),
        (4, {"MASTER_ADDR": "node7", "MASTER_PORT": "29500"}, ("--nproc-per-node=2",), 2),
    ],
)
def test_where_a_command_runs(command, trained, started, monkeypatch, tmp_path, gpus, env, options, where):
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpus > 0)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    status = command(OURS, *options, "--a.b", "2")
    if where == HERE:
        assert (status, len(trained), started) == ((0, "ours"), 1, [])
    else:
        arguments = ["train", str(tmp_path / "config.yaml"), "--a.b", "2"]
        assert (status, trained, started) == ((JOB_STATUS, "ours"), [], [(where, arguments, 2)])


@pytest.mark.parametrize(
    ("gpus", "env", "options", "message"),
    [
        (0, {}, ("--nproc-per-node=0",), "--nproc-per-node 0: write how many processes to start"),
        (0, TORCHRUN, ("--nproc-per-node=-1",), "--nproc-per-node -1: write how many"),
        (2, {}, ("--nproc-per-node=3",), "each process needs a GPU of its own, and 2 are visible"),
        (1, {}, ("--nproc-per-node=2",), "each process needs a GPU of its own, and 1 is visible"),
        (2, {"WORLD_SIZE": "2"}, (), "but RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT are not set"),
        (2, SCHEDULER | {"RANK": ""}, (), "one of 2 processes, but RANK is not set"),
        (2, SCHEDULER | {"MASTER_ADDR": ""}, ("--nproc-per-node=2",), "but MASTER_ADDR is not set"),
        (2, SCHEDULER, ("--nproc-per-node=2",), "already one of WORLD_SIZE=2: leave it out"),
        (2, {"WORLD_SIZE": "two"}, (), "WORLD_SIZE=two in the environment is not a number"),
        (2, {"WORLD_SIZE": "0"}, (), "WORLD_SIZE=0 in the environment is not a number"),
    ],
)
def test_what_cannot_be_started(command, trained, started, monkeypatch, capsys, gpus, env, options, message):
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert command(OURS, *options) == (2, "ours")
    assert message in capsys.readouterr().err
    assert (trained, started) == ([], [])


@pytest.mark.parametrize(("options", "lines"), [((), 1), (("--nproc-per-node=2",), 0)])
def test_all_gpus_are_taken_with_a_word(command, trained, started, monkeypatch, capsys, options, lines):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    command(OURS, *options)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == lines
    assert all(line.startswith("2 GPUs are visible") and "--nproc-per-node N" in line for line in said)


@pytest.mark.parametrize(
    ("gpu", "device", "dist_env", "backend"),
    [
        (False, "auto", None, "gloo"),
        (False, "auto", {}, "gloo"),
        (False, "cpu", {"timeout_minutes": 5}, "gloo"),
        (False, "auto", {"backend": "gloo"}, "gloo"),
        (False, "auto", {"backend": "nccl"}, None),
        (False, "auto", {"backend": "cpu:gloo,cuda:nccl"}, None),
        (False, "cuda", {"backend": "nccl"}, "nccl"),
        (True, "auto", {"backend": "nccl"}, "nccl"),
        (True, "auto", {}, ""),
    ],
)
def test_collectives_of_several_processes(monkeypatch, gpu, device, dist_env, backend):
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpu)
    merged = {"a": 1} if dist_env is None else {"a": 1, "dist_env": dict(dist_env)}
    named = SimpleNamespace(backend=(dist_env or {}).get("backend", "nccl"))
    config = SimpleNamespace(recipe_args=SimpleNamespace(device=device), dist_env=named)
    if backend is None:
        with pytest.raises(ConfigError, match=r"dist_env.backend: .*nccl.* write --dist_env.backend=gloo"):
            launch.choose_collectives(config, merged)
        return
    launch.choose_collectives(config, merged)
    wanted = (dist_env or {}) | ({"backend": backend} if backend else {})
    assert merged == {"a": 1, "dist_env": wanted}


@pytest.mark.parametrize(("env", "set_"), [({}, False), (TORCHRUN, True), (SCHEDULER, True)])
def test_a_worker_on_a_cpu_gets_gloo(command, trained, monkeypatch, env, set_):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    command(OURS)
    assert [config.get("dist_env") for config in trained] == [{"backend": "gloo"} if set_ else None]


@pytest.mark.parametrize(("env", "lines"), [({}, 1), ({"RANK": "1"}, 1), (TORCHRUN, 0), (TORCHRUN | {"RANK": "0"}, 1)])
def test_rank_0_says_that_it_loads(command, trained, monkeypatch, capsys, env, lines):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    command(OURS)
    assert capsys.readouterr().err.count("Loading NeMo AutoModel") == lines


@pytest.mark.parametrize(
    ("env", "wait", "printed"),
    [
        ({}, [], "error: no\n"),
        ({"RANK": "3"}, [], "error: no\n"),
        (TORCHRUN | {"RANK": "0"}, [], "error: no\n"),
        (TORCHRUN, [4.5], "[rank 1] error: no\n"),
    ],
)
def test_rank_0_speaks_first(monkeypatch, capsys, env, wait, printed):
    waits = []
    monkeypatch.setattr(launch, "RANK_0_FIRST", 4.5)
    monkeypatch.setattr(launch.time, "sleep", waits.append)
    for name, value in env.items():
        monkeypatch.setenv(name, value)

    def action():
        raise ConfigError("no")

    assert launch.exit_status(action) == 2
    assert (waits, capsys.readouterr().err) == (wait, printed)


def test_ctrl_c_has_no_traceback_in_a_job(monkeypatch):
    def action():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        launch.exit_status(action)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert launch.exit_status(action) == 130


def test_a_typo_is_found_before_any_worker_starts(command, trained, started, monkeypatch):
    def refuse(path, overrides):
        raise ConfigError("recipe_args.seq_length: -1 is not positive")

    monkeypatch.setattr(load, "load_config", refuse)
    assert command(OURS, "--nproc-per-node=2") == (2, "ours")
    assert started == []


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
