"""Which one-layer draft a target gets, and the ``LlamaConfig`` that says so.

AutoModel chooses the draft's class by the target's ``architectures`` and builds it on a copy of the target's own
config. That fits Llama and Qwen3. Elsewhere the copy has no heads of the right size (MLA), an activation or biases that
SGLang's draft class does not load, or a RoPE that trainer and server compute differently. Here a draft is AutoModel's
Llama-style one, and where the target's config does not fit, built on a plain ``LlamaConfig`` of its dimensions. This
module holds names and pure functions; ``recipe.py`` hands them to AutoModel's registry.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import LlamaConfig, PretrainedConfig

from nemo_eagle3_sglang.config.schema import RecipeArgs
from nemo_eagle3_sglang.errors import ConfigError, did_you_mean
from nemo_eagle3_sglang.supervision.aux_layers import resolve_aux_layer_ids

logger = logging.getLogger(__name__)

# Targets for which AutoModel 0.6.0 has no EAGLE-3 draft. Each is served by sglang 0.5.17, and each one's draft is built
# and trained for a step by tests/unit/training/test_draft_registry.py.
TEXT_MODELS = (
    "ApertusForCausalLM",
    "ArceeForCausalLM",
    "Cohere2ForCausalLM",
    "CohereForCausalLM",
    "DeepseekV2ForCausalLM",
    "Ernie4_5_MoeForCausalLM",
    "Exaone4ForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "Glm4ForCausalLM",
    "Glm4MoeForCausalLM",
    "GraniteForCausalLM",
    "GraniteMoeForCausalLM",
    "Llama4ForCausalLM",
    "MiniCPMForCausalLM",
    "MiniMaxM2ForCausalLM",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "Olmo2ForCausalLM",
    "OlmoeForCausalLM",
    "PhiMoEForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3NextForCausalLM",
)
WRAPPED_MODELS = (
    "Gemma3ForConditionalGeneration",
    "Glm4vForConditionalGeneration",
    "Glm4vMoeForConditionalGeneration",
    "KimiK25ForConditionalGeneration",
    "Llama4ForConditionalGeneration",
    "LlavaForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
    "Qwen2VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
)
ARCHITECTURES = TEXT_MODELS + WRAPPED_MODELS

# What AutoModel puts on the draft's config besides the target's keys; see its train_eagle3.py and peagle_recipe.py.
DRAFT_KEYS = (
    "draft_vocab_size",
    "target_hidden_size",
    "architectures",
    "attn_implementation",
    "fc_norm",
    "norm_output",
    "parallel_drafting",
    "mask_token_id",
    "num_depths",
    "down_sample_ratio",
    "down_sample_ratio_min",
)
# Keys of a draft config file that say what the target, AutoModel or the export decides; checked, not handed on.
DECIDED_KEYS = ("model_type", "num_hidden_layers", "tie_word_embeddings", "target_hidden_size", "draft_vocab_size")
DECIDED_KEYS += ("architectures", "eagle_config", "num_aux_hidden_states", "transformers_version")

# RoPE schedules whose frequencies AutoModel (trainer), SGLang and vLLM (servers) compute alike, with the keys that all
# three read. `attention_factor`, `mscale` and `mscale_all_dim` of YaRN are read by some and not by others; without them
# all take 0.1 * ln(factor) + 1 (https://arxiv.org/abs/2309.00071, eq. 22). Dynamic NTK and longrope depend on the
# length of the sequence in one of them and not in another.
ROPE_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate"),
}
DEFAULT_THETA = 10000.0


def draft_config(text_config: PretrainedConfig, shape: Mapping[str, Any] | None = None) -> LlamaConfig:
    """Return the config of a one-layer Llama-style draft for a target.

    Args:
        text_config: The target's text config, with the keys of ``DRAFT_KEYS`` where AutoModel has put them.
        shape: Keys of a draft config file, in place of the target's dimensions.
    """
    if shape is None:
        values = _shape(text_config)
    else:
        values = {key: value for key, value in shape.items() if key not in DECIDED_KEYS}
    values |= {key: getattr(text_config, key) for key in DRAFT_KEYS if getattr(text_config, key, None) is not None}
    layers = text_config.num_hidden_layers if getattr(text_config, "parallel_drafting", False) else 1
    return LlamaConfig(**values, num_hidden_layers=layers, tie_word_embeddings=False)


def _shape(text: PretrainedConfig) -> dict[str, Any]:
    heads, vocab = text.num_attention_heads, text.vocab_size
    values = {
        "vocab_size": vocab,
        "hidden_size": text.hidden_size,
        "intermediate_size": _intermediate_size(text),
        "num_attention_heads": heads,
        "num_key_value_heads": heads if _is_mla(text) else getattr(text, "num_key_value_heads", None) or heads,
        "head_dim": _head_dim(text),
        # The only activation of SGLang's draft class; the draft's MLP is trained from scratch whatever the target's is.
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": _norm_eps(text),
        "max_position_embeddings": getattr(text, "max_position_embeddings", None) or 2048,
        "initializer_range": getattr(text, "initializer_range", None) or 0.02,
        "rope_parameters": served_rope(text),
        "dtype": getattr(text, "dtype", None),
    }
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        token = getattr(text, name, None)
        # nn.Embedding refuses a padding row that it does not have.
        values[name] = token if name != "pad_token_id" or token is None or 0 <= token < vocab else None
    return values


def _is_mla(text: PretrainedConfig) -> bool:
    return getattr(text, "kv_lora_rank", None) is not None


def _head_dim(text: PretrainedConfig) -> int:
    if _is_mla(text):
        # Its config's head_dim is the rotary slice alone. Published drafts of Kimi K2 take the width of a value head
        # and as many key-value heads as query heads, so that a tensor parallel size that fits the target fits them.
        return text.v_head_dim
    return getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads


def _intermediate_size(text: PretrainedConfig) -> int:
    """Return the width of the target's dense MLP, or of the experts that a token meets where they are narrow.

    Llama 4 keeps the dense width in ``intermediate_size_mlp``. On MoE models without dense layers ``intermediate_size``
    is one expert's, often less than the hidden size; AutoModel's Gemma 4 draft takes ``top_k`` of them as well.
    """
    size = getattr(text, "intermediate_size_mlp", None) or text.intermediate_size
    return size if size >= text.hidden_size else size * (getattr(text, "num_experts_per_tok", None) or 1)


def _norm_eps(text: PretrainedConfig) -> float:
    names = ("rms_norm_eps", "layer_norm_eps", "norm_eps", "norm_epsilon")
    return next((eps for name in names if (eps := getattr(text, name, None)) is not None), 1e-6)


def served_rope(text: PretrainedConfig) -> dict[str, Any]:
    """Return ``rope_parameters`` that trainer and servers compute alike, nearest to the target's.

    The draft's own layer is trained from scratch, so its RoPE need not be the target's; it must be the same in training
    and serving. Schedules outside ``ROPE_KEYS`` become plain RoPE of the same base. Sections of multimodal RoPE go:
    on text their three positions are equal. Of schedules per attention type, the one of full attention is taken.

    Args:
        text: Config as transformers 5 has it (``rope_parameters``) or as remote code made for 4 leaves it
            (``rope_theta`` and ``rope_scaling``).
    """
    found = dict(getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {})
    full = found.get("full_attention")
    found = dict(full) if isinstance(full, Mapping) else found
    theta = found.get("rope_theta") or getattr(text, "rope_theta", None) or DEFAULT_THETA
    kind = found.get("rope_type") or found.get("type") or "default"
    keys = ROPE_KEYS.get(kind, ())
    rope = {key: found[key] for key in keys if found.get(key) is not None}
    needed = {"factor"} if kind == "linear" else set(ROPE_KEYS["llama3"] if kind == "llama3" else keys[:2])
    if kind not in ROPE_KEYS or not needed <= rope.keys():
        return {"rope_type": "default", "rope_theta": float(theta)}
    return {"rope_type": kind, "rope_theta": float(theta), **rope}


def obstacles(text: PretrainedConfig) -> list[str]:
    """Return why a draft on the target's own config would not be served as it was trained; empty if it would."""
    rope = {key: value for key, value in (getattr(text, "rope_parameters", None) or {}).items() if value is not None}
    partial = rope.pop("partial_rotary_factor", None) or getattr(text, "partial_rotary_factor", None) or 1.0
    found = {
        "MLA": _is_mla(text),
        f"hidden_act {getattr(text, 'hidden_act', None)}": getattr(text, "hidden_act", None) != "silu",
        "attention_bias": getattr(text, "attention_bias", False),
        "mlp_bias": getattr(text, "mlp_bias", False),
        "partial rotary": partial != 1.0,
        f"RoPE {rope.get('rope_type')}": rope != served_rope(text),
        "num_key_value_heads or head_dim": not getattr(text, "num_key_value_heads", None)
        or getattr(text, "head_dim", 1) is None,
    }
    return [name for name, applies in found.items() if applies]


@dataclass(frozen=True)
class Choice:
    """The draft of a run.

    Attributes:
        architecture: The target's, under which AutoModel looks the draft up.
        own: Whether it is built by :func:`draft_config`; otherwise by what is registered, on the target's own config.
        shape: Keys of the draft config file, if there is one.
    """

    architecture: str
    own: bool
    shape: dict[str, Any] | None = None


class Drafts:
    """AutoModel's registry of draft classes, with what it lacks.

    Args:
        registry: AutoModel's ``EAGLE3_DRAFT_REGISTRY``. Architectures of ``ARCHITECTURES`` that it lacks are added;
            nothing that is there is changed.
        spec: AutoModel's ``DraftSpec``.
        draft_cls: AutoModel's ``LlamaEagle3DraftModel``.
    """

    def __init__(self, registry: MutableMapping[str, Any], spec: type, draft_cls: type) -> None:
        self._registry, self._spec, self._draft_cls = registry, spec, draft_cls
        for name in ARCHITECTURES:
            registry.setdefault(name, spec(draft_cls=self._build))

    def _build(self, config: PretrainedConfig, shape: Mapping[str, Any] | None = None) -> Any:
        """Build the draft; called as AutoModel calls a draft class."""
        return self._draft_cls(draft_config(config, shape))

    def choose(self, args: RecipeArgs, target: PretrainedConfig) -> Choice:
        """Decide which draft a run builds.

        Args:
            args: ``recipe_args``.
            target: The target's config.

        Raises:
            ConfigError: No draft class for the target, or a draft config file that does not fit it.
        """
        names, text = list(target.architectures or []), target.get_text_config()
        if args.draft_config is not None:
            if not names:
                raise ConfigError(f"{args.target_model_name_or_path}: config.json names no architectures")
            shape = read_file(args.draft_config, text)
            _check_same(shape, args.draft_vocab_size, resolve_aux_layer_ids(args.aux_layer_ids, text.num_hidden_layers))
            return Choice(names[0], own=True, shape=shape)
        name = next((name for name in names if name in self._registry), None)
        if name is None:
            raise ConfigError(_no_draft(names, self._registry))
        problems = obstacles(text)
        # A class that somebody else registered is taken at its word.
        own = bool(problems) and self._registry[name].draft_cls.__module__.startswith("nemo_automodel.")
        if own:
            # A warning, because no handler shows lower levels before the recipe has set up logging.
            logger.warning(
                "%s: AutoModel's own draft would not be served as trained (%s); a plain Llama layer is trained",
                name,
                ", ".join(problems),
            )
        return Choice(name, own)

    def is_llama(self, choice: Choice) -> bool:
        """Return whether the draft is of AutoModel's Llama class itself, not of a class derived from it."""
        return choice.own or self._registry[choice.architecture].draft_cls is self._draft_cls

    @contextmanager
    def building(self, choice: Choice) -> Iterator[None]:
        """Let AutoModel's registry give the chosen draft, and put back what was there."""
        if not choice.own:
            yield
            return
        before = self._registry.get(choice.architecture)
        self._registry[choice.architecture] = self._spec(draft_cls=partial(self._build, shape=choice.shape))
        try:
            yield
        finally:
            if before is None:
                del self._registry[choice.architecture]
            else:
                self._registry[choice.architecture] = before


def _no_draft(names: Sequence[str], registry: Mapping[str, Any]) -> str:
    near = did_you_mean(names[0], registry) if names else ""
    return (
        f"recipe_args.target_model_name_or_path: no EAGLE-3 draft class for {', '.join(names) or 'a config.json'}"
        f"{near if names else ' that names no architectures'}. Describe a one-layer Llama draft in a file and name it "
        "in recipe_args.draft_config (examples/kimi-k2.7-code-eagle3.json is one), or register a class before the run: "
        "nemo_automodel.components.speculative.eagle.registry.EAGLE3_DRAFT_REGISTRY"
        f"[{names[0] if names else 'NAME'!r}] = DraftSpec(draft_cls=...)"
    )


def read_file(path: str | Path, text: PretrainedConfig) -> dict[str, Any]:
    """Read a draft config file (``recipe_args.draft_config``) and check it against the target.

    Raises:
        ConfigError: Not a JSON object, a key nobody would read, or a draft that the target cannot feed or SGLang's
            draft class cannot load.
    """
    where = f"recipe_args.draft_config: {path}"
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{where} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{where} is not a JSON object")
    known = {*LlamaConfig().to_dict(), *DECIDED_KEYS, "rope_theta", "rope_scaling", "torch_dtype"}
    for key in values:
        if key not in known:
            raise ConfigError(f"{where}: {key!r} is no key of a Llama-style draft{did_you_mean(key, known)}; remove it")
    fixed = {"model_type": "llama", "num_hidden_layers": 1, "tie_word_embeddings": False, "hidden_act": "silu"}
    fixed |= {"hidden_size": text.hidden_size, "vocab_size": text.vocab_size, "target_hidden_size": text.hidden_size}
    for key, value in fixed.items():
        if values.get(key, value) != value:
            raise ConfigError(f"{where}: {key} is {values[key]!r}, and must be {value!r} with this target")
    if missing := sorted({"hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"} - values.keys()):
        raise ConfigError(f"{where} lacks {', '.join(missing)}")
    try:
        config = draft_config(text, values)
    except (StrictDataclassError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{where} is not a Llama config: {error}") from error
    if problems := obstacles(config):
        raise ConfigError(f"{where}: {', '.join(problems)}: SGLang would not serve it as trained; write a plain layer")
    if config.num_attention_heads % config.num_key_value_heads:
        raise ConfigError(
            f"{where}: num_attention_heads {config.num_attention_heads} is not a multiple of num_key_value_heads "
            f"{config.num_key_value_heads}"
        )
    return values


def _check_same(values: Mapping[str, Any], draft_vocab_size: int | None, aux_layer_ids: Sequence[int]) -> None:
    """Raise ``ConfigError`` where a draft config file and ``recipe_args`` say different things."""
    vocab = values.get("draft_vocab_size")
    if vocab is not None and vocab != draft_vocab_size:
        raise ConfigError(
            f"recipe_args.draft_vocab_size: {draft_vocab_size}, but the draft config file says {vocab}; write the same"
        )
    ids = (values.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if ids is not None and list(ids) != list(aux_layer_ids):
        raise ConfigError(
            f"recipe_args.aux_layer_ids: {list(aux_layer_ids)}, but the draft config file says {ids}; write the same"
        )
