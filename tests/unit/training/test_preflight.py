"""What is refused before anything is loaded or written, and in which words."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
import transformers
import yaml

from nemo_eagle3_sglang.config.schema import RecipeArgs
from nemo_eagle3_sglang.errors import ConfigError
from nemo_eagle3_sglang.training import preflight


def recipe_args(target: Path | str = "some/target", **changes: Any) -> RecipeArgs:
    values = {
        "target_model_name_or_path": str(target),
        "train_data_path": "train.jsonl",
        "output_dir": "out",
        "seq_length": 64,
        "micro_batch_size": 1,
        "num_epochs": 1,
        "ttt_steps": 4,
    }
    return RecipeArgs.model_validate(values | changes)


@pytest.fixture
def target(tmp_path: Path):
    """Return a function that writes a config.json with changes, or without the keys set to None."""

    def write(**changes: Any) -> Path:
        config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
        config |= tiny_models.DIMENSIONS | changes
        config = {key: value for key, value in config.items() if value is not None}
        (tmp_path / "config.json").write_text(json.dumps(config))
        return tmp_path

    return write


def refused(target: Path, **changes: Any) -> str:
    args = recipe_args(target, **changes)
    with pytest.raises(ConfigError) as caught:
        preflight.check_target(args, preflight.load_target_config(args))
    return str(caught.value)


def test_a_good_target_gives_its_aux_ids(target):
    args = recipe_args(target(), draft_vocab_size=500, seq_length=512)
    config = preflight.load_target_config(args)
    assert preflight.check_target(args, config) == [1, 3, 4]
    args = recipe_args(target(), aux_layer_ids=[6, 0, 2])
    assert preflight.check_target(args, config) == [6, 0, 2]


def test_a_target_without_dtype(target):
    message = refused(target(dtype=None))
    assert "config.json names no dtype" in message
    assert 'add "dtype": "bfloat16"' in message


def test_the_old_name_of_dtype_counts(target):
    args = recipe_args(target(dtype=None, torch_dtype="float16"))
    assert preflight.check_target(args, preflight.load_target_config(args)) == [1, 3, 4]


def test_seq_length_beyond_the_context(target):
    message = refused(target(), seq_length=513)
    assert message.startswith("recipe_args.seq_length: 513 is longer than the target's context of 512 tokens")
    assert message.endswith("write at most 512")


def test_draft_vocabulary_beyond_the_targets(target):
    message = refused(target(), draft_vocab_size=501)
    assert message.startswith("recipe_args.draft_vocab_size: 501 is larger than the target's vocabulary of 500")
    assert "null for all of it" in message


@pytest.mark.parametrize(("ids", "words"), [([0, 1, 8], "8 is out of range"), ([0, 1, 7], "7 is the target's last")])
def test_aux_ids_that_the_target_lacks(target, ids, words):
    message = refused(target(), aux_layer_ids=ids)
    assert message.startswith(f"recipe_args.aux_layer_ids: {ids}: {words}")


def test_a_shallow_target(target):
    assert "4 layers, too few for the default aux layers" in refused(target(num_hidden_layers=4))


def test_sizes_of_a_multimodal_target_are_those_of_its_text_model(tmp_path):
    text = {"model_type": "qwen3_vl_text", **tiny_models.DIMENSIONS, "num_hidden_layers": 9}
    config = {"model_type": "qwen3_vl", "text_config": text, "dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    args = recipe_args(tmp_path)
    assert preflight.check_target(args, preflight.load_target_config(args)) == [1, 3, 5]
    assert "context of 512" in refused(tmp_path, seq_length=513)


def test_a_folder_without_config(tmp_path):
    with pytest.raises(ConfigError, match=f"target_model_name_or_path: {tmp_path} holds no config.json"):
        preflight.load_target_config(recipe_args(tmp_path))


@pytest.mark.parametrize("text", ["{", '{"model_type": "no-such-model"}', "{}"])
def test_a_config_that_cannot_be_read(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"target_model_name_or_path: .* cannot be read"):
        preflight.load_target_config(recipe_args(tmp_path))


def test_a_hub_id_without_a_hub():
    with pytest.raises(ConfigError, match="target_model_name_or_path: 'no-such/model-at-all' cannot be read"):
        preflight.load_target_config(recipe_args("no-such/model-at-all"))


@pytest.fixture
def host(monkeypatch):
    """Return a function that pretends a host: usable CUDA, a GPU that is there, torch built for CUDA."""

    def pretend(usable: bool, present: bool = False, build: str | None = "13.0") -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: usable)
        monkeypatch.setattr(preflight, "_gpu_present", lambda: present)
        monkeypatch.setattr(torch.version, "cuda", build)

    return pretend


@pytest.mark.parametrize("wanted", ["auto", "cpu"])
def test_a_host_without_gpu_trains_on_its_cpu(host, wanted):
    host(usable=False)
    assert preflight.check_device(wanted) == torch.device("cpu")


@pytest.mark.parametrize("wanted", ["auto", "cuda"])
def test_a_host_with_gpu_trains_on_it(host, monkeypatch, wanted):
    host(usable=True, present=True)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert preflight.check_device(wanted) == torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("wanted", "present", "build", "words"),
    [
        ("cuda", False, "13.0", ("sees none", "--recipe_args.device=cpu")),
        ("cuda", True, None, ("built without CUDA", "install the CUDA build")),
        ("cuda", True, "13.0", ("cannot use the one in this host", "update it")),
        ("auto", True, "13.0", ("cannot use the one in this host", "driver")),
        ("auto", True, None, ("built without CUDA",)),
    ],
)
def test_missing_or_wrong_cuda(host, wanted, present, build, words):
    host(usable=False, present=present, build=build)
    with pytest.raises(ConfigError, match=f"^recipe_args.device: '{wanted}' needs a CUDA device") as caught:
        preflight.check_device(wanted)
    assert all(word in str(caught.value) for word in words)


def test_the_cpu_of_a_host_with_gpus(host):
    host(usable=True, present=True)
    with pytest.raises(ConfigError, match=r"recipe_args.device: 'cpu' on a host with GPUs.*CUDA_VISIBLE_DEVICES="):
        preflight.check_device("cpu")


@pytest.mark.parametrize(("visible", "present"), [("", False), ("-1", False), ("0", True), (None, True)])
def test_a_hidden_gpu_is_no_gpu(monkeypatch, visible, present):
    monkeypatch.setattr(Path, "exists", lambda self: str(self) == "/dev/nvidia0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert preflight._gpu_present() is present


def test_output_dir_need_not_be_there_and_is_not_made(tmp_path, monkeypatch):
    preflight.check_output_dir(str(tmp_path / "a" / "b"))
    monkeypatch.chdir(tmp_path)
    preflight.check_output_dir("outputs/run")
    assert list(tmp_path.iterdir()) == []


def test_output_dir_keeps_what_is_in_it(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    preflight.check_output_dir(str(tmp_path))
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("below", ["", "/out", "/a/b/out"])
def test_output_dir_that_is_or_lies_under_a_file(tmp_path, below):
    (tmp_path / "file").write_text("")
    path = f"{tmp_path}/file{below}"
    with pytest.raises(ConfigError, match=f"^recipe_args.output_dir: {path} cannot be written: "):
        preflight.check_output_dir(path)
    assert os.listdir(tmp_path) == ["file"]


def test_the_key_of_another_folder_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"^checkpoint.checkpoint_dir: .*file/x cannot be written: Not a directory"):
        preflight.check_output_dir(f"{tmp_path}/file/x", "checkpoint.checkpoint_dir")


def test_output_dir_on_a_full_or_read_only_disk(tmp_path, monkeypatch):
    def refuse(**_kwargs):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(preflight.tempfile, "TemporaryFile", refuse)
    with pytest.raises(ConfigError, match="cannot be written: Read-only file system"):
        preflight.check_output_dir(str(tmp_path))


# Resuming

TEXT = transformers.LlamaConfig(num_hidden_layers=16, vocab_size=500)


@pytest.fixture
def checkpoint(tmp_path):
    """A checkpoint as AutoModel leaves it, with the configuration of the run that made it."""

    def write(**changes):
        config = {"recipe_args": recipe_args().model_dump(exclude_unset=True) | changes}
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
        return tmp_path

    return write


@pytest.mark.parametrize(
    ("then", "now"),
    [
        ({}, {"target": "owner/other"}),
        ({}, {"aux_layer_ids": [2, 4, 6]}),
        ({}, {"draft_vocab_size": 100}),
        ({"draft_vocab_size": 100}, {}),
        ({}, {"capture": "residual"}),
        ({}, {"norm_output": True}),
    ],
)
def test_a_checkpoint_of_another_draft_is_refused(checkpoint, then, now):
    (key,) = then or now
    key = "target_model_name_or_path" if key == "target" else key
    with pytest.raises(ConfigError, match=f"another draft .{key}: .*another recipe_args.output_dir"):
        preflight.check_resume(checkpoint(**then), recipe_args(**now), TEXT)


def test_a_checkpoint_of_the_same_draft_is_gone_on_with(checkpoint, tmp_path, monkeypatch):
    folder = checkpoint()
    assert preflight.check_resume(folder, recipe_args(num_epochs=9, log_every_steps=3), TEXT) == []
    # The default aux ids, written out, and in another order.
    assert preflight.check_resume(folder, recipe_args(aux_layer_ids=[7, 1, 12]), TEXT) == []
    noted = preflight.check_resume(folder, recipe_args(train_data_path="other.jsonl", seq_length=32), TEXT)
    assert noted == ["train_data_path: train.jsonl -> other.jsonl", "seq_length: 64 -> 32"]
    # Written as a variable, as text, or left to its default: the same draft.
    monkeypatch.setenv("MY_TARGET", "some/target")
    written = checkpoint(target_model_name_or_path="${MY_TARGET}", draft_vocab_size="500")
    assert preflight.check_resume(written, recipe_args(), TEXT) == []
    assert preflight.check_resume(tmp_path / "none", recipe_args(), TEXT) == []


@pytest.mark.parametrize("target", ["./nope", "/nope", "a/b/c", "tests/nope"])
def test_a_missing_folder_is_said_without_asking_a_hub(target, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[3])
    with pytest.raises(ConfigError, match=f"there is no folder {target}"):
        preflight.load_target_config(recipe_args(target))


def test_the_order_of_the_input_columns_counts_under_residual(checkpoint):
    """Under serving the engine sorts them; under residual another order would permute the draft's columns."""
    folder = checkpoint(capture="residual", aux_layer_ids=[0, 3, 5])
    with pytest.raises(ConfigError, match=r"another draft .aux_layer_ids"):
        preflight.check_resume(folder, recipe_args(capture="residual", aux_layer_ids=[5, 3, 0]), TEXT)
    assert preflight.check_resume(folder, recipe_args(capture="residual", aux_layer_ids=[0, 3, 5]), TEXT) == []
