"""The exported draft in SGLang's own EAGLE-3 class on a CPU: every weight arrives, and the forward is the trainer's."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import tiny_models
import torch
from transformers import (
    AutoConfig,
    DeepseekV3Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    PretrainedConfig,
    Qwen2_5_VLConfig,
    Qwen3Config,
)

from nemo_eagle3_sglang.engine import versions
from nemo_eagle3_sglang.engine.batch import forward_batch
from nemo_eagle3_sglang.engine.runner import SGLangRunner
from nemo_eagle3_sglang.training.draft_registry import draft_config, obstacles
from nemo_eagle3_sglang.training.export import make_servable

draft_llama = pytest.importorskip("nemo_automodel.components.speculative.eagle.draft_llama", reason="the trainer's")

VOCAB, DRAFT_VOCAB, HIDDEN = 500, 96, 64
LENGTHS = [9, 14]
MLA = {"q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 24}
YARN = {"rope_type": "yarn", "rope_theta": 5e4, "factor": 8.0, "original_max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64}
SIZES = {**tiny_models.DIMENSIONS, "dtype": "float32", "architectures": ["LlamaEagle3DraftModel"]}
VL_TEXT = {k: v for k, v in SIZES.items() if k not in ("head_dim", "architectures")}


def text(kind: type[PretrainedConfig], **changes: Any) -> PretrainedConfig:
    return kind(**{**SIZES, **changes})


# Text configs of targets; `own` ones are what AutoModel itself builds its draft on.
TARGETS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: text(LlamaConfig),
    "llama with llama3 RoPE": lambda: text(LlamaConfig, rope_parameters=LLAMA3),
    "llama with linear RoPE": lambda: text(
        LlamaConfig, rope_parameters={"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0}
    ),
    "qwen3": lambda: text(Qwen3Config),
    "qwen3 with YaRN": lambda: text(Qwen3Config, rope_parameters=YARN),
    "qwen2.5-vl, wrapped, multimodal RoPE": lambda: Qwen2_5_VLConfig(
        text_config={**VL_TEXT, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
    ).get_text_config(),
    "kimi, wrapped, MLA and DeepSeek's YaRN": lambda: text(
        DeepseekV3Config, **MLA, rope_parameters={**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}
    ),
    "gemma-3": lambda: text(Gemma3TextConfig),
    "gpt-oss, biases and YaRN": lambda: text(GptOssConfig),
}


class Draft:
    """AutoModel's draft as the recipe builds it, and its export as the checkpoint writes it."""

    def __init__(self, folder: Path, target: PretrainedConfig, **flags: Any) -> None:
        for key, value in {"draft_vocab_size": DRAFT_VOCAB, "target_hidden_size": HIDDEN, **flags}.items():
            setattr(target, key, value)
        target.attn_implementation, target.tie_word_embeddings = "eager", False
        torch.manual_seed(1)
        config = draft_config(target) if obstacles(target) else target
        self.model = draft_llama.LlamaEagle3DraftModel(config).float().eval()
        for name, parameter in self.model.named_parameters():
            parameter.data.uniform_(0.5, 1.5) if "norm" in name else parameter.data.normal_(std=0.15)
        self.selected = torch.randperm(VOCAB)[:DRAFT_VOCAB].sort().values
        self.model.set_vocab_mapping(self.selected)
        make_servable(self.model.config, [1, 3, 4])
        self.folder = folder
        self.weights = {k: v.contiguous() for k, v in self.model.state_dict().items()}
        safetensors.torch.save_file(self.weights, folder / "model.safetensors")
        # As AutoModel's checkpoint addon does (0.6.0, components/checkpoint/addons.py).
        (folder / "config.json").write_text(self.model.config.to_json_string(use_diff=False))


@pytest.fixture(params=TARGETS)
def draft(request: pytest.FixtureRequest, tmp_path: Path) -> Draft:
    folder = tmp_path / "draft"
    folder.mkdir()
    return Draft(folder, TARGETS[request.param]())


def heads_of(config: PretrainedConfig) -> dict[str, int]:
    return {key: getattr(config, key) for key in ("num_attention_heads", "num_key_value_heads", "head_dim")}


@pytest.fixture(scope="module")
def runners(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., SGLangRunner]]:
    """Give an engine whose KV pool fits the draft's heads; the last one is kept while it fits."""
    held: list[tuple[dict[str, int], SGLangRunner]] = []

    def get(config: PretrainedConfig) -> SGLangRunner:
        heads = heads_of(config)
        if held and held[-1][0] == heads:
            return held[-1][1]
        while held:
            held.pop()[1].close()
        folder = tiny_models.save_target(tmp_path_factory.mktemp("target"), "llama", **heads)
        held.append((heads, SGLangRunner.build(tiny_models.make_request(folder))))
        return held[-1][1]

    yield get
    while held:
        held.pop()[1].close()


def load_in_sglang(folder: Path) -> torch.nn.Module:
    """Load a draft folder as SGLang's draft worker does: its config reader, its class registry, its loader."""
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_loader import get_model

    # By itself SGLang serves a float32 checkpoint in float16.
    config = ModelConfig(str(folder), is_draft_model=True, dtype="float32")
    with versions.build_environment(torch.device("cpu")):
        return get_model(model_config=config, load_config=LoadConfig(), device_config=DeviceConfig("cpu"))


def expected_parameters(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return SGLang's parameters as they must be: q, k, v and gate, up are fused by it."""
    layer = "model.layers.0."
    fused = {
        f"{layer}self_attn.qkv_proj.weight": [f"{layer}self_attn.{x}_proj.weight" for x in "qkv"],
        f"{layer}mlp.gate_up_proj.weight": [f"{layer}mlp.{x}_proj.weight" for x in ("gate", "up")],
    }
    parts = {part for names in fused.values() for part in names}
    plain = {k: v for k, v in weights.items() if k not in {*parts, "d2t", "t2d"}}
    return plain | {name: torch.cat([weights[part] for part in names]) for name, names in fused.items()}


def test_every_weight_arrives(draft: Draft, runners):
    runners(draft.model.config)
    served = load_in_sglang(draft.folder)
    assert type(served).__name__ == "LlamaForCausalLMEagle3"
    parameters, expected = dict(served.named_parameters()), expected_parameters(draft.weights)
    assert set(parameters) == set(expected)
    for name, value in expected.items():
        rows = value.shape[0] if name in ("model.embed_tokens.weight", "lm_head.weight") else None
        assert torch.equal(parameters[name][:rows], value), name
    assert torch.equal(served.hot_token_id, draft.selected)
    assert len(served.model.layers) == 1
    assert served.load_lm_head_from_target is False


@torch.no_grad()
def test_forward_is_the_trainers(draft: Draft, runners):
    """The first step of training-time test: same tokens, same aux states, in float32."""
    runner = runners(draft.model.config)
    served = load_in_sglang(draft.folder)
    torch.manual_seed(2)
    tokens, aux = torch.randint(0, VOCAB, (sum(LENGTHS),)), torch.randn(sum(LENGTHS), 3 * HIDDEN)
    logits, hidden = serve(runner, served, tokens, aux)
    start = 0
    for length in LENGTHS:
        part = slice(start, start + length)
        projected = draft.model.project_hidden_states(aux[None, part])
        mask = torch.ones(1, length, dtype=torch.long)
        trained = draft.model(input_ids=tokens[None, part], projected_hidden_states=projected, attention_mask=mask)
        torch.testing.assert_close(hidden[part], trained[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(logits[part], draft.model.compute_logits(trained)[0], rtol=1e-4, atol=1e-4)
        start += length


def serve(
    runner: SGLangRunner, served: torch.nn.Module, tokens: torch.Tensor, aux: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the draft's logits and what it feeds to its next step, for sequences of ``LENGTHS``."""
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

    model_runner = runner._runner()
    with forward_batch(model_runner, tokens, LENGTHS) as batch:
        batch.spec_info = SimpleNamespace(hidden_states=aux)
        model_runner.attn_backend.init_forward_metadata(batch)
        with forward_context(ForwardContext(attn_backend=model_runner.attn_backend)):
            normed, (hidden,) = served.model(tokens, batch.positions, batch)
    return normed @ served.lm_head.weight[:DRAFT_VOCAB].T, hidden


@torch.no_grad()
@pytest.mark.parametrize("flags", [{"fc_norm": True}, {"norm_output": True}], ids=["fc_norm", "norm_output"])
def test_eagle_3_1_is_served(tmp_path, runners, flags):
    draft = Draft(tmp_path, text(LlamaConfig), **flags)
    runner = runners(draft.model.config)
    served = load_in_sglang(draft.folder)
    torch.manual_seed(2)
    tokens, aux = torch.randint(0, VOCAB, (sum(LENGTHS),)), torch.randn(sum(LENGTHS), 3 * HIDDEN)
    logits, hidden = serve(runner, served, tokens, aux)
    first = slice(0, LENGTHS[0])
    trained = draft.model(
        input_ids=tokens[None, first],
        projected_hidden_states=draft.model.project_hidden_states(aux[None, first]),
        attention_mask=torch.ones(1, LENGTHS[0], dtype=torch.long),
    )
    torch.testing.assert_close(hidden[first], trained[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits[first], draft.model.compute_logits(trained)[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("named", [True, False], ids=["the target's dtype", "no dtype in the target's text config"])
def test_sglang_serves_in_the_dtype_of_training(tmp_path, named):
    """Without a dtype in config.json it would be float16."""
    from sglang.srt.configs.model_config import ModelConfig

    config = draft_config(text(LlamaConfig, dtype="bfloat16" if named else None))
    make_servable(config, [1, 3, 4], dtype=torch.bfloat16)
    (tmp_path / "config.json").write_text(config.to_json_string(use_diff=False))
    assert ModelConfig(str(tmp_path), is_draft_model=True).dtype == torch.bfloat16


def test_config_is_read_by_transformers(draft: Draft):
    """And says dtype and RoPE under the names of both major versions of transformers."""
    written = json.loads((draft.folder / "config.json").read_text())
    read, built = AutoConfig.from_pretrained(draft.folder), draft.model.config
    assert type(read) is type(built)
    assert heads_of(read) == heads_of(built)
    assert read.rope_parameters == built.rope_parameters
    assert read.dtype == torch.float32
    assert written["dtype"] == written["torch_dtype"] == "float32"
    assert written["rope_theta"] == built.rope_parameters["rope_theta"]
    scaled = built.rope_parameters["rope_type"] != "default"
    assert (written["rope_scaling"] or {}).get("rope_type") == (built.rope_parameters["rope_type"] if scaled else None)
