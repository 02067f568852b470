"""Tiny targets in the quantised formats of published checkpoints, and the same weights dequantised for transformers.

Written from a model of :mod:`architectures` by the formats' own rules, in torch:

- ``int4 experts``: compressed-tensors ``pack-quantized``, 4 bits, groups of 32, symmetric, experts only (Kimi K2.7).
- ``fp8 blocks``: ``quant_method: fp8``, e4m3 in blocks of 128 x 128 (DeepSeek-V3); activations are quantised too.
- ``GPTQ``: 4 bits, groups of 128, symmetric, the output head too (``lm_head: true``).
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import architectures
import tiny_models
import torch
import transformers as tf
from architectures import BY_NAME, Architecture
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
# Quantises one weight [N, K]: its tensors in the checkpoint by suffix, and what they stand for.
Format = Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]


def int4(weight: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return integers in [-8, 7] ``[N, K]``, bf16 scales ``[N, K / group]``, and the dequantised weight."""
    groups = weight.unflatten(1, (-1, group))
    scales = (groups.abs().amax(dim=-1, keepdim=True) / 7).clamp_min(1e-6).bfloat16().float()
    integers = (groups / scales).round().clamp(-8, 7)
    return integers.flatten(1).to(torch.int8), scales[..., 0].bfloat16(), (integers * scales).flatten(1)


def packed(nibbles: torch.Tensor) -> torch.Tensor:
    """Pack ``[..., K]`` integers in [0, 15] into int32 ``[..., K / 8]``, the first in the lowest bits."""
    shifts = torch.arange(0, 32, 4)
    words = (nibbles.long().unflatten(-1, (-1, 8)) << shifts).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def unpacked(words: torch.Tensor) -> torch.Tensor:
    """Undo :func:`packed`: integers in [0, 15] ``[..., K]`` of int32 ``[..., K / 8]``."""
    return ((words.long().unsqueeze(-1) >> torch.arange(0, 32, 4, device=words.device)) & 15).flatten(-2)


def pack_quantized(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    integers, scales, exact = int4(weight, 32)
    shape = torch.tensor(weight.shape, dtype=torch.int32)
    return {"weight_packed": packed(integers + 8), "weight_scale": scales, "weight_shape": shape}, exact


def gptq(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    integers, scales, exact = int4(weight, 128)
    rows, columns = weight.shape
    stored = {
        "qweight": packed(integers + 8).T.contiguous(),
        "scales": scales.T.contiguous(),
        # The zero point less one, as GPTQ stores it: 7 for the 8 of symmetric weights.
        "qzeros": packed(torch.full((columns // 128, rows), 7)),
        "g_idx": (torch.arange(columns) // 128).to(torch.int32),
    }
    return stored, exact


def fp8_blocks(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    rows, columns = weight.shape
    whole = torch.zeros(-(-rows // 128) * 128, -(-columns // 128) * 128)
    whole[:rows, :columns] = weight
    blocks = whole.unflatten(1, (-1, 128)).unflatten(0, (-1, 128))  # [n, 128, k, 128]
    scales = blocks.abs().amax(dim=(1, 3), keepdim=True).clamp_min(1e-6) / torch.finfo(torch.float8_e4m3fn).max
    stored = (blocks / scales).to(torch.float8_e4m3fn)
    exact = (stored.float() * scales).flatten(2).flatten(0, 1)[:rows, :columns]
    kept = stored.float().flatten(2).flatten(0, 1)[:rows, :columns].to(torch.float8_e4m3fn).contiguous()
    return {"weight": kept, "weight_scale_inv": scales[:, 0, :, 0].contiguous()}, exact.contiguous()


INT4_EXPERTS: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "ignore": [
        "lm_head",
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
        r"re:.*mlp\.gate$",
    ],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "input_activations": None,
            "output_activations": None,
            "weights": {
                "num_bits": 4,
                "group_size": 32,
                "strategy": "group",
                "symmetric": True,
                "type": "int",
                "dynamic": False,
                "actorder": None,
                "observer": "minmax",
                "observer_kwargs": {},
                "block_structure": None,
            },
        }
    },
}
FP8_BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
GPTQ_WITH_HEAD = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 128,
    "sym": True,
    "desc_act": False,
    "lm_head": True,
    "checkpoint_format": "gptq",
}
EXPERTS = r"\.experts\.\d+\.(gate|up|down)_proj\.weight$"
PROJECTIONS = r"_proj(_with_mqa)?\.weight$"


@dataclass(frozen=True)
class Quantised:
    """A target in a quantised format.

    Attributes:
        name: Of the test.
        architecture: What is quantised.
        config: Its ``quantization_config``.
        format: Quantises one weight.
        weights: Pattern of the weights that are quantised.
        method: A module (the end of its name) and a part of the name of the method that SGLang must run it by.
        quantised_activations: Whether SGLang rounds activations to fp8 too; see :func:`fp8_activations`.
        substitute: Name in :mod:`cpu_substitutes` of the kernels in torch; None where there are none.
    """

    name: str
    architecture: Architecture
    config: dict[str, Any]
    format: Format
    weights: str
    method: tuple[str, str]
    quantised_activations: bool = False
    substitute: str | None = None


def llama_of_full_rows() -> tf.PreTrainedModel:
    """A vocabulary that needs no padding, as published GPTQ heads have it."""
    return architectures.llama(vocab_size=512)


def deepseek_of_mild_experts() -> tf.PreTrainedModel:
    """Experts that count for less: rounding to fp8 flips so many of a random router's that nothing could be told."""
    return architectures.deepseek_v3(routed_scaling_factor=0.5)


QUANTISED = [
    Quantised(
        "Kimi, int4 experts",
        BY_NAME["Kimi K2.5/K2.7"],
        INT4_EXPERTS,
        pack_quantized,
        EXPERTS,
        ("mlp.experts", "CompressedTensorsFusedMoEMethod"),
        substitute="int4_experts",
    ),
    Quantised(
        "Qwen3-MoE, int4 experts",
        BY_NAME["Qwen3-MoE"],
        INT4_EXPERTS,
        pack_quantized,
        EXPERTS,
        ("mlp.experts", "CompressedTensorsFusedMoEMethod"),
        substitute="int4_experts",
    ),
    Quantised(
        "DeepSeek-V3, fp8 blocks",
        dataclasses.replace(BY_NAME["DeepSeek-V3"], build=deepseek_of_mild_experts),
        FP8_BLOCKS,
        fp8_blocks,
        PROJECTIONS,
        ("mlp.experts", "Fp8MoEMethod"),
        quantised_activations=True,
    ),
    Quantised(
        "Qwen3, fp8 blocks",
        BY_NAME["Qwen3"],
        FP8_BLOCKS,
        fp8_blocks,
        PROJECTIONS,
        ("mlp.down_proj", "Fp8LinearMethod"),
        quantised_activations=True,
        substitute="fp8_linear",
    ),
    Quantised(
        "Llama, GPTQ with its head",
        dataclasses.replace(BY_NAME["Llama"], build=llama_of_full_rows),
        GPTQ_WITH_HEAD,
        gptq,
        rf"{PROJECTIONS}|^lm_head\.weight$",
        ("lm_head", "GPTQ"),
        substitute="gptq_linear",
    ),
]
QUANTISED_BY_NAME = {q.name: q for q in QUANTISED}


def fp8_activations(model: tf.PreTrainedModel) -> None:
    """Round what goes into each projection to e4m3, each token in groups of 128, as SGLang does before the product.

    Routed experts are left out: transformers holds them in no module of their own.
    """

    def round_input(_module: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor]:
        x = inputs[0].float()
        groups = x.unflatten(-1, (-1, 128 if x.shape[-1] % 128 == 0 else x.shape[-1]))
        scales = groups.abs().amax(dim=-1, keepdim=True).clamp_min(1e-6) / torch.finfo(torch.float8_e4m3fn).max
        return (((groups / scales).to(torch.float8_e4m3fn).float() * scales).flatten(-2).to(inputs[0]),)

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and re.search(PROJECTIONS, f"{name}.weight"):
            module.register_forward_pre_hook(round_input)


def save(quantised: Quantised, folder: Path, dtype: torch.dtype) -> tf.PreTrainedModel:
    """Write the quantised checkpoint to ``folder`` and return the float32 model that its weights stand for."""
    plain = folder / "dequantised"
    finish = quantised.architecture.finish
    model = architectures.save(dataclasses.replace(quantised.architecture, finish=None), plain, dtype)
    exact, stored = load_file(plain / "model.safetensors"), {}
    chosen = {name for name in exact if re.search(quantised.weights, name)}
    assert chosen, f"none of {sorted(exact)} is quantised"
    for name in sorted(exact):
        if name not in chosen:
            stored[name] = exact[name]
            continue
        tensors, exact[name] = quantised.format(exact[name].float())
        stored |= {f"{name.removesuffix('weight')}{suffix}": tensor for suffix, tensor in tensors.items()}
    config = json.loads((plain / "config.json").read_text())
    # In float32: the dequantised values must not be rounded once more.
    save_file({n: v.float() for n, v in exact.items()}, plain / "model.safetensors", metadata={"format": "pt"})
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantised.config}))
    if finish:
        finish(folder)
    tiny_models.save_tokenizer(folder, model.config.get_text_config().vocab_size)
    model = type(model).from_pretrained(plain, dtype=torch.float32).eval()
    model.set_attn_implementation("eager")
    return model
