"""The draft's config.json as a serving engine reads it."""

from __future__ import annotations

import json
import shlex

import pytest
import tiny_models
import torch
from transformers import AutoConfig, LlamaConfig, Qwen3Config

from nemo_eagle3_sglang.training.export import make_servable, serve_command


def draft_config(kind: type = LlamaConfig, **changes):
    """Return a config as AutoModel makes it: the target's, with the draft's keys."""
    config = kind(**tiny_models.DIMENSIONS, architectures=["LlamaEagle3DraftModel"], dtype="float32", **changes)
    config.draft_vocab_size = 200
    config.target_hidden_size = 64
    return config


@pytest.mark.parametrize("kind", [LlamaConfig, Qwen3Config])
def test_written_and_read_again(tmp_path, kind):
    config = draft_config(kind)
    make_servable(config, [0, 3, 5])
    config.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["architectures"] == ["LlamaForCausalLMEagle3"]
    assert written["num_hidden_layers"] == 1
    assert written["num_aux_hidden_states"] == 3
    assert written["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 3, 5]
    assert written["eagle_config"]["use_aux_hidden_state"] is True
    assert written["eagle_config"]["capture"] == "serving"
    assert written["draft_vocab_size"] == 200
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(loaded, kind)
    assert loaded.num_hidden_layers == 1
    assert loaded.eagle_config == written["eagle_config"]


def test_a_draft_of_the_residual_stream_says_so():
    config = draft_config()
    make_servable(config, [1, 3, 4], "residual")
    assert config.eagle_config["capture"] == "residual"


def test_all_else_stays_the_targets():
    config, before = draft_config(), draft_config().to_dict()
    make_servable(config, [1, 3, 4])
    after = config.to_dict()
    assert {key for key in before if after.get(key) != before[key]} == {"architectures", "num_hidden_layers"}


def test_vllm_counts_from_the_embedding(tmp_path):
    """Where SGLang's own rule turns the ids written into other layers, vLLM's key names the layers trained on."""
    config = draft_config()
    make_servable(config, [1, 3, 4], trained_ids=[0, 2, 3])
    assert config.eagle_config["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]
    assert config.eagle_aux_hidden_state_layer_ids == [1, 3, 4]
    make_servable(config, [1, 3, 4])
    assert config.eagle_aux_hidden_state_layer_ids == [2, 4, 5]


def test_a_config_without_dtype_gets_the_weights():
    config = draft_config()
    config.dtype = None
    make_servable(config, [1, 3, 4], dtype=torch.bfloat16)
    assert config.to_dict()["dtype"] == "bfloat16"
    config = draft_config()
    make_servable(config, [1, 3, 4], dtype=torch.bfloat16)
    assert config.to_dict()["dtype"] == "float32", "what it says stays"


def test_names_of_transformers_4_are_written_as_well(tmp_path):
    config = draft_config(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5})
    make_servable(config, [1, 3, 4])
    config.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["torch_dtype"] == written["dtype"] == "float32"
    assert written["rope_theta"] == 5e5
    assert written["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}
    assert AutoConfig.from_pretrained(tmp_path).rope_parameters == config.rope_parameters


def test_layer_types_are_as_many_as_layers():
    """Qwen3 lists a type for each layer; transformers refuses a list of another length, also when it is loaded."""
    config = draft_config(Qwen3Config)
    assert len(config.layer_types) == 8
    make_servable(config, [1, 3, 4])
    assert config.layer_types == ["full_attention"]


def test_a_target_without_layer_types_gets_none():
    config = draft_config()
    make_servable(config, [1, 3, 4])
    assert not getattr(config, "layer_types", None)


def test_again_is_no_change():
    """A resumed run does it a second time."""
    config = draft_config(Qwen3Config)
    make_servable(config, (1, 3, 4))
    once = config.to_dict()
    make_servable(config, (1, 3, 4))
    assert config.to_dict() == once
    json.dumps(once["eagle_config"])


def words_of(command: str) -> list[str]:
    """Return the words as a shell has them, which takes a backslash at the end of a line away."""
    return shlex.split(command.replace("\\\n", ""))


def test_serve_command_is_one_shell_command():
    words = words_of(serve_command("some/target", "out/draft"))
    assert words[:4] == ["python", "-m", "sglang.launch_server", "--model-path"]
    options = dict(zip(words[3::2], words[4::2], strict=True))
    assert options == {
        "--model-path": "some/target",
        "--speculative-algorithm": "EAGLE3",
        "--speculative-draft-model-path": "out/draft",
        "--speculative-num-steps": "3",
        "--speculative-eagle-topk": "1",
        "--speculative-num-draft-tokens": "4",
    }


def test_serve_command_names_options_that_sglang_has():
    server_args = pytest.importorskip("sglang.srt.server_args")
    import dataclasses

    names = {f.name for f in dataclasses.fields(server_args.ServerArgs)}
    words = words_of(serve_command("t", "d"))
    assert {w.removeprefix("--").replace("-", "_") for w in words if w.startswith("--")} <= names


@pytest.mark.parametrize("path", ["/data/my models/target", "a;b"])
def test_serve_command_quotes(path):
    words = words_of(serve_command(path, path))
    assert words.count(path) == 2
