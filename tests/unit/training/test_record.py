"""`run.jsonl`: versions, configuration and memory plan of each start."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_models
import torch

import nemo_eagle3_sglang
from nemo_eagle3_sglang.config.load import validate
from nemo_eagle3_sglang.config.schema import Config
from nemo_eagle3_sglang.training import memory, record

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return tiny_models.save_target(tmp_path_factory.mktemp("target"))


def config_of(target: Path, out: Path, **recipe_args: Any) -> Config:
    return validate(
        {
            "recipe_args": {
                "target_model_name_or_path": str(target),
                "target_model_backend": "sglang",
                "train_data_path": "train.jsonl",
                "output_dir": str(out),
                "seq_length": 64,
                "micro_batch_size": 2,
                "num_epochs": 1,
                "ttt_steps": 3,
                **recipe_args,
            },
            "optimizer": {"lr": 1.0e-4},
        }
    )


def test_each_start_is_a_line(target, tmp_path):
    config = config_of(target, tmp_path)
    record.write(config, "flat", CPU, 2, 0)
    with (tmp_path / "run.jsonl").open("a") as sink:
        sink.write('{"step": 3, "ti')  # killed
    record.write(config, "automodel", CPU, 1, 5)
    first, torn, second = (tmp_path / "run.jsonl").read_text().splitlines()
    first, second = json.loads(first), json.loads(second)
    assert torn == '{"step": 3, "ti'
    assert (first["step"], first["world_size"], first["trainer"]) == (0, 2, "flat")
    assert (second["step"], second["world_size"], second["trainer"]) == (5, 1, "automodel")
    assert first["device"] == "cpu"
    assert first["time"] > 1e9
    assert first["versions"]["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert first["versions"]["nemo-eagle3-sglang"] == nemo_eagle3_sglang.__version__
    assert first["config"]["recipe_args"]["seq_length"] == 64
    assert first["config"]["recipe_args"]["shuffle_seed"] == 42, "defaults are written out"


def test_another_environments_sglang_is_not_this_ones():
    assert record.versions("/other/bin/python")["sglang"] == "that of /other/bin/python"


def test_what_is_not_installed_has_no_version(monkeypatch):
    monkeypatch.setattr(record, "DISTRIBUTIONS", ("no-such-distribution",))
    assert record.versions(None)["no-such-distribution"] is None


def test_the_memory_is_that_of_plan(target, tmp_path):
    found = record.memory_plan(config_of(target, tmp_path), "flat", 1, 80 * 10**9)
    parts = found["parts"]
    assert parts["target weights"] + parts["KV pool"] + parts["KV pool beyond a forward"] == 0.5 * 80e9
    resident = sum(size for name, size in parts.items() if name not in ("target forward", "draft activations"))
    assert found["peak"] == resident + max(parts["target forward"], parts["draft activations"])
    assert found["gpu"] == 80 * 10**9


def test_the_trainer_that_was_chosen_counts(target, tmp_path):
    config = config_of(target, tmp_path)
    flat, automodel = (record.memory_plan(config, name, 1, 0)["parts"] for name in ("flat", "automodel"))
    assert flat["draft activations"] < automodel["draft activations"]


def test_a_target_without_sglang_has_no_kv_pool(target, tmp_path):
    found = record.memory_plan(config_of(target, tmp_path, target_model_backend="hf"), "flat", 1, 80 * 10**9)
    assert "KV pool" not in found["parts"]
    *resident, forward, backward = found["parts"].values()
    assert found["peak"] == sum(resident) + max(forward, backward)


def test_automodels_own_backends_are_not_counted(target, tmp_path):
    found = record.memory_plan(config_of(target, tmp_path, target_model_backend="colocated"), "automodel", 1, 0)
    assert "colocated" in found["reason"]


def test_a_target_that_cannot_be_counted_does_not_stop_the_run(target, tmp_path, monkeypatch):
    def unknown(*args: object) -> int:
        raise KeyError("intermediate_size")

    monkeypatch.setattr(memory, "target_bytes", unknown)
    found = record.memory_plan(config_of(target, tmp_path), "flat", 1, 0)
    assert found == {"reason": "KeyError: 'intermediate_size'"}


def test_a_gpu_is_named_with_its_memory(target, tmp_path, monkeypatch):
    properties = SimpleNamespace(name="NVIDIA H200", total_memory=150 * 10**9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    record.write(config_of(target, tmp_path), "flat", torch.device("cuda"), 1, 0)
    line = json.loads((tmp_path / "run.jsonl").read_text())
    assert line["device"] == "NVIDIA H200"
    assert line["memory"]["gpu"] == 150 * 10**9
