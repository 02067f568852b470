"""Tiny random targets of the classes that SGLang serves, as transformers saves them, and what each is known to do.

One :class:`Architecture` a target: how to build it, and what ``tests/engine/test_architectures.py`` must find. The
dimensions are those of :mod:`tiny_models` (8 layers, vocabulary 500, which SGLang pads to 512), and under
:func:`widened` ones that SGLang's GPU kernels take. ``docs/targets.md`` is made from this table and the differences
that the tests measure.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tiny_models
import torch
import transformers as tf
from safetensors.torch import load_file, save_file

LAYERS, VOCAB = 8, 500
# Token ids of the special tokens of wrapped models; the tests' texts stay below.
IMAGE, VIDEO, VISION_START, VISION_END = 499, 498, 497, 496
TEXT_VOCAB = 490

# Two texts, one after the other.
LENGTHS = [37, 12]
TOKENS = torch.randint(3, TEXT_VOCAB, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))

DEFAULT, CUSTOM, UNSORTED = (1, 3, 4), (2, 4, 6), (5, 0, 3)


@dataclass(frozen=True)
class Plan:
    """What ``plan_aux_layers`` must return under ``serving``: columns trained, ids written."""

    trained: tuple[int, ...]
    written: tuple[int, ...]


# The setter adds one to each id and the model captures in ascending order: ids mean what they say.
AS_GIVEN = {ids: Plan(tuple(sorted(ids)), tuple(sorted(ids))) for ids in (DEFAULT, CUSTOM, UNSORTED)}
# deepseek_v2 adds one only where the first id is 1; else ids are written one higher, and an id 1 that is meant as
# "the output of layer 0" must not come first.
DEEPSEEK = {
    DEFAULT: Plan(DEFAULT, DEFAULT),
    CUSTOM: Plan(CUSTOM, (3, 5, 7)),
    UNSORTED: Plan((0, 3, 5), (4, 6, 1)),
}
# Where a wrapper leaves the logits processor to the text model.
INNER = ("language_model.logits_processor",)
NO_SETTER = "no EAGLE-3 capture"
DELTA_ONLY = "no layer's residual stream"


@dataclass(frozen=True)
class Architecture:
    """A tiny target and what is known about it.

    Attributes:
        name: Row of the table.
        build: Makes the transformers model; its weights are drawn by :func:`save`.
        sglang_class: SGLang's class of the root module.
        path: Where the text layers are in it.
        stream: ``h+residual`` or ``h``, as SGLang's layers return it.
        head: Traits of the head, in words.
        serving: Plan of each choice of ids under ``serving``, or a part of the refusal.
        rule: How ids are to be written, in words.
        finish: Edits the saved checkpoint, where transformers saves it otherwise than published ones are.
        substitutes: Names in :mod:`cpu_substitutes`, for what SGLang lacks or gets wrong on a CPU.
        processors: Where SGLang's logits processors are in it.
        skipped: Layers that do not run on text (cross-attention to an image).
        dropped_bias: Whether the head has a bias that SGLang's own logits processor leaves out.
        gpu_options: ``sglang_args`` that it needs on a GPU.
        gpu_fails: A part of the error in which SGLang's own forward ends on a GPU, where it does.
    """

    name: str
    build: Callable[[], tf.PreTrainedModel]
    sglang_class: str
    path: str = "model"
    stream: str = "h+residual"
    head: str = "plain"
    serving: dict[tuple[int, ...], Plan] | str = field(default_factory=lambda: AS_GIVEN)
    rule: str = "as given, ascending"
    finish: Callable[[Path], None] | None = None
    substitutes: tuple[str, ...] = ()
    processors: tuple[str, ...] = ("logits_processor",)
    skipped: tuple[int, ...] = ()
    dropped_bias: bool = False
    gpu_options: dict[str, Any] = field(default_factory=dict)
    gpu_fails: str | None = None


_width = 1


@contextlib.contextmanager
def widened(factor: int) -> Iterator[None]:
    """Build the targets of this module ``factor`` times as wide: heads of 64 at 4, hidden size 256."""
    global _width
    before, _width = _width, factor
    try:
        yield
    finally:
        _width = before


def wide(size: int) -> int:
    """Return a width of the text model, given for the CPU."""
    return size * _width


def spread(deviation: float = 0.2) -> float:
    """Return the deviation of weights that keeps the size of a product: ``1 / sqrt(width)``."""
    return deviation / _width**0.5


WIDTHS = ("hidden_size", "intermediate_size", "head_dim")


def dimensions(*without: str, **overrides: Any) -> dict[str, Any]:
    """Return the common dimensions, less the names in ``without``."""
    common = {k: wide(v) if k in WIDTHS else v for k, v in tiny_models.DIMENSIONS.items() if k not in without}
    return {**common, "max_position_embeddings": 512, "initializer_range": spread(), **overrides}


def sliding() -> dict[str, Any]:
    """Return a window shorter than the tests' texts, on every second layer."""
    kinds = ["sliding_attention" if i % 2 == 0 else "full_attention" for i in range(LAYERS)]
    return {"sliding_window": 16, "layer_types": kinds}


VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
# A vision tower as deep as the text model, which must not be taken for it.
DEEP_VISION = {**VISION, "num_hidden_layers": LAYERS}
QWEN_TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
}
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
# Heads and latent of the published models, which SGLang's MLA kernels are made for.
PUBLISHED_MLA = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
SMALL_MLA = {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
DEEPSEEK_DIMENSIONS: dict[str, Any] = {
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "rope_scaling": {
        "type": "yarn",
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "rope_theta": 10000.0,
    },
}


def deepseek_dimensions(**overrides: Any) -> dict[str, Any]:
    mla = SMALL_MLA if _width == 1 else PUBLISHED_MLA
    sizes = {**dimensions(), **DEEPSEEK_DIMENSIONS, **mla, "moe_intermediate_size": wide(32)}
    return {**sizes, **overrides}


def llama(**overrides: Any) -> tf.PreTrainedModel:
    return tf.LlamaForCausalLM(tf.LlamaConfig(**dimensions(**overrides)))


def gemma3_config() -> tf.Gemma3TextConfig:
    return tf.Gemma3TextConfig(**dimensions(tie_word_embeddings=True, query_pre_attn_scalar=wide(16), **sliding()))


def gemma3_wrapped() -> tf.PreTrainedModel:
    vision = tf.SiglipVisionConfig(**DEEP_VISION, vision_use_head=False)
    tokens = {"image_token_index": IMAGE, "boi_token_index": VISION_START, "eoi_token_index": VISION_END}
    config = tf.Gemma3Config(text_config=gemma3_config(), vision_config=vision, mm_tokens_per_image=4, **tokens)
    return tf.Gemma3ForConditionalGeneration(config)


def gemma2() -> tf.PreTrainedModel:
    caps = {"final_logit_softcapping": 5.0, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": wide(16)}
    return tf.Gemma2ForCausalLM(tf.Gemma2Config(**dimensions(tie_word_embeddings=True, **caps, **sliding())))


def qwen3_moe() -> tf.PreTrainedModel:
    moe = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": wide(32), "norm_topk_prob": True}
    return tf.Qwen3MoeForCausalLM(tf.Qwen3MoeConfig(**dimensions(**moe, decoder_sparse_step=1)))


def qwen2_5_vl() -> tf.PreTrainedModel:
    rope = {"type": "mrope", **DEFAULT_ROPE, "mrope_section": [wide(2), wide(3), wide(3)]}
    vision = {"depth": LAYERS, "hidden_size": 32, "num_heads": 2, "intermediate_size": 64, "patch_size": 14}
    vision |= {"out_hidden_size": wide(64), "fullatt_block_indexes": [1], "window_size": 112}
    text = dimensions("head_dim", rope_scaling=rope)
    config = tf.Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=False, **QWEN_TOKENS)
    return tf.Qwen2_5_VLForConditionalGeneration(config)


def qwen3_vl() -> tf.PreTrainedModel:
    rope = {**DEFAULT_ROPE, "mrope_section": [wide(2), wide(3), wide(3)], "mrope_interleaved": True}
    vision = {"depth": 3, "hidden_size": 32, "num_heads": 2, "intermediate_size": 64, "patch_size": 14}
    vision |= {"out_hidden_size": wide(64), "deepstack_visual_indexes": [0, 1, 2], "num_position_embeddings": 16}
    text = dimensions(rope_scaling=rope)
    config = tf.Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=False, **QWEN_TOKENS)
    return tf.Qwen3VLForConditionalGeneration(config)


def gpt_oss() -> tf.PreTrainedModel:
    moe = {"intermediate_size": wide(64), "num_local_experts": 4, "num_experts_per_tok": 2}
    return tf.GptOssForCausalLM(tf.GptOssConfig(**dimensions(**moe, rope_scaling=DEFAULT_ROPE, **sliding())))


def deepseek_v3(routed_scaling_factor: float = 2.5) -> tf.PreTrainedModel:
    routing = {"n_group": 2, "topk_group": 1, "norm_topk_prob": True, "q_lora_rank": wide(32)}
    routing["routed_scaling_factor"] = routed_scaling_factor
    return tf.DeepseekV3ForCausalLM(tf.DeepseekV3Config(**deepseek_dimensions(**routing)))


def deepseek_v2_lite() -> tf.PreTrainedModel:
    routing = {"n_group": 1, "topk_group": 1, "topk_method": "greedy", "norm_topk_prob": False, "q_lora_rank": None}
    routing["routed_scaling_factor"] = 1.0
    # transformers leaves YaRN's factor out of V2's softmax scale: one that is as good as 1 makes the two agree.
    rope = {**DEEPSEEK_DIMENSIONS["rope_scaling"], "mscale": 1e-6, "mscale_all_dim": 1e-6}
    return tf.DeepseekV2ForCausalLM(tf.DeepseekV2Config(**deepseek_dimensions(**routing, rope_scaling=rope)))


def llama4() -> tf.PreTrainedModel:
    moe = {"intermediate_size": wide(64), "intermediate_size_mlp": wide(128)}
    moe |= {"num_local_experts": 4, "num_experts_per_tok": 1}
    moe |= {"interleave_moe_layer_step": 2, "attention_chunk_size": 64, "use_qk_norm": False}
    text = tf.Llama4TextConfig(**dimensions(**moe, no_rope_layers=None, layer_types=None))
    sizes = {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32, "intermediate_size": 128}
    vision = tf.Llama4VisionConfig(**{**VISION, **sizes})
    config = tf.Llama4Config(text_config=text, vision_config=vision, image_token_index=IMAGE, tie_word_embeddings=False)
    return tf.Llama4ForConditionalGeneration(config)


def mllama() -> tf.PreTrainedModel:
    configs = tf.models.mllama.configuration_mllama
    text = configs.MllamaTextConfig(**dimensions("head_dim", cross_attention_layers=[2], rope_scaling=DEFAULT_ROPE))
    vision = configs.MllamaVisionConfig(
        **{k: v for k, v in VISION.items() if k != "num_attention_heads"},
        attention_heads=2,
        num_global_layers=1,
        vision_output_dim=wide(64),
        intermediate_layers_indices=[0],
        max_num_tiles=1,
        supported_aspect_ratios=[[1, 1]],
    )
    config = tf.MllamaConfig(text_config=text, vision_config=vision, image_token_index=IMAGE)
    return tf.MllamaForConditionalGeneration(config)


def pixtral() -> tf.PixtralVisionConfig:
    return tf.PixtralVisionConfig(**VISION, head_dim=16)


def mistral3() -> tf.PreTrainedModel:
    text = tf.MistralConfig(**dimensions(sliding_window=None))
    names = {"image_token_index": IMAGE, "vision_feature_layer": -1, "tie_word_embeddings": False}
    return tf.Mistral3ForConditionalGeneration(tf.Mistral3Config(text_config=text, vision_config=pixtral(), **names))


def llava_pixtral() -> tf.PreTrainedModel:
    names = {"image_token_index": IMAGE, "vision_feature_layer": -1, "tie_word_embeddings": False}
    text = tf.LlamaConfig(**dimensions())
    config = tf.LlavaConfig(text_config=text, vision_config=pixtral(), vision_feature_select_strategy="full", **names)
    return tf.LlavaForConditionalGeneration(config)


def granite(scaling: float, residual: float, attention: float) -> tf.PreTrainedModel:
    mup = {"embedding_multiplier": 12.0, "logits_scaling": scaling, "residual_multiplier": residual}
    return tf.GraniteForCausalLM(tf.GraniteConfig(**dimensions("head_dim", **mup, attention_multiplier=attention)))


def minicpm_as_granite() -> tf.PreTrainedModel:
    """MiniCPM's published code is remote; its maths is Granite's: scale_emb, scale_depth/sqrt(N), H/dim_model_base."""
    return granite(scaling=64 / 16, residual=1.4 / LAYERS**0.5, attention=wide(16) ** -0.5)


def cohere() -> tf.PreTrainedModel:
    return tf.CohereForCausalLM(tf.CohereConfig(**dimensions("head_dim", logit_scale=0.0625, tie_word_embeddings=True)))


def phi() -> tf.PreTrainedModel:
    sizes = {"num_key_value_heads": 4, "intermediate_size": wide(256), "partial_rotary_factor": 0.5}
    return tf.PhiForCausalLM(tf.PhiConfig(**dimensions("head_dim", **sizes)))


def edit_config(**values: Any) -> Callable[[Path], None]:
    """Return an edit that adds what published config.json files hold and transformers 5 no longer writes."""

    def edit(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    return edit


def rename_weights(folder: Path, rename: Callable[[str], str]) -> None:
    path = folder / "model.safetensors"
    save_file({rename(name): value for name, value in load_file(path).items()}, path, metadata={"format": "pt"})


NOAUX = {"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
GREEDY = {"moe_layer_freq": 1, "topk_method": "greedy", "scoring_func": "softmax"}


def wrap_in_kimi(folder: Path) -> None:
    """Turn a DeepSeek-V3 checkpoint into one of Kimi K2.5/K2.7: its text model with another's vision tower."""
    edit_config(**NOAUX)(folder)
    rename_weights(folder, lambda name: f"language_model.{name}")
    text = json.loads((folder / "config.json").read_text())
    tower = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = {"model_type": "kimi_k25", "mm_hidden_size": 32, "text_hidden_size": wide(64)}
    vision |= {"init_pos_emb_height": 4, "init_pos_emb_width": 4} | tower | {f"vt_{k}": v for k, v in tower.items()}
    config = {
        "model_type": "kimi_k25",
        "architectures": ["KimiK25ForConditionalGeneration"],
        "text_config": text,
        "vision_config": vision,
        "dtype": "float32",
        "torch_dtype": "float32",
        "pad_token_id": 0,
        "media_placeholder_token_id": IMAGE,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))


def publish_gemma3_vision(folder: Path) -> None:
    """Published checkpoints keep the tower under ``vision_tower.vision_model``."""
    old, new = "vision_tower.", "vision_tower.vision_model."
    rename_weights(folder, lambda name: name if new in name else name.replace(old, new))


def publish_minicpm(folder: Path) -> None:
    """Write MiniCPM's own config, with its remote configuration class reduced to the name."""
    (folder / "configuration_minicpm.py").write_text(
        "from transformers import PretrainedConfig\n\n\n"
        "class MiniCPMConfig(PretrainedConfig):\n    model_type = 'minicpm'\n"
    )
    config = dimensions("head_dim") | {
        "model_type": "minicpm",
        "architectures": ["MiniCPMForCausalLM"],
        "auto_map": {"AutoConfig": "configuration_minicpm.MiniCPMConfig"},
        "scale_emb": 12.0,
        "scale_depth": 1.4,
        "dim_model_base": wide(16),
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))


ARCHITECTURES = [
    Architecture("Llama", llama, "LlamaForCausalLM"),
    Architecture("Llama, tied", lambda: llama(tie_word_embeddings=True), "LlamaForCausalLM", head="tied"),
    Architecture("Qwen2", lambda: tf.Qwen2ForCausalLM(tf.Qwen2Config(**dimensions("head_dim"))), "Qwen2ForCausalLM"),
    Architecture("Qwen3", lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**dimensions())), "Qwen3ForCausalLM"),
    Architecture("Qwen3-MoE", qwen3_moe, "Qwen3MoeForCausalLM"),
    Architecture(
        "Phi-3",
        lambda: tf.Phi3ForCausalLM(tf.Phi3Config(**dimensions("head_dim", sliding_window=None))),
        "Phi3ForCausalLM",
    ),
    Architecture(
        "Gemma-2",
        gemma2,
        "Gemma2ForCausalLM",
        head="tied, softcap",
        serving=NO_SETTER,
        finish=edit_config(hidden_act="gelu_pytorch_tanh"),
        substitutes=("attention", "final_soft_cap"),
    ),
    Architecture(
        "Gemma-3", lambda: tf.Gemma3ForCausalLM(gemma3_config()), "Gemma3ForCausalLM", head="tied", serving=DELTA_ONLY
    ),
    Architecture(
        "Gemma-3, wrapped",
        gemma3_wrapped,
        "Gemma3ForConditionalGeneration",
        path="language_model.model",
        head="tied",
        serving=DELTA_ONLY,
        finish=publish_gemma3_vision,
        processors=INNER,
    ),
    Architecture("Qwen2.5-VL", qwen2_5_vl, "Qwen2_5_VLForConditionalGeneration"),
    Architecture("Qwen3-VL", qwen3_vl, "Qwen3VLForConditionalGeneration"),
    Architecture(
        "gpt-oss",
        gpt_oss,
        "GptOssForCausalLM",
        finish=edit_config(swiglu_limit=7.0),
        substitutes=("attention", "any_backend_for_gpt_oss"),
    ),
    Architecture(
        "DeepSeek-V3",
        deepseek_v3,
        "DeepseekV3ForCausalLM",
        serving=DEEPSEEK,
        rule="plus one unless the first is 1",
        finish=edit_config(**NOAUX),
        substitutes=("attention",),
    ),
    Architecture(
        "DeepSeek-V2-Lite",
        deepseek_v2_lite,
        "DeepseekV2ForCausalLM",
        serving=DEEPSEEK,
        rule="plus one unless the first is 1",
        finish=edit_config(**GREEDY),
        substitutes=("attention",),
    ),
    Architecture(
        "Kimi K2.5/K2.7",
        deepseek_v3,
        "KimiK25ForConditionalGeneration",
        path="language_model.model",
        serving=DEEPSEEK,
        rule="plus one unless the first is 1",
        finish=wrap_in_kimi,
        substitutes=("attention",),
        processors=INNER,
    ),
    Architecture(
        "Llama-4",
        llama4,
        "Llama4ForConditionalGeneration",
        path="language_model.model",
        substitutes=("rope_in_place", "router_weight_on_input"),
        processors=(*INNER, "logits_processor"),
    ),
    Architecture(
        "Mllama",
        mllama,
        "MllamaForConditionalGeneration",
        path="language_model.model",
        head="plain; the embedding has 8 more rows",
        serving=NO_SETTER,
        skipped=(2,),
        gpu_fails="Cross attention is not supported in the triton attention backend",
    ),
    Architecture(
        "GLM-4",
        lambda: tf.Glm4ForCausalLM(tf.Glm4Config(**dimensions(partial_rotary_factor=0.5, attention_bias=True))),
        "Glm4ForCausalLM",
        serving=NO_SETTER,
    ),
    Architecture(
        "Granite",
        lambda: granite(scaling=8.0, residual=0.22, attention=0.1),
        "GraniteForCausalLM",
        head="logit scale",
        serving=NO_SETTER,
    ),
    Architecture(
        "MiniCPM",
        minicpm_as_granite,
        "MiniCPMForCausalLM",
        stream="h",
        head="hidden state scaled before",
        serving=NO_SETTER,
        finish=publish_minicpm,
    ),
    Architecture("Cohere", cohere, "CohereForCausalLM", stream="h", head="tied, logit scale", serving=NO_SETTER),
    Architecture(
        "OLMo-2",
        lambda: tf.Olmo2ForCausalLM(tf.Olmo2Config(**dimensions("head_dim"))),
        "Olmo2ForCausalLM",
        stream="h",
        serving=NO_SETTER,
    ),
    # SGLang calls the setter of the root, and Llava's (Mistral-3's inner model too) has none; its Llama's is not asked.
    Architecture(
        "Mistral-3",
        mistral3,
        "LlavaForConditionalGeneration",
        path="language_model.model",
        serving=NO_SETTER,
        processors=INNER,
    ),
    Architecture(
        "Llava + Pixtral",
        llava_pixtral,
        "LlavaForConditionalGeneration",
        path="language_model.model",
        serving=NO_SETTER,
        processors=INNER,
    ),
    Architecture("Phi-2", phi, "PhiForCausalLM", stream="h", head="bias", serving=NO_SETTER, dropped_bias=True),
]
BY_NAME = {a.name: a for a in ARCHITECTURES}


@torch.no_grad()
def draw_weights(model: tf.PreTrainedModel) -> None:
    """Draw what transformers leaves at zero, one or nothing, so that a wrong norm, bias or router shows."""
    unit_offset = "Gemma" in type(model).__name__
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if "norm" in name and name.endswith("weight"):
            tensor.uniform_(-0.3, 0.3) if unit_offset else tensor.uniform_(0.5, 1.5)
        elif name.endswith("sinks"):
            # SGLang keeps them in bfloat16.
            tensor.copy_(tensor.normal_().bfloat16())
        elif name.endswith("e_score_correction_bias"):
            tensor.normal_(0, 0.1)
        elif any(part in name for part in (".experts.", "router", "gate.weight")) or name.endswith("bias"):
            tensor.normal_(0, spread())


def save(architecture: Architecture, folder: Path, dtype: torch.dtype = torch.float32) -> tf.PreTrainedModel:
    """Write the target to ``folder`` as a published checkpoint would be, and return the transformers model.

    The model returned is in float32; its weights are those of the checkpoint, so rounded to ``dtype``.
    """
    torch.manual_seed(0)
    model = architecture.build().float().eval()
    draw_weights(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype).float()
    model.save_pretrained(folder)
    if architecture.finish:
        architecture.finish(folder)
    if dtype != torch.float32:
        path = folder / "model.safetensors"
        # The router's correction bias is a buffer, and stays in float32 as published.
        kept = {n: v if n.endswith("correction_bias") else v.to(dtype) for n, v in load_file(path).items()}
        save_file(kept, path, metadata={"format": "pt"})
        name = str(dtype).removeprefix("torch.")
        edit_config(dtype=name, torch_dtype=name)(folder)
    model.set_attn_implementation("eager")
    return model


@dataclass(frozen=True)
class Reference:
    """What transformers computes.

    Attributes:
        streams: Each layer's ``[T, H]``, None where it did not run.
        last: ``[T, H]``, what its output head is handed.
        logits: ``[T, V]``.
    """

    streams: list[torch.Tensor | None]
    last: torch.Tensor
    logits: torch.Tensor


@torch.no_grad()
def reference(model: tf.PreTrainedModel, tokens: torch.Tensor, lengths: list[int]) -> Reference:
    """Run transformers on each sequence alone, with plain hooks on its decoder layers."""
    decoder = model.get_decoder()
    layers = getattr(decoder, "model", decoder).layers
    kept: list[list[torch.Tensor]] = [[] for _ in layers]
    logits: list[torch.Tensor] = []
    last: list[torch.Tensor] = []

    def keep(index: int) -> Callable[..., None]:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            kept[index].append((output[0] if isinstance(output, tuple) else output).flatten(0, -2).clone())

        return hook

    handles = [layer.register_forward_hook(keep(i)) for i, layer in enumerate(layers)]
    head = model.get_output_embeddings()
    handles.append(head.register_forward_pre_hook(lambda _module, inputs: last.append(inputs[0].flatten(0, -2))))
    for part in tokens.split(lengths):
        logits.append(model(input_ids=part[None], use_cache=False).logits[0])
    for handle in handles:
        handle.remove()
    return Reference([torch.cat(parts) if parts else None for parts in kept], torch.cat(last), torch.cat(logits))
