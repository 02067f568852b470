"""The arithmetic of a run's memory against real models: parameters counted, activations caught by autograd."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import LlamaConfig, MixtralConfig, Olmo2Config, Qwen3Config, Qwen3MoeConfig

from nemo_eagle3_sglang.training import memory

ROOT = Path(__file__).parents[3]
KIMI = ROOT / "tests/fixtures/kimi_k2.7_code_config.json"
KIMI_DRAFT = ROOT / "examples/kimi-k2.7-code-eagle3.json"
LLAMA_8B = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
LLAMA_8B |= {"num_key_value_heads": 8, "vocab_size": 128256, "head_dim": 128}


def parameters_of(config: transformers.PretrainedConfig) -> int:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("tied", [False, True])
def test_llama_parameters(tied):
    config = LlamaConfig(**LLAMA_8B, tie_word_embeddings=tied)
    assert memory.target_counts(config.to_dict()).total == parameters_of(config)


@pytest.mark.parametrize("kind", [Qwen3Config, Qwen3MoeConfig, MixtralConfig, Olmo2Config])
def test_parameters_to_a_thousandth(kind):
    """What is left out: norms of heads, and router biases that a model does not have."""
    config = kind(num_hidden_layers=4, num_key_value_heads=4)
    counted = memory.target_counts(config.to_dict()).total
    assert counted == pytest.approx(parameters_of(config), rel=1e-3)


def test_kimi_parameters():
    """61 layers of DeepSeek-V3's class at Kimi's dimensions: a trillion parameters, none of them allocated."""
    text = memory.read_text_config(KIMI)
    text.pop("quantization_config")
    config = transformers.DeepseekV3Config(**{k: v for k, v in text.items() if not k.startswith("rope")})
    counts = memory.target_counts(text)
    assert counts.total == pytest.approx(parameters_of(config), rel=1e-3)
    assert counts.total == pytest.approx(1.03e12, rel=0.01)
    assert counts.experts == 60 * 384 * 3 * 7168 * 2048


def test_parts_of_a_rank_add_up():
    text = memory.read_text_config(KIMI)
    one, sixteen = memory.target_bytes(text, 1), memory.target_bytes(text, 16)
    replicated = memory.target_counts(text).replicated * 2
    assert 16 * (sixteen - replicated) == pytest.approx(one - replicated, abs=16)


@pytest.mark.parametrize(
    ("quantization", "bits"),
    [
        (None, 16),
        ({"config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 32}}}}, 4.5),
        ({"bits": 4, "group_size": 128}, 4.125),
        ({"quant_method": "fp8"}, 8),
    ],
)
def test_bits_of_experts(quantization, bits):
    assert memory.expert_bits({"quantization_config": quantization}) == bits


def test_quantisation_beside_the_text_config_counts(tmp_path):
    config = {"text_config": {"hidden_size": 8}, "quantization_config": {"bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert memory.read_text_config(tmp_path / "config.json")["quantization_config"] == {"bits": 4}
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 8}))
    assert memory.read_text_config(tmp_path / "config.json") == {"hidden_size": 8}


def test_kv_cache():
    assert memory.kv_bytes_per_token(LLAMA_8B, 1) == 32 * 2 * 8 * 128 * 2
    assert memory.kv_bytes_per_token(LLAMA_8B, 4) == 32 * 2 * 2 * 128 * 2
    assert memory.kv_bytes_per_token(LLAMA_8B, 16) == 32 * 2 * 1 * 128 * 2, "a head is not divided but repeated"
    text = memory.read_text_config(KIMI)
    assert memory.kv_bytes_per_token(text, 1) == memory.kv_bytes_per_token(text, 16) == 61 * (512 + 64) * 2


def build_draft(shape: dict[str, Any], device: str) -> torch.nn.Module:
    draft_llama = pytest.importorskip("nemo_automodel.components.speculative.eagle.draft_llama")
    config = LlamaConfig(**{k: v for k, v in shape.items() if k not in ("architectures", "eagle_config", "model_type")})
    config.attn_implementation = "eager"
    with torch.device(device):
        return draft_llama.LlamaEagle3DraftModel(config).to(torch.bfloat16)


def test_draft_parameters():
    shape = json.loads(KIMI_DRAFT.read_text())
    model = build_draft(shape, "meta")
    model.freeze_embeddings()
    trained, frozen = memory.draft_counts(shape)
    assert trained == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert frozen == sum(p.numel() for p in model.parameters() if not p.requires_grad)


def test_draft_state():
    shape = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 32}
    shape["draft_vocab_size"] = 16
    trained, frozen = memory.draft_counts(shape)
    assert memory.draft_state_bytes(shape, world=1) == 2 * (4 * trained + frozen)
    assert memory.draft_state_bytes(shape, world=2) == 2 * (5 * trained + frozen)


def kept_for_backward(model: torch.nn.Module, rows: int, length: int, steps: int) -> int:
    """Return the bytes of every storage but the parameters' that autograd keeps over the steps of a draft."""
    model.freeze_embeddings()
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, tuple[int, torch.Tensor]] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)  # held, so that no address comes twice
        return tensor

    hidden = model.config.hidden_size
    tokens = torch.randint(0, model.config.vocab_size, (rows, length))
    mask = torch.ones(rows, length, dtype=torch.long)
    cache: list[list[torch.Tensor]] = [[], []]
    logits = []
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        states = model.project_hidden_states(torch.randn(rows, length, 3 * hidden, dtype=torch.bfloat16))
        for _ in range(steps):
            states = model(input_ids=tokens, projected_hidden_states=states, attention_mask=mask, cache_hidden=cache)
            logits.append(model.compute_logits(states))
    return sum(size for size, _ in kept.values())


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "rows", "length", "steps"),
    [(4, 4, 16, 1, 64, 1), (4, 4, 16, 2, 64, 4), (4, 2, 32, 1, 64, 4), (8, 8, 16, 1, 256, 3)],
)
def test_draft_activations(heads, kv_heads, head_dim, rows, length, steps):
    shape = {"hidden_size": 64, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    shape |= {"intermediate_size": 128, "vocab_size": 300, "draft_vocab_size": 40, "dtype": "bfloat16"}
    kept = kept_for_backward(build_draft(shape, "cpu"), rows, length, steps)
    loss, transient = rows * length * steps * 6 * 40, rows * length * 8 * heads * length
    counted = memory.draft_activation_bytes(shape, rows, length, steps) - loss - transient
    assert counted == pytest.approx(kept, rel=0.05)


def run(**changes: Any) -> memory.Run:
    text, draft = memory.read_text_config(KIMI), json.loads(KIMI_DRAFT.read_text())
    return memory.Run(
        **{"target": text, "draft": draft, "world": 16, "tp": 16, "rows": 1, "length": 2048, "ttt_steps": 4, **changes}
    )


def test_a_run_has_two_peaks():
    parts = run().parts()
    resident = sum(parts.values()) - parts["target forward"] - parts["draft activations"]
    assert run().peak() == resident + max(parts["target forward"], parts["draft activations"])


def test_more_work_takes_more():
    base = run().peak()
    assert run(length=4096).peak() > base
    assert run(rows=2).peak() > base
    assert run(ttt_steps=8).parts()["draft activations"] > run().parts()["draft activations"]
    assert run(tp=8).peak() > base
    assert run(kv_tokens=200_000).peak() - base == (200_000 - 32768) * 61 * 576 * 2


def test_the_flat_trainer_keeps_less_and_no_scores():
    flat, eager = (run(trainer=trainer, length=8192).parts()["draft activations"] for trainer in ("flat", "automodel"))
    assert flat < eager / 3
    assert run(length=4096).parts()["draft activations"] < 2 * run().parts()["draft activations"]
    assert run(supervised=0.5).parts()["supervision"] < run().parts()["supervision"]


def test_linear_layers_quantised_at_load():
    text = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    text |= {"vocab_size": 1000, "tie_word_embeddings": False}
    whole, halved = memory.target_bytes(text, 1), memory.target_bytes(text, 1, 8)
    linear = 2 * (4 * 64 * 64 + 3 * 64 * 128)
    assert whole - halved == linear
