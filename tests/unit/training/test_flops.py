"""The FLOP count against what torch counts on the model itself."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModel,
    DeepseekV3Config,
    Glm4MoeConfig,
    GptOssConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    NemotronConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from nemo_eagle3_sglang.supervision.documents import documents
from nemo_eagle3_sglang.supervision.unroll import unroll
from nemo_eagle3_sglang.training.flops import StepFlops, peak_flops

pytest.importorskip("nemo_automodel", reason="the formulas are AutoModel's")
from nemo_automodel.components.utils import flops_utils
from trainer_cases import backend, draft, modules, packed

CONFIG = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
}


def plan(lengths: list[int], steps: int = 4):
    total = sum(lengths)
    mask, loss = torch.ones(1, total, dtype=torch.long), torch.ones(1, total, dtype=torch.long)
    ids = torch.zeros(1, total, dtype=torch.long)
    return unroll(documents(ids, mask, loss, torch.tensor([lengths]), trim=True), steps, torch.device("cpu"))


def test_target_is_what_torch_counts():
    config = LlamaConfig(**CONFIG)
    model = LlamaForCausalLM._from_config(config, attn_implementation="eager")
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        model.model(torch.zeros(1, 48, dtype=torch.long))
    counted = counter.get_total_flops()
    # Torch multiplies the whole square of scores, of which causal attention needs half.
    square = 3 * 2 * 2 * 48 * 48 * 64
    formula = flops_utils.get_flops_formula_for_hf_config(config)
    layout = plan([48])
    ours = StepFlops(formula, config, SimpleNamespace()).target(layout)
    head = 2 * 300 * 64 * layout.supervised.shape[0]
    # Torch also counts the outer product of the rotary angles.
    assert ours - head == pytest.approx(counted - square / 2, rel=1e-4)


EXPERTS = {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1}
EXPERTS |= {"moe_intermediate_size": 96, "n_group": 1, "topk_group": 1}
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
QWEN_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
# Config, and the width of all heads in the products with keys and with values.
TARGETS = {
    "llama": (LlamaConfig(**CONFIG), 64 + 64),
    "qwen2": (Qwen2Config(**CONFIG), 64 + 64),
    "qwen3, wide heads": (Qwen3Config(**CONFIG, head_dim=32), 128 + 128),
    "qwen3-moe": (Qwen3MoeConfig(**CONFIG, **QWEN_EXPERTS, head_dim=16), 64 + 64),
    "mixtral": (MixtralConfig(**CONFIG, num_local_experts=8, num_experts_per_tok=2), 64 + 64),
    "deepseek-v3": (DeepseekV3Config(**{**CONFIG, "num_key_value_heads": 4}, **EXPERTS, **LATENT), 4 * 24 + 4 * 16),
    "glm4-moe": (Glm4MoeConfig(**CONFIG, **EXPERTS, head_dim=16), 64 + 64),
    "nemotron": (NemotronConfig(**CONFIG), 64 + 64),
}


def step(config: PretrainedConfig) -> StepFlops:
    return StepFlops(flops_utils.get_flops_formula_for_hf_config(config), config, SimpleNamespace())


@pytest.mark.parametrize("length", [8, 48, 200])
@pytest.mark.parametrize("name", TARGETS)
def test_formulas_are_what_torch_counts(name, length):
    config, heads = TARGETS[name]
    # Grouped products of experts are no products that torch counts.
    config._experts_implementation = "eager"
    model = AutoModel.from_config(config, attn_implementation="eager")
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        model(torch.randint(0, 300, (1, length)))
    square = config.num_hidden_layers * 2 * length**2 * heads
    layout, ours = plan([length]), step(config)
    assert ours.checked()
    counted = ours.target(layout) - 2 * 300 * 64 * layout.supervised.shape[0]
    # The formulas leave the router out, which in models as small as these is up to 1.1 %.
    assert counted == pytest.approx(counter.get_total_flops() - square / 2, rel=0.015)


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**CONFIG, head_dim=32),
        GptOssConfig(**CONFIG, head_dim=16),
        DeepseekV3Config(**CONFIG, **EXPERTS, **LATENT, index_topk=2048),
        DeepseekV3Config(**CONFIG, **{**EXPERTS, "n_shared_experts": 2}, **LATENT),
        Qwen3MoeConfig(**CONFIG, **QWEN_EXPERTS, mlp_only_layers=[0]),
    ],
    ids=["llama, wide heads", "gpt-oss", "sparse attention", "two shared experts", "a dense layer"],
)
def test_a_formula_that_is_wrong_is_not_used(config):
    assert not step(config).checked()


def test_draft_is_what_torch_counts():
    """Forward and backward of the real trainer, but for what is attention there."""
    model, target = draft(torch.float32), backend(torch.float32)
    _, ours = modules(model, target, 4)
    rows = [{"input_ids": list(range(1, 19)), "loss_mask": [0] * 6 + [1] * 12}] * 3
    batch = target.flat_batch(packed(rows, 20), 4)
    counter = FlopCounterMode(display=False)
    with counter:
        ours(batch=batch).loss.backward()
    counts = counter.get_flop_counts()["Global"]
    products = sum(n for op, n in counts.items() if str(op) in ("aten.mm", "aten.addmm"))
    counted = StepFlops(lambda *a, **k: 0.0, LlamaConfig(**CONFIG), model).draft(batch.unroll)
    # The projected target states are no parameter: nothing is propagated into them.
    into_states = 2 * model.model.fc.weight.numel() * batch.unroll.tokens.shape[0]
    # Torch does not count addmm_, by which the gradient of the output layer is added up.
    output_gradient = 2 * model.lm_head.weight.numel() * batch.unroll.pairs.shape[0]
    assert products + output_gradient == pytest.approx(counted - into_states, rel=1e-6)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA B200", 2250e12),
        # Other chips, whose names begin or end alike, and a slice.
        ("NVIDIA RTX A1000", None),
        ("NVIDIA GB200", None),
        ("NVIDIA H20", None),
        ("NVIDIA H200 MIG 1g.18gb", None),
        ("Some GPU", None),
    ],
)
def test_peak_by_name(monkeypatch, name, peak):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(torch.device("cuda", 0)) == peak


def test_no_peak_of_a_cpu():
    assert peak_flops(torch.device("cpu")) is None
