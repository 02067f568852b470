"""What the schema takes, what it refuses, and in which words. AutoModel's own source is the reference for keys."""

from __future__ import annotations

import ast
import copy
import importlib.metadata
import importlib.util
from pathlib import Path
from typing import Any

import pytest

from nemo_eagle3_sglang import backends
from nemo_eagle3_sglang.config import Config, validate
from nemo_eagle3_sglang.config.schema import Checkpoint, DecodeEval, Optimizer, RecipeArgs, Regen, sections
from nemo_eagle3_sglang.errors import ConfigError

MINIMAL: dict[str, Any] = {
    "recipe": "TrainEagle3Recipe",
    "recipe_args": {
        "target_model_name_or_path": "some/target",
        "train_data_path": "train.jsonl",
        "output_dir": "./out",
        "seq_length": 1024,
        "micro_batch_size": 1,
        "num_epochs": 1,
        "ttt_steps": 4,
    },
    "optimizer": {"lr": 1.0e-4},
}
ABSENT = object()


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Backends that installed distributions register; a test may append to it."""
    names = ["sglang", "hf"]
    monkeypatch.setattr(
        backends,
        "entry_points",
        lambda group: [importlib.metadata.EntryPoint(name, "nowhere:build", group) for name in names],
    )
    return names


def changed(changes: dict[str, Any]) -> dict[str, Any]:
    """Return MINIMAL with the dotted ``changes`` applied."""
    mapping = copy.deepcopy(MINIMAL)
    for path, value in changes.items():
        *above, key = path.split(".")
        section = mapping
        for name in above:
            section = section.setdefault(name, {})
        if value is ABSENT:
            del section[key]
        else:
            section[key] = value
    return mapping


def problems(mapping: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        validate(mapping)
    first, *rest = str(caught.value).split("\n")
    assert not rest or first == f"{len(rest)} problems:"
    return [line.strip() for line in rest] or [first]


def problem(path: str, value: Any, **more: Any) -> str:
    found = problems(changed({path: value, **more}))
    assert len(found) == 1, found
    return found[0]


def test_minimal_has_automodels_defaults():
    config = validate(MINIMAL)
    args = config.recipe_args
    assert (args.target_model_backend, args.device, args.grad_accumulation_steps) == ("colocated", "auto", 1)
    assert (args.freeze_embeddings, args.aux_layer_ids, args.val_data_path) == (True, None, None)
    assert config.optimizer.betas == (0.9, 0.95)
    assert (config.dist_env.backend, config.dist_env.timeout_minutes) == ("nccl", 30)
    assert (config.checkpoint.enabled, config.checkpoint.save_consolidated) == (True, "every")
    assert config.wandb is None


@pytest.mark.parametrize(
    ("path", "value", "read"),
    [
        ("optimizer.lr", 1, 1.0),
        ("optimizer.betas", [0.8, 0], (0.8, 0.0)),
        ("optimizer.betas", (0.8, 0.9), (0.8, 0.9)),
        ("optimizer.weight_decay", 0, 0.0),
        ("recipe_args.train_data_path", ["a.jsonl", "b.jsonl"], ["a.jsonl", "b.jsonl"]),
        ("recipe_args.aux_layer_ids", [28, 1, 0], [28, 1, 0]),
        ("recipe_args.aux_layer_ids", (1, 2, 3), [1, 2, 3]),
        ("recipe_args.seq_length", 2, 2),
        ("recipe_args.packed_sequence_size", 4096, 4096),
        ("recipe_args.max_grad_norm", float("inf"), float("inf")),
        ("recipe_args.sglang_args", None, {}),
        ("recipe_args.vllm_args", {"x": [1, {"y": None}]}, {"x": [1, {"y": None}]}),
        ("recipe_args.target_model_backend", "hf", "hf"),
        ("recipe_args.target_model_backend", "vllm", "vllm"),
        ("recipe_args.device", "cpu", "cpu"),
        ("recipe_args.ckpt_every_steps", -1, -1),
        ("checkpoint.save_consolidated", False, "false"),
        ("checkpoint.save_consolidated", "Final", "final"),
        ("checkpoint.restore_from", "LATEST", "LATEST"),
        ("dist_env.timeout_minutes", 0.5, 0.5),
        ("wandb.project", "p", "p"),
        ("distributed", {"strategy": "fsdp2", "cp_size": 1}, {"strategy": "fsdp2", "cp_size": 1}),
        ("rng.seed", 42, 42),
        ("recipe._target_", dict, dict),
    ],
)
def test_accepted(path: str, value: Any, read: Any):
    mapping = changed({path.split(".")[0]: {}} if path.startswith("recipe._") else {})
    section, *keys = path.split(".")
    inner = mapping if not keys else mapping.setdefault(section, {})
    inner[keys[0] if keys else section] = value
    found: Any = validate(mapping)
    for key in path.split("."):
        found = found[key] if isinstance(found, dict) else getattr(found, key)
    assert found == read
    assert type(found) is type(read)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("recipe_args.seq_length", "true", "= 'true': not a whole number"),
        ("recipe_args.seq_length", True, "= true: not a whole number"),
        ("recipe_args.seq_length", 1024.0, "= 1024.0: not a whole number; write e.g. 2048"),
        ("recipe_args.seq_length", 1, "= 1: too small; write a value >= 2"),
        ("recipe_args.ttt_steps", 0, "= 0: too small; write a value >= 1"),
        ("recipe_args.micro_batch_size", -1, "write a value >= 1"),
        ("recipe_args.num_epochs", 0, "write a value >= 1"),
        ("recipe_args.grad_accumulation_steps", None, "= null: not a whole number; write e.g. 1"),
        ("recipe_args.packed_sequence_size", -1, "write a value >= 0"),
        ("recipe_args.draft_vocab_size", 0, "write a value >= 1"),
        ("recipe_args.shuffle_seed", 2**32, "write a value < 4294967296"),
        ("recipe_args.max_grad_norm", 0, "write a value > 0"),
        ("recipe_args.trust_remote_code", 1, "neither true nor false"),
        ("recipe_args.output_dir", 5, "= 5: not text"),
        ("recipe_args.output_dir", "", "empty"),
        ("recipe_args.val_split", "null", "the text 'null'"),
        ("recipe_args.val_data_path", "null", "the text 'null'"),
        ("recipe_args.train_data_path", [], "write a path or hub id, or a list of them"),
        ("recipe_args.train_data_path", ["a", 3], "write a path or hub id, or a list of them"),
        ("recipe_args.train_data_path", {"a": 1}, "write a path or hub id, or a list of them"),
        ("recipe_args.aux_layer_ids", [1, 2], "exactly 3 different layer indices"),
        ("recipe_args.aux_layer_ids", [1, 2, 3, 4], "exactly 3 different layer indices"),
        ("recipe_args.aux_layer_ids", [1, 2, 2], "exactly 3 different layer indices"),
        ("recipe_args.aux_layer_ids", 7, "not a list"),
        ("recipe_args.device", "gpu", "write 'auto', 'cuda' or 'cpu' (did you mean 'cpu'?)"),
        ("recipe_args.draft_attn_implementation", "sdpa", "write 'eager' or 'flash_attention_2'"),
        ("recipe_args.lk_loss_type", "lamda", "(did you mean 'lambda'?)"),
        ("recipe_args.lk_kl_scale", 1.5, "write a value <= 1"),
        ("recipe_args.sglang_args", [1], "not a section"),
        ("recipe_args.sglang_args", 0.5, "not a section"),
        ("recipe_args.remote_urls", "http://x", "not a list"),
        ("recipe_args.target_prefetch_depth", 2, "only for 'remote'; write 0"),
        ("optimizer.lr", 0, "write a value > 0"),
        ("optimizer.lr", "1e-4", "= '1e-4': not a number; write e.g. 0.0001"),
        ("optimizer.lr", True, "not a number"),
        ("optimizer.lr", float("nan"), "not a finite number"),
        ("optimizer.betas", [0.9], "write two numbers"),
        ("optimizer.betas", 0.9, "write two numbers"),
        ("optimizer.weight_decay", -0.1, "write a value >= 0"),
        ("optimizer.warmup_ratio", 1.1, "write a value <= 1"),
        ("optimizer._target_", "torch.optim.SGD", "always builds AdamW"),
        ("optimizer._target_", "bitsandbytes.optim.AdamW", "always builds AdamW"),
        ("checkpoint.save_consolidated", "last", "write true, false, final or every"),
        ("checkpoint.save_consolidated", 1, "write true, false, final or every"),
        ("checkpoint.model_save_format", "pickle", "write 'safetensors' or 'torch_save'"),
        ("checkpoint.max_recent_checkpoints", 0, "write a value >= 1"),
        ("checkpoint.checkpoint_dir", None, "leave the key out"),
        ("dist_env.timeout_minutes", 0, "write a value > 0"),
        ("dist_env", None, "not a section"),
        ("recipe_args", None, "not a section"),
        ("optimizer", [1], "not a section"),
        ("wandb", True, "not a section"),
        ("recipe", 5, "write the class's name"),
        ("recipe", {"target": "x"}, "write the class's name"),
    ],
)
def test_refused(path: str, value: Any, words: str):
    line = problem(path, value)
    assert line.startswith(path)
    assert words in line
    assert "pydantic" not in line
    assert "http" not in line.replace("http://x", "")


def test_an_item_of_a_list_is_named():
    assert problem("optimizer.betas", [0.9, 1]) == "optimizer.betas[1] = 1: too large; write a value < 1.0"
    assert problem("recipe_args.aux_layer_ids", [1, -2, 3]).startswith("recipe_args.aux_layer_ids[1] = -2: too small")


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("recipe_args.seq_lenght", "unknown key (did you mean 'seq_length'?)"),
        ("recipe_args.lr", "unknown key; it belongs in optimizer.lr"),
        ("recipe_args.checkpoint_dir", "it belongs in checkpoint.checkpoint_dir"),
        ("recipe_args.wandb", "it belongs in wandb at the top level"),
        ("recipe_args.weight_decy", "did you mean optimizer.weight_decay?"),
        ("recipe_args.learning_rate", "it belongs in optimizer.lr"),
        ("recipe_args.seed", "it belongs in recipe_args.shuffle_seed"),
        ("recipe_args.colour", "unknown key; nothing reads it"),
        ("recipe_args.other_backend_args", "unknown key"),
        ("trust_remote_code", "it belongs in recipe_args.trust_remote_code"),
        ("optimiser", "(did you mean 'optimizer'?)"),
        ("optimizer.seq_length", "it belongs in recipe_args.seq_length"),
        ("optimizer.eps", "the keys here are lr, betas, weight_decay, warmup_ratio, min_lr_ratio, _target_"),
        ("optimizer.target", "unknown key (did you mean '_target_'?)"),
        ("checkpoint.save_consolidate", "(did you mean 'save_consolidated'?)"),
        ("dist_env.timeout", "(did you mean 'timeout_minutes'?)"),
        ("recipe_args.decode_eval.prompts", "(did you mean 'num_prompts'?)"),
        ("recipe_args.regen.output_dir", "it belongs in recipe_args.output_dir"),
    ],
)
def test_unknown_key(path: str, words: str):
    line = problem(path, 3)
    assert line.startswith(f"{path} = 3: unknown key")
    assert words in line


def test_a_key_that_is_not_text():
    assert "a key that is not text" in problem("recipe_args.sglang_args", {1: 2})
    assert any("a key that is not text" in line for line in problems({**MINIMAL, True: 1}))


@pytest.mark.parametrize("key", [*MINIMAL["recipe_args"]])
def test_missing_argument(key: str):
    assert problem(f"recipe_args.{key}", ABSENT).startswith(f"recipe_args.{key}: missing; write {key}: ")


@pytest.mark.parametrize("key", ["recipe_args", "optimizer"])
def test_missing_section(key: str):
    assert problem(key, ABSENT).startswith(f"{key}: missing; write {key}: {{")


def test_every_problem_has_its_line():
    found = problems(changed({"recipe_args.seq_length": 0, "recipe_args.foo": 1, "optimizer.lr": -1, "wandb": 3}))
    assert [line.split(" = ")[0] for line in found] == [
        "recipe_args.seq_length",
        "recipe_args.foo",
        "optimizer.lr",
        "wandb",
    ]


def test_every_conflict_has_its_line():
    found = problems(
        changed({"recipe_args.seq_length": ABSENT, "recipe_args.ttt_steps": ABSENT, "checkpoint.checkpoint_dir": None})
    )
    assert len(found) == 3


def test_a_long_value_is_cut():
    line = problem("recipe_args.colour", "x" * 5000)
    assert len(line) < 200


@pytest.mark.parametrize("mapping", [None, [], "recipe", 3])
def test_not_a_mapping(mapping: Any):
    assert "mapping of sections" in problems(mapping)[0]


def test_backends_are_the_registered_ones(registered: list[str]):
    assert (
        "known here: colocated, hf, remote, sglang, vllm"
        in problem("recipe_args.target_model_backend", "sglnag").lower()
    )
    line = problem("recipe_args.target_model_backend", "toy")
    assert line.startswith("recipe_args.target_model_backend: 'toy' is not a target backend")
    registered.append("toy")
    assert validate(changed({"recipe_args.target_model_backend": "toy"})).recipe_args.target_model_backend == "toy"


def test_options_of_a_backend_from_another_distribution(registered: list[str]):
    changes = {"recipe_args.toy_args": {"speed": 3}}
    assert "no backend 'toy' takes options; hf, sglang, vllm do" in problem("recipe_args.toy_args", {"speed": 3})
    assert "(did you mean 'sglang'?)" in problem("recipe_args.sglnag_args", {})

    registered.append("toy")
    assert validate(changed(changes)).recipe_args.backend_options() == {}
    args = validate(changed({**changes, "recipe_args.target_model_backend": "toy"})).recipe_args
    assert args.backend_options() == {"speed": 3}
    assert problem("recipe_args.toy_args", 3).startswith("recipe_args.toy_args = 3: not a section")
    assert validate(changed({"recipe_args.toy_args": None})).recipe_args.other_backend_args == {"toy_args": {}}


def test_options_that_nothing_reads_are_refused(registered: list[str]):
    # AutoModel builds these two itself and has no such key.
    assert "takes options" in problem("recipe_args.colocated_args", {})
    assert "takes options" in problem("recipe_args.remote_args", {})
    registered.append("remote")
    validate(changed({"recipe_args.remote_args": {}}))


def test_options_of_the_selected_backend():
    changes = {"recipe_args.sglang_args": {"a": 1}, "recipe_args.hf_args": {"b": 2}}
    for backend, options in {"sglang": {"a": 1}, "hf": {"b": 2}, "colocated": {}}.items():
        args = validate(changed({**changes, "recipe_args.target_model_backend": backend})).recipe_args
        assert args.backend_options() == options


def test_the_placeholder_is_no_key():
    assert "stands for a name" in problem("recipe_args.<backend>_args", {})


@pytest.mark.parametrize("target", ["torch.optim.AdamW", "torch.optim.adamw.AdamW", None])
def test_adamw_may_be_named(target: Any):
    validate(changed({"optimizer._target_": target}))


def test_a_target_may_be_the_object_itself():
    import torch

    validate(changed({"optimizer._target_": torch.optim.AdamW, "peft": {"_target_": dict, "match_fn": len}}))
    assert "always builds AdamW" in problem("optimizer._target_", torch.optim.SGD)


def test_parallel_drafting_changes_what_is_required():
    changes = {
        "recipe_args.parallel_drafting": True,
        "recipe_args.ttt_steps": ABSENT,
        "recipe_args.mask_token_id": 128002,
    }
    args = validate(changed(changes)).recipe_args
    assert (args.ttt_steps, args.freeze_embeddings) == (None, False)
    assert validate(changed({**changes, "recipe_args.freeze_embeddings": True})).recipe_args.freeze_embeddings is True


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("target_model_backend", "sglang"),
        ("packed_sequence_size", 64),
        ("lk_loss_type", "alpha"),
        ("cached_target_path", "c"),
    ],
)
def test_parallel_drafting_refuses(key: str, value: Any):
    changes = {"recipe_args.parallel_drafting": True, "recipe_args.mask_token_id": 3}
    assert "not with parallel_drafting" in problem(f"recipe_args.{key}", value, **changes)


def test_parallel_drafting_needs_a_mask_token():
    assert problem("recipe_args.parallel_drafting", True).startswith("recipe_args.mask_token_id: missing")


def test_a_cache_needs_no_data():
    changes = {"recipe_args.cached_target_path": "c", "recipe_args.train_data_path": ABSENT}
    validate(changed({**changes, "recipe_args.seq_length": ABSENT}))


def test_a_remote_target_needs_its_address():
    remote = {"recipe_args.target_model_backend": "remote"}
    assert problems(changed(remote))[0].startswith("recipe_args.remote_urls: missing")
    validate(changed({**remote, "recipe_args.remote_url": "http://h:1"}))
    validate(changed({**remote, "recipe_args.remote_urls": ["http://h:1"], "recipe_args.target_prefetch_depth": 1}))


@pytest.mark.parametrize("job", ["decode_eval", "regen"])
def test_a_job_needs_a_gpu_of_its_own(job: str):
    where = f"recipe_args.{job}"
    assert problem(where, {"every_steps": 5}).startswith(f"{where}.cuda_visible_devices: missing")
    validate(changed({where: {"every_steps": 0}}))
    validate(changed({where: {"every_steps": None, "port": None}}))
    section = validate(changed({where: {"every_steps": 5, "cuda_visible_devices": 7}})).recipe_args
    assert getattr(section, job).cuda_visible_devices == "7"
    line = problem(where, {"every_steps": 5, "cuda_visible_devices": (4, 5)})
    assert line.startswith(f"{where}.cuda_visible_devices = (4, 5): ")
    assert "\"'4,5'\"" in line


def test_config_cannot_be_changed_and_does_not_change_its_source():
    mapping = changed({"recipe_args.sglang_args": None})
    before = copy.deepcopy(mapping)
    config = validate(mapping)
    assert mapping == before
    with pytest.raises(ValueError, match="frozen"):
        config.recipe_args.seq_length = 3


def test_every_key_is_documented():
    for path, model in sections().items():
        for name, field in model.model_fields.items():
            assert field.description, f"{path}.{name}"


def test_sections():
    assert list(sections()) == [
        "",
        "dist_env",
        "recipe_args",
        "recipe_args.decode_eval",
        "recipe_args.regen",
        "optimizer",
        "checkpoint",
    ]
    assert sections()[""] is Config


# What AutoModel 0.6.0 reads, from its source.


def automodel_source(relative: str) -> ast.Module:
    spec = importlib.util.find_spec("nemo_automodel")
    if spec is None or spec.origin is None:
        pytest.skip("nemo_automodel is not installed")
    return ast.parse((Path(spec.origin).parent / relative).read_text())


def reads(tree: ast.Module, section: str) -> dict[str, Any]:
    """Return each key read by ``section.get(key, default)`` or ``section.key``; the first literal default counts."""

    def is_section(node: ast.AST) -> bool:
        return isinstance(node, ast.Name) and node.id == section

    found: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_section(node.value) and node.attr != "get":
            found.setdefault(node.attr, ABSENT)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and is_section(node.func.value):
            key, *default = node.args
            name = ast.literal_eval(key)
            if found.get(name, ABSENT) is ABSENT:
                literal = default and isinstance(default[0], (ast.Constant, ast.Tuple))
                found[name] = ast.literal_eval(default[0]) if literal else ABSENT
    return found


def dataclass_fields(tree: ast.Module, name: str) -> dict[str, Any]:
    definition = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    return {
        node.target.id: ast.literal_eval(node.value) if node.value is not None else ABSENT
        for node in definition.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


def defaults(model: Any) -> dict[str, Any]:
    return {
        field.alias or name: field.get_default(call_default_factory=False) for name, field in model.model_fields.items()
    }


def test_every_argument_that_automodel_reads_is_known():
    wanted: dict[str, Any] = {}
    for file in ("train_eagle3", "peagle_recipe"):
        wanted |= reads(automodel_source(f"recipes/llm/{file}.py"), "recipe_cfg")
    assert len(wanted) > 50
    # seq_length is read once more, as 0 for a check that does not apply here; the two dicts are None to AutoModel.
    differing = {"seq_length", "sglang_args", "vllm_args", "decode_eval", "regen"}
    ours = defaults(RecipeArgs)
    assert set(wanted) - set(ours) == set()
    own = {
        "device",
        "capture",
        "self_check",
        "draft_config",
        "trainer",
        "kv_pool",
        "target_process",
        "sglang_python",
        "remote_token_file",
        "remote_rows",
        "hf_args",
        "<backend>_args",
        "decode_eval",
        "regen",
    }
    assert set(ours) - set(wanted) == own
    for key, value in wanted.items():
        if value is not ABSENT and key not in differing:
            assert ours[key] == value, key


def test_every_optimizer_key_that_automodel_reads_is_known():
    wanted = reads(automodel_source("recipes/llm/train_eagle3.py"), "opt_cfg")
    assert set(wanted) == set(Optimizer.yaml_keys()) - {"_target_"}
    assert {key: value for key, value in wanted.items() if value is not ABSENT}.items() <= defaults(Optimizer).items()


def test_checkpoint_is_automodels():
    wanted = dataclass_fields(automodel_source("components/checkpoint/config.py"), "CheckpointingConfig")
    ours = defaults(Checkpoint)
    assert set(ours) == {*wanted, "restore_from"}
    # The EAGLE-3 recipe gives these two itself.
    differing = {"checkpoint_dir", "save_consolidated"}
    assert {key: ours[key] for key in set(wanted) - differing} == {key: wanted[key] for key in set(wanted) - differing}


@pytest.mark.parametrize(
    ("file", "name", "model"),
    [("decode_eval", "DecodeEvalConfig", DecodeEval), ("regen_loop", "RegenConfig", Regen)],
)
def test_jobs_are_automodels(file: str, name: str, model: Any):
    wanted = dataclass_fields(automodel_source(f"components/speculative/{file}.py"), name)
    # AutoModel writes to <output_dir>/<job> whatever this says.
    del wanted["output_dir"]
    ours = defaults(model)
    assert set(ours) == set(wanted)
    assert {key: value for key, value in wanted.items() if value is not ABSENT}.items() <= ours.items()
