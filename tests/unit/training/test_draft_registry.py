"""Every registered target's draft is built from a tiny config of that target and trained for a step."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
import transformers
from test_preflight import recipe_args
from transformers import LlamaConfig, PretrainedConfig

from nemo_eagle3_sglang.errors import ConfigError
from nemo_eagle3_sglang.training import draft_registry, preflight
from nemo_eagle3_sglang.training.draft_registry import Choice, Drafts, draft_config, obstacles, served_rope

core = pytest.importorskip("nemo_automodel.components.speculative.eagle.core", reason="the draft is AutoModel's")
draft_llama = pytest.importorskip("nemo_automodel.components.speculative.eagle.draft_llama")
registry = pytest.importorskip("nemo_automodel.components.speculative.eagle.registry")

AUTOMODELS = {k: v for k, v in registry.EAGLE3_DRAFT_REGISTRY.items() if v.draft_cls.__module__.startswith("nemo_auto")}
HIDDEN, VOCAB, DRAFT_VOCAB = 64, 500, 96
MOE = {"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2}
MLA = {"q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 24}
YARN = {"rope_type": "yarn", "rope_theta": 5e4, "factor": 8.0, "original_max_position_embeddings": 64}
DEEPSEEK_YARN = {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32.0, "beta_slow": 1.0}
MROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}

# The config class of each target that is not a model of transformers' own name, and what its configs are like.
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "ApertusForCausalLM": ("apertus", {"hidden_act": "xielu"}),
    "ArceeForCausalLM": ("arcee", {"hidden_act": "relu2"}),
    "Cohere2ForCausalLM": ("cohere2", {}),
    "CohereForCausalLM": ("cohere", {}),
    "DeepseekV2ForCausalLM": ("deepseek_v2", {**MLA, **MOE}),
    "Ernie4_5_MoeForCausalLM": ("ernie4_5_moe", {}),
    "Exaone4ForCausalLM": ("exaone4", {}),
    "Gemma2ForCausalLM": ("gemma2", {}),
    "Gemma3ForCausalLM": ("gemma3_text", {}),
    "Glm4ForCausalLM": ("glm4", {"attention_bias": True, "partial_rotary_factor": 0.5}),
    "Glm4MoeForCausalLM": ("glm4_moe", {"attention_bias": True, "partial_rotary_factor": 0.5, **MOE}),
    "GraniteForCausalLM": ("granite", {}),
    "GraniteMoeForCausalLM": ("granitemoe", {"intermediate_size": 48, **MOE}),
    "Llama4ForCausalLM": ("llama4_text", {"intermediate_size_mlp": 160, **MOE}),
    "MiniMaxM2ForCausalLM": ("minimax_m2", {"intermediate_size": 48, **MOE}),
    "MistralForCausalLM": ("mistral", {}),
    "MixtralForCausalLM": ("mixtral", {"head_dim": None, **MOE}),
    "Olmo2ForCausalLM": ("olmo2", {}),
    "OlmoeForCausalLM": ("olmoe", {}),
    "PhiMoEForCausalLM": ("phimoe", {"attention_bias": True}),
    "Qwen2ForCausalLM": ("qwen2", {}),
    "Qwen2MoeForCausalLM": ("qwen2_moe", {}),
    "Qwen3NextForCausalLM": ("qwen3_next", {"partial_rotary_factor": 0.25}),
    "Gemma3ForConditionalGeneration": ("gemma3", {}),
    "Glm4vForConditionalGeneration": ("glm4v", {"partial_rotary_factor": 0.5, "rope_parameters": MROPE}),
    "Glm4vMoeForConditionalGeneration": ("glm4v_moe", {**MOE}),
    "Llama4ForConditionalGeneration": ("llama4", {"intermediate_size_mlp": 160, **MOE}),
    "LlavaForConditionalGeneration": ("llava", {"model_type": "llama"}),
    "Mistral3ForConditionalGeneration": ("mistral3", {"model_type": "mistral"}),
    "Qwen2VLForConditionalGeneration": ("qwen2_vl", {"rope_parameters": MROPE}),
    "Qwen2_5_VLForConditionalGeneration": ("qwen2_5_vl", {"rope_parameters": MROPE}),
    "Qwen3VLForConditionalGeneration": ("qwen3_vl", {"rope_parameters": {**MROPE, "mrope_interleaved": True}}),
    "Qwen3VLMoeForConditionalGeneration": ("qwen3_vl_moe", {"rope_parameters": MROPE, **MOE}),
    # Registered by AutoModel, trained here where its own draft would not be served as trained.
    "LlamaForCausalLM": ("llama", {}),
    "Qwen3ForCausalLM": ("qwen3", {}),
    "Qwen3MoeForCausalLM": ("qwen3_moe", {**MOE}),
    "Phi3ForCausalLM": ("phi3", {"partial_rotary_factor": 0.75}),
    "GptOssForCausalLM": ("gpt_oss", {**MOE}),
    "DeepseekV3ForCausalLM": ("deepseek_v3", {**MLA, **MOE, "rope_parameters": DEEPSEEK_YARN}),
}
WRAPPED = {name for name in CONFIGS if name in draft_registry.WRAPPED_MODELS}


class RemoteConfig(PretrainedConfig):
    """A config class as a checkpoint's own code has it, written for transformers 4."""

    model_type = "remote"

    def __init__(self, rope_theta: float = 10000.0, rope_scaling: Any = None, **kwargs: Any) -> None:
        self.rope_theta = rope_theta
        self.rope_scaling = rope_scaling
        super().__init__(**kwargs)


def sizes(architecture: str) -> dict[str, Any]:
    values = {**tiny_models.DIMENSIONS, "architectures": [architecture], "dtype": "float32"}
    del values["tie_word_embeddings"]
    return values


def tiny_target(architecture: str) -> PretrainedConfig:
    """Return a config of the target, of the class that transformers, AutoModel or a checkpoint's own code gives it."""
    if architecture == "MiniCPMForCausalLM":
        values = sizes(architecture)
        del values["head_dim"]
        return RemoteConfig(**values, rope_theta=1e6, hidden_act="silu", rms_norm_eps=1e-5, scale_emb=12)
    if architecture == "KimiK25ForConditionalGeneration":
        kimi = pytest.importorskip("nemo_automodel.components.models.kimi_k25_vl.model")
        text = {**sizes(architecture), **MLA, **MOE, "rope_scaling": DEEPSEEK_YARN}
        del text["head_dim"], text["num_key_value_heads"]
        return kimi.KimiK25VLConfig(text_config=text, architectures=[architecture])
    model_type, values = CONFIGS[architecture]
    config_class = transformers.models.auto.configuration_auto.CONFIG_MAPPING[model_type]
    text = {**sizes(architecture), **values}
    if architecture in WRAPPED:
        return config_class(text_config=text, architectures=[architecture])
    return config_class(**text)


def automodels_config(target: PretrainedConfig) -> PretrainedConfig:
    """Return the config that AutoModel's recipe gives to the draft class (0.6.0, ``TrainEagle3Recipe.setup``)."""
    text = getattr(target, "text_config", None) or target
    values = text.to_dict() | {
        "draft_vocab_size": DRAFT_VOCAB,
        "target_hidden_size": text.hidden_size,
        "architectures": ["LlamaEagle3DraftModel"],
        "tie_word_embeddings": False,
        "attn_implementation": "eager",
        "fc_norm": False,
        "norm_output": False,
        "parallel_drafting": False,
    }
    return type(text).from_dict(values)


def train_a_step(draft: torch.nn.Module) -> tuple[float, float]:
    """Return the loss before and after a step of AutoModel's own trainer on random supervision, both finite."""
    torch.manual_seed(0)
    selected = torch.randperm(VOCAB)[:DRAFT_VOCAB].sort().values
    mask = torch.zeros(VOCAB, dtype=torch.bool)
    mask[selected] = True
    draft.float().set_vocab_mapping(selected)
    draft.freeze_embeddings()
    trainer = core.Eagle3TrainerModule(draft, selected_token_ids=selected, selected_token_mask=mask, ttt_steps=3)
    batch = {
        "input_ids": torch.randint(0, VOCAB, (2, 12)),
        "attention_mask": torch.ones(2, 12, dtype=torch.long),
        "loss_mask": torch.ones(2, 12, dtype=torch.long),
        "aux_hidden_states": torch.randn(2, 12, 3 * HIDDEN),
        "target_probs": torch.softmax(4 * torch.randn(2, 12, DRAFT_VOCAB), dim=-1),
        "position_mask": torch.ones(2, 12, 1, dtype=torch.bool),
    }
    optimizer = torch.optim.AdamW([p for p in draft.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(2):
        loss = trainer(**batch).loss
        loss.backward()
        missing = [n for n, p in draft.named_parameters() if p.requires_grad and p.grad is None]
        assert missing == []
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses[0], losses[1]


@pytest.fixture
def drafts() -> Drafts:
    """AutoModel's registry as it is without us, in a copy, with what it lacks."""
    return Drafts(dict(AUTOMODELS), registry.DraftSpec, draft_llama.LlamaEagle3DraftModel)


def choose(drafts: Drafts, target: PretrainedConfig, **changes: Any) -> Choice:
    return drafts.choose(recipe_args(**changes), target)


def build(drafts: Drafts, choice: Choice, target: PretrainedConfig) -> torch.nn.Module:
    """Build the draft as AutoModel's recipe does."""
    with drafts.building(choice):
        spec = drafts._registry[choice.architecture]
        return spec.draft_cls(automodels_config(target))


def test_the_table_is_complete():
    special = {"MiniCPMForCausalLM", "KimiK25ForConditionalGeneration"}
    automodels_unused = {"Gemma4ForConditionalGeneration"}
    assert {*CONFIGS, *special} == {*draft_registry.ARCHITECTURES, *AUTOMODELS} - automodels_unused


@pytest.mark.parametrize("architecture", [*CONFIGS, "MiniCPMForCausalLM", "KimiK25ForConditionalGeneration"])
def test_draft_is_built_and_learns(drafts, architecture):
    target = tiny_target(architecture)
    text = target.get_text_config()
    choice = choose(drafts, target)
    assert choice.architecture == architecture
    draft = build(drafts, choice, target)
    config = draft.config
    assert obstacles(config) == [], "or SGLang would not serve it as trained"
    assert (config.hidden_size, config.vocab_size) == (HIDDEN, VOCAB)
    assert config.num_attention_heads == text.num_attention_heads
    assert draft.model.fc.weight.shape == (HIDDEN, 3 * HIDDEN)
    assert draft.lm_head.weight.shape == (DRAFT_VOCAB, HIDDEN)
    assert [n for n, _ in draft.named_parameters() if n.endswith("bias")] == []
    before, after = train_a_step(draft)
    assert after < before


def test_every_architecture_is_one_that_sglang_serves():
    spec = importlib.util.find_spec("sglang")
    if spec is None or spec.origin is None:
        pytest.skip("sglang is not installed")
    folder = Path(spec.origin).parent / "srt" / "models"
    source = "\n".join(path.read_text() for path in folder.glob("*.py"))
    missing = [
        name for name in draft_registry.ARCHITECTURES if not re.search(rf"^class {name}[(:]", source, re.MULTILINE)
    ]
    assert missing == []


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"])
def test_automodels_own_is_kept_where_it_can_be_served(drafts, architecture):
    target = tiny_target(architecture)
    choice = choose(drafts, target)
    assert choice == Choice(architecture, own=False)
    assert type(build(drafts, choice, target)) is AUTOMODELS[architecture].draft_cls


@pytest.mark.parametrize(
    ("architecture", "changes", "reason"),
    [
        ("DeepseekV3ForCausalLM", {}, "MLA"),
        ("GptOssForCausalLM", {}, "attention_bias"),
        ("Phi3ForCausalLM", {}, "partial rotary"),
        ("LlamaForCausalLM", {"attention_bias": True}, "attention_bias"),
        ("LlamaForCausalLM", {"mlp_bias": True}, "mlp_bias"),
        ("LlamaForCausalLM", {"hidden_act": "gelu"}, "hidden_act gelu"),
        (
            "Qwen3ForCausalLM",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "dynamic",
        ),
        ("Qwen3ForCausalLM", {"rope_parameters": DEEPSEEK_YARN}, "RoPE yarn"),
    ],
)
def test_automodels_own_gives_way_where_it_would_not_be_served(drafts, caplog, architecture, changes, reason):
    target = tiny_target(architecture)
    for key, value in changes.items():
        setattr(target, key, value)
    choice = choose(drafts, target)
    assert choice.own
    assert reason in caplog.text
    draft = build(drafts, choice, target)
    assert type(draft) is draft_llama.LlamaEagle3DraftModel
    assert isinstance(draft.config, LlamaConfig)
    assert drafts._registry[architecture] is AUTOMODELS[architecture], "put back"


def test_what_others_registered_is_not_changed():
    mine = registry.DraftSpec(draft_cls=type("Mine", (), {}))
    known = {**AUTOMODELS, "Gemma2ForCausalLM": mine}
    drafts = Drafts(known, registry.DraftSpec, draft_llama.LlamaEagle3DraftModel)
    assert known["Gemma2ForCausalLM"] is mine
    assert all(known[name] is spec for name, spec in AUTOMODELS.items())
    assert choose(drafts, tiny_target("Gemma2ForCausalLM")) == Choice("Gemma2ForCausalLM", own=False)


def test_registry_is_put_back_after_an_error(drafts):
    before = dict(drafts._registry)
    for name in ("GptOssForCausalLM", "NobodysForCausalLM"):
        with pytest.raises(RuntimeError), drafts.building(Choice(name, own=True)):
            raise RuntimeError
    assert drafts._registry == before


def test_a_target_without_a_draft_class(drafts):
    target = LlamaConfig(architectures=["Mistral9ForCausalLM"])
    with pytest.raises(ConfigError) as caught:
        choose(drafts, target)
    message = str(caught.value)
    assert "no EAGLE-3 draft class for Mistral9ForCausalLM (did you mean 'Mistral" in message
    assert "recipe_args.draft_config" in message
    assert "EAGLE3_DRAFT_REGISTRY['Mistral9ForCausalLM'] = DraftSpec(draft_cls=...)" in message


def test_a_target_without_architectures(drafts):
    with pytest.raises(ConfigError, match=r"a config.json that names no architectures.*\['NAME'\]"):
        choose(drafts, LlamaConfig())


def test_mla_gets_heads_of_its_own():
    text = tiny_target("DeepseekV3ForCausalLM")
    config = draft_config(text)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 4, 24)


@pytest.mark.parametrize(
    ("architecture", "width"),
    [
        ("Llama4ForCausalLM", 160),
        ("MiniMaxM2ForCausalLM", 96),
        ("GraniteMoeForCausalLM", 96),
        ("Qwen2ForCausalLM", 128),
    ],
)
def test_intermediate_size(architecture, width):
    assert draft_config(tiny_target(architecture)).intermediate_size == width


@pytest.mark.parametrize(
    ("architecture", "eps"), [("CohereForCausalLM", 1e-5), ("MiniCPMForCausalLM", 1e-5), ("Qwen2ForCausalLM", 1e-6)]
)
def test_norm_eps(architecture, eps):
    assert draft_config(tiny_target(architecture)).rms_norm_eps == eps


def test_a_pad_token_that_the_embedding_lacks_is_left_out():
    text = LlamaConfig(**{**tiny_models.DIMENSIONS, "pad_token_id": -1})
    assert draft_config(text).pad_token_id is None
    assert draft_config(LlamaConfig(**tiny_models.DIMENSIONS)).pad_token_id == 0


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64}
PLAIN = {"rope_type": "default", "rope_theta": 5e5}


@pytest.mark.parametrize(
    ("given", "served"),
    [
        ({"rope_theta": 5e5}, PLAIN),
        ({"rope_theta": 5e5, "rope_scaling": None}, PLAIN),
        ({"rope_theta": 5e5, "rope_scaling": LLAMA3}, {**LLAMA3, "rope_theta": 5e5}),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {**PLAIN, "rope_type": "linear"} | {"factor": 2.0},
        ),
        ({"rope_parameters": DEEPSEEK_YARN}, {**YARN, "beta_fast": 32.0, "beta_slow": 1.0}),
        ({"rope_parameters": {**YARN, "attention_factor": 1.2}}, YARN),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5}}, PLAIN),
        ({"rope_parameters": {**PLAIN, "rope_type": "dynamic", "factor": 2.0}}, PLAIN),
        ({"rope_parameters": {**PLAIN, "rope_type": "longrope", "long_factor": [1.0], "short_factor": [1.0]}}, PLAIN),
        ({"rope_parameters": {**PLAIN, "mrope_section": [1, 2]}}, PLAIN),
        ({"rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5}}, PLAIN),
        (
            {
                "rope_parameters": {
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                }
            },
            {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        ),
        ({}, {"rope_type": "default", "rope_theta": 1e4}),
    ],
)
def test_served_rope(given, served):
    """Whatever the major version of transformers that the target's config was written by."""
    config = PretrainedConfig()
    vars(config).update(given)
    if "rope_scaling" in given:  # a property over rope_parameters in transformers 5
        config.rope_parameters = given["rope_scaling"]
    assert served_rope(config) == served


@pytest.mark.parametrize(
    "written",
    [
        {"torch_dtype": "bfloat16", "rope_theta": 5e5, "rope_scaling": LLAMA3},
        {"dtype": "bfloat16", "rope_parameters": {**LLAMA3, "rope_theta": 5e5}},
    ],
    ids=["transformers 4", "transformers 5"],
)
@pytest.mark.parametrize(("kind", "name"), [("llama", "LlamaForCausalLM"), ("mistral", "MistralForCausalLM")])
def test_target_configs_of_both_transformers(drafts, tmp_path, written, kind, name):
    config = {"model_type": kind, "architectures": [name], **tiny_models.DIMENSIONS, **written}
    (tmp_path / "config.json").write_text(json.dumps(config))
    args = recipe_args(tmp_path)
    target = preflight.load_target_config(args)
    assert preflight.check_target(args, target) == [1, 3, 4]
    draft = build(drafts, drafts.choose(args, target), target)
    assert draft.config.dtype == torch.bfloat16
    assert draft.config.rope_parameters == {**LLAMA3, "rope_theta": 5e5}


def test_a_remote_config_of_transformers_4(drafts):
    """Attributes of its own, no ``rope_parameters``."""
    target = RemoteConfig(**{**sizes("MiniCPMForCausalLM"), "hidden_act": "silu", "rope_theta": 5e5})
    draft = build(drafts, choose(drafts, target), target)
    assert draft.config.rope_parameters == PLAIN


def draft_file(path: Path, **changes: Any) -> str:
    values = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "vocab_size": VOCAB,
        "draft_vocab_size": DRAFT_VOCAB,
        "rope_theta": 1e6,
        "rope_scaling": None,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4], "use_aux_hidden_state": True},
        **changes,
    }
    path.write_text(json.dumps({key: value for key, value in values.items() if value != "absent"}))
    return str(path)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "KimiK25ForConditionalGeneration", "NobodysForCausalLM"])
def test_a_draft_config_file_is_what_is_built(drafts, tmp_path, architecture):
    known = architecture != "NobodysForCausalLM"
    target = tiny_target(architecture if known else "LlamaForCausalLM")
    target.architectures = [architecture]
    before = dict(drafts._registry)
    file = draft_file(tmp_path / "draft.json")
    choice = choose(drafts, target, draft_config=file, draft_vocab_size=DRAFT_VOCAB)
    draft = build(drafts, choice, target)
    assert draft.model.layers[0].self_attn.q_proj.weight.shape == (4 * 32, 2 * HIDDEN)
    assert draft.model.layers[0].mlp.up_proj.weight.shape == (96, HIDDEN)
    assert draft.config.rope_parameters == {"rope_type": "default", "rope_theta": 1e6}
    assert drafts._registry == before
    assert train_a_step(draft)[1] < 100


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_sise": 64}, "'hidden_sise' is no key of a Llama-style draft (did you mean 'hidden_size'?)"),
        ({"hidden_size": 128}, "hidden_size is 128, and must be 64 with this target"),
        ({"vocab_size": 512}, "vocab_size is 512, and must be 500"),
        ({"model_type": "qwen3"}, "model_type is 'qwen3', and must be 'llama'"),
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2, and must be 1"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', and must be 'silu'"),
        ({"attention_bias": True}, "attention_bias: SGLang would not serve it as trained"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "RoPE dynamic: SGLang would not"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ({"intermediate_size": "absent"}, "lacks intermediate_size"),
        ({"intermediate_size": "wide"}, "is not a Llama config"),
        ({"draft_vocab_size": 100}, "recipe_args.draft_vocab_size: 96, but the draft config file says 100"),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}},
            "[1, 3, 4], but the draft config file says",
        ),
    ],
)
def test_a_draft_config_file_that_does_not_fit(drafts, tmp_path, changes, words):
    file = draft_file(tmp_path / "draft.json", **changes)
    with pytest.raises(ConfigError) as caught:
        choose(drafts, tiny_target("LlamaForCausalLM"), draft_config=file, draft_vocab_size=DRAFT_VOCAB)
    assert words in str(caught.value)


@pytest.mark.parametrize("text", ["{", "[]", None])
def test_a_draft_config_file_that_cannot_be_read(drafts, tmp_path, text):
    path = tmp_path / "draft.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=r"recipe_args.draft_config: .*draft.json (cannot be read|is not a JSON)"):
        choose(drafts, tiny_target("LlamaForCausalLM"), draft_config=str(path))


def test_parallel_drafting_keeps_its_layers_and_keys(drafts):
    target = tiny_target("GptOssForCausalLM")
    config = automodels_config(target)
    for key, value in {"parallel_drafting": True, "num_hidden_layers": 2, "mask_token_id": 7, "num_depths": 4}.items():
        setattr(config, key, value)
    made = draft_config(config)
    assert (made.num_hidden_layers, made.mask_token_id, made.num_depths) == (2, 7, 4)
