"""YAML files and overrides, as the user writes them, down to the checked configuration."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import yaml

from nemo_eagle3_sglang import backends
from nemo_eagle3_sglang.config import load_config, parse_overrides, validate
from nemo_eagle3_sglang.config.values import literal, substitute
from nemo_eagle3_sglang.errors import ConfigError

STOCK = """\
recipe: TrainEagle3Recipe

dist_env:
  backend: nccl
  timeout_minutes: 30

recipe_args:
  target_model_name_or_path: meta-llama/Llama-3.2-1B
  target_model_backend: sglang
  sglang_args:
    mem_fraction_static: 0.5
  train_data_path: /path/to/train.jsonl
  val_data_path: null
  train_split: "train[:50]"
  val_split: null
  output_dir: ./outputs/eagle3
  seq_length: 1024
  micro_batch_size: 1
  grad_accumulation_steps: 1
  num_workers: 0
  num_epochs: 1
  ttt_steps: 4
  draft_vocab_size: 8192
  freeze_embeddings: true
  trust_remote_code: false
  shuffle_seed: 42
  log_every_steps: 10
  max_grad_norm: 1.0

optimizer:
  lr: 1.0e-4
  betas: [0.9, 0.95]
  weight_decay: 0.0

checkpoint:
  enabled: true
  checkpoint_dir: ./outputs/eagle3/checkpoints
  model_save_format: safetensors
  save_consolidated: true
"""


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        backends,
        "entry_points",
        lambda group: [importlib.metadata.EntryPoint(name, "nowhere:build", group) for name in ("sglang", "hf")],
    )


@pytest.fixture
def write(tmp_path: Path):
    def write(text: str, name: str = "run.yaml") -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write


def message(path: Any, overrides: Any = ()) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value)


def at(merged: Any, path: str) -> Any:
    for key in path.split("."):
        merged = merged[key] if isinstance(merged, dict) else getattr(merged, key)
    return merged


def test_stock_yaml(write):
    config, merged = load_config(write(STOCK))
    assert merged == yaml.safe_load(STOCK)
    assert config.optimizer.lr == 1.0e-4
    assert config.recipe_args.target_model_backend == "sglang"
    assert config.recipe_args.backend_options() == {"mem_fraction_static": 0.5}
    assert config.recipe_args.train_split == "train[:50]"


def test_a_path_may_be_text(write):
    assert load_config(str(write(STOCK)))[0].recipe_args.ttt_steps == 4


@pytest.mark.parametrize(
    ("written", "key", "read"),
    [
        # YAML 1.1 takes 1e-4 for text, and AutoModel makes a number of it.
        ("lr: 1e-4", "lr", 1e-4),
        ("lr: '1e-4'", "lr", 1e-4),
        ("lr: 1", "lr", 1.0),
        ("lr: 1.0e-4\n  betas: '[0.5, 0.6]'", "betas", (0.5, 0.6)),
    ],
)
def test_values_are_read_as_automodel_reads_them(write, written: str, key: str, read: Any):
    assert at(load_config(write(STOCK.split("optimizer:")[0] + f"optimizer:\n  {written}\n"))[0].optimizer, key) == read


OVERRIDES = [
    (["--recipe_args.seq_length=2048"], "recipe_args.seq_length", 2048),
    (["--recipe_args.seq_length", "2048"], "recipe_args.seq_length", 2048),
    (["recipe_args.seq_length=2048"], "recipe_args.seq_length", 2048),
    (["--recipe_args.seq_length=8", "--recipe_args.seq_length=9"], "recipe_args.seq_length", 9),
    (["--recipe_args.trust_remote_code"], "recipe_args.trust_remote_code", True),
    (["--recipe_args.trust_remote_code", "--recipe_args.ttt_steps=2"], "recipe_args.trust_remote_code", True),
    (["--recipe_args.freeze_embeddings=False"], "recipe_args.freeze_embeddings", False),
    (["--recipe_args.freeze_embeddings", "false"], "recipe_args.freeze_embeddings", False),
    (["--recipe_args.draft_vocab_size=None"], "recipe_args.draft_vocab_size", None),
    (["--recipe_args.draft_vocab_size=none"], "recipe_args.draft_vocab_size", None),
    (["--recipe_args.aux_layer_ids=[1,2,3]"], "recipe_args.aux_layer_ids", [1, 2, 3]),
    (["--recipe_args.aux_layer_ids", "[1, 2, 3]"], "recipe_args.aux_layer_ids", [1, 2, 3]),
    (["--recipe_args.ckpt_every_steps", "-1"], "recipe_args.ckpt_every_steps", -1),
    (["--optimizer.lr=1e-5"], "optimizer.lr", 1e-5),
    (["--optimizer.lr=1"], "optimizer.lr", 1),
    (["--optimizer.warmup_ratio=.1"], "optimizer.warmup_ratio", 0.1),
    (["--recipe_args.train_data_path=a=b c.jsonl"], "recipe_args.train_data_path", "a=b c.jsonl"),
    (["--recipe_args.train_data_path=['a', 'b']"], "recipe_args.train_data_path", ["a", "b"]),
    (["--recipe_args.train_split=train[:5]"], "recipe_args.train_split", "train[:5]"),
    (["--recipe_args.sglang_args.mem_fraction_static=0.3"], "recipe_args.sglang_args", {"mem_fraction_static": 0.3}),
    (["--recipe_args.sglang_args={'tp_size': 2}"], "recipe_args.sglang_args", {"tp_size": 2}),
    (["--recipe_args.hf_args.a.b=x"], "recipe_args.hf_args", {"a": {"b": "x"}}),
    (["--wandb.project=p"], "wandb", {"project": "p"}),
    (["--checkpoint.save_consolidated=final"], "checkpoint.save_consolidated", "final"),
]


@pytest.mark.parametrize(("argv", "path", "read"), OVERRIDES)
def test_overrides(write, argv: list[str], path: str, read: Any):
    config, merged = load_config(write(STOCK), argv)
    assert at(merged, path) == read
    assert type(at(merged, path)) is type(read)
    assert at(config, path) == read
    assert load_config(write(STOCK), parse_overrides(argv)) == (config, merged)


@pytest.mark.parametrize(("argv", "path", "read"), OVERRIDES)
def test_overrides_mean_what_they_mean_to_automodel(write, argv: list[str], path: str, read: Any):
    if importlib.util.find_spec("nemo_automodel") is None:
        pytest.skip("nemo_automodel is not installed")
    from nemo_automodel.components.config._arg_parser import parse_args_and_load_config
    from nemo_automodel.components.config.loader import ConfigNode

    file = str(write(STOCK))
    dashed = [argument if "=" not in argument else f"--{argument.lstrip('-')}" for argument in argv]
    theirs = parse_args_and_load_config(file, argv=dashed).to_dict()
    config, merged = load_config(file, argv)
    assert ConfigNode(merged).to_dict() == theirs
    assert validate(theirs) == config


def test_null_override_is_none(write):
    config, merged = load_config(write(STOCK), ["--recipe_args.train_split=null"])
    assert (config.recipe_args.train_split, merged["recipe_args"]["train_split"]) == (None, None)


def test_an_override_replaces_a_mapping_and_fills_an_empty_section(write):
    bare = STOCK.replace("  sglang_args:\n    mem_fraction_static: 0.5\n", "  sglang_args:\n")
    config, _ = load_config(write(bare), ["--recipe_args.sglang_args.mem_fraction_static=0.4"])
    assert config.recipe_args.sglang_args == {"mem_fraction_static": 0.4}


def test_an_override_reaches_into_a_list(write):
    assert load_config(write(STOCK), ["--optimizer.betas.1=0.99"])[0].optimizer.betas == (0.9, 0.99)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--recipe_args.seq_lenght=5"], "recipe_args.seq_lenght = 5: unknown key (did you mean 'seq_length'?)"),
        (["--recipe_args.lr=5"], "it belongs in optimizer.lr"),
        (["--trust_remote_code"], "it belongs in recipe_args.trust_remote_code"),
        (["--optimiser.lr=1"], "(did you mean 'optimizer'?)"),
        (
            ["--recipe_args.seq_length="],
            "'--recipe_args.seq_length=' gives no value; write --recipe_args.seq_length=None",
        ),
        (["--recipe_args.output_dir", ""], "gives no value"),
        (["--recipe_args.seq_length"], "recipe_args.seq_length = true: not a whole number"),
        (["--recipe_args.seq_length=long"], "recipe_args.seq_length = 'long': not a whole number"),
        (["--recipe_args.seq_length=1e3"], "recipe_args.seq_length = 1000.0: not a whole number"),
        (["--recipe_args.train_data_path=[a,b]"], "not a Python literal; quote the text in it"),
        (["--recipe_args.sglang_args={a: 1}"], "not a Python literal"),
        (["--recipe_args.sglang_args={1, 2}"], "is no YAML value"),
        (["--optimizer.betas.7=1"], "leads to no place"),
        (["--optimizer.betas.x=1"], "leads to no place"),
        (["--recipe_args=3"], "recipe_args = 3: not a section"),
        (["seq_length"], "'seq_length' is not an override; write --section.key=value"),
        (["-x", "5"], "'-x' is not an override"),
        (["--"], "'--' is not an override"),
        (["--=5"], "'--=5' is not an override"),
        (["--a..b=5"], "'--a..b=5' is not an override"),
        (["--a[0]=5"], "'--a[0]=5' is not an override"),
        (["--recipe_args.output_dir=''"], "recipe_args.output_dir = '': empty"),
        (["--recipe_args.output_dir=123"], "recipe_args.output_dir = 123: not text"),
    ],
)
def test_bad_override(write, argv: list[str], words: str):
    assert words in message(write(STOCK), argv)


def test_parse_overrides_passes_over_the_path():
    argv = ["-c", "a.yaml", "--x.y", "1", "--config", "b.yaml", "--flag", "--z=k=v"]
    assert parse_overrides(argv) == ["x.y=1", "flag=True", "z=k=v"]
    assert parse_overrides([]) == []


def test_missing_file(tmp_path: Path):
    assert message(tmp_path / "none.yaml") == f"{tmp_path / 'none.yaml'}: no such file."


def test_folder(tmp_path: Path):
    assert message(tmp_path) == f"{tmp_path}: is a folder; name the YAML file in it."


def test_not_text(tmp_path: Path):
    (tmp_path / "run.yaml").write_bytes(b"recipe: \xff\xfe")
    assert "not UTF-8 text (byte 8)" in message(tmp_path / "run.yaml")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "the file is empty"),
        ("# only a comment\n", "the file is empty"),
        ("- a\n- b\n", "holds a list, not a mapping"),
        ("just text\n", "holds a str, not a mapping"),
        ("recipe: x\n\tlr: 1\n", "line 2, column 1: not valid YAML"),
        ("recipe: x\noptimizer: {lr: 1\n", "line 3"),
        ("recipe: [1, 2\nother: 3\n", "line 2"),
        ("a: 1\n---\nb: 2\n", "line 2, column 1: not valid YAML"),
        (
            "optimizer:\n  lr: 1\n  betas: [0, 0]\n  lr: 2\n",
            "line 4, column 3: not valid YAML: key 'lr' is given twice, first in line 2",
        ),
        ("recipe: !!python/object:os.system x\n", "line 1, column 9: not valid YAML"),
        ("recipe: \x00\n", "not valid YAML"),
        ("recipe: !!int five\n", "not valid YAML"),
        ("wandb: !!set {a, b}\n", "wandb: YAML that no configuration can hold"),
        ("a: &a\n  b: *a\n", "refers to the section that it stands in"),
    ],
)
def test_bad_file(write, text: str, words: str):
    path = write(text)
    found = message(path)
    assert found.startswith(f"{path}: ")
    assert words in found


def test_problems_are_listed_below_the_file(write):
    path = write(STOCK.replace("seq_length: 1024", "seq_length: 1").replace("lr: 1.0e-4", "lr: -1"))
    assert message(path).splitlines() == [
        f"{path}: 2 problems:",
        "  recipe_args.seq_length = 1: too small; write a value >= 2",
        "  optimizer.lr = -1: too small; write a value > 0.0",
    ]


def test_merge_keys_of_yaml(write):
    text = STOCK.replace("optimizer:", "optimizer: &o") + "peft: {<<: *o, lr: 5}\nfp8: {<<: *o}\n"
    config, _ = load_config(write(text))
    assert (config.peft["lr"], config.fp8["lr"]) == (5, 1.0e-4)


def test_a_date_stays_text(write):
    assert load_config(write(STOCK + "wandb: {name: 2026-01-02}\n"))[0].wandb == {"name": "2026-01-02"}


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("E3_DIR", "/data")
    monkeypatch.setenv("E3_LENGTH", "512")
    monkeypatch.setenv("e3.dotted", "dotted")
    monkeypatch.delenv("E3_UNSET", raising=False)


VARIABLES = [
    ("${E3_DIR}/x", "/data/x"),
    ("$E3_DIR/x", "/data/x"),
    ("${oc.env:E3_DIR}", "/data"),
    ("${oc.env:E3_UNSET,fallback}", "fallback"),
    ("${oc.env:E3_DIR,fallback}", "/data"),
    ("${E3_UNSET,fallback}", "fallback"),
    ("${E3_UNSET, a, b }", "a, b"),
    ("${E3_UNSET,}x", "x"),
    ("${ E3_DIR }", "/data"),
    ("${e3.dotted}", "dotted"),
    ("$e3.dotted", "dotted"),
    ("$e3.dotted.", "dotted."),
    ("${E3_UNSET,$E3_DIR}", "/data"),
    ("${E3_DIR}${E3_DIR}", "/data/data"),
    ("cost: $5, 100$", "cost: $5, 100$"),
    ("${", "${"),
    ("plain", "plain"),
]


@pytest.mark.usefixtures("variables")
@pytest.mark.parametrize(("text", "value"), VARIABLES)
def test_substitute(text: str, value: str):
    assert substitute(text) == value


@pytest.mark.usefixtures("variables")
@pytest.mark.parametrize(("text", "value"), VARIABLES)
def test_substitute_is_automodels(text: str, value: str):
    if importlib.util.find_spec("nemo_automodel") is None:
        pytest.skip("nemo_automodel is not installed")
    from nemo_automodel.components.config.loader import resolve_yaml_env_vars

    assert resolve_yaml_env_vars(text) == value


@pytest.mark.usefixtures("variables")
@pytest.mark.parametrize("written", ["${E3_DIR}/t.jsonl", "$E3_DIR/t.jsonl", "${E3_UNSET,/data}/t.jsonl"])
@pytest.mark.parametrize("by_override", [False, True])
def test_variables(write, written: str, by_override: bool):
    text = STOCK if by_override else STOCK.replace("/path/to/train.jsonl", f"'{written}'")
    argv = [f"--recipe_args.train_data_path={written}"] if by_override else []
    config, merged = load_config(write(text), argv)
    assert config.recipe_args.train_data_path == "/data/t.jsonl"
    # AutoModel replaces it itself, so that what it saves and prints does not hold the value.
    assert merged["recipe_args"]["train_data_path"] == written


@pytest.mark.usefixtures("variables")
def test_a_variable_may_hold_a_number_and_stand_in_a_list(write):
    text = STOCK.replace("seq_length: 1024", "seq_length: ${E3_LENGTH}")
    text = text.replace("train_data_path: /path/to/train.jsonl", "train_data_path: ['${E3_DIR}/a', b]")
    args = load_config(write(text))[0].recipe_args
    assert (args.seq_length, args.train_data_path) == (512, ["/data/a", "b"])


@pytest.mark.usefixtures("variables")
def test_variables_that_are_not_set_are_all_named(write):
    text = STOCK.replace("./outputs/eagle3\n", "${E3_UNSET}\n").replace(
        "/path/to/train.jsonl", "['${recipe_args.x}/y']"
    )
    first, *lines = message(write(text)).splitlines()
    assert first.endswith(": 2 problems:")
    assert "recipe_args.train_data_path[0]" in lines[0]
    assert "names an environment variable, not another key" in lines[0]
    assert "recipe_args.output_dir = '${E3_UNSET}': environment variable 'E3_UNSET' is not set" in lines[1]
    assert "write ${E3_UNSET,default} in place of ${E3_UNSET}" in lines[1]


@pytest.mark.parametrize(
    ("switch", "kept"),
    [("true", True), ("false", False), ("off", False), ("'False'", False), ("${E3_UNSET,false}", False)],
)
def test_wandb_switch(write, switch: str, kept: bool):
    config, merged = load_config(write(STOCK + f"wandb:\n  enable: {switch}\n  project: p\n"))
    assert merged.get("wandb") == ({"project": "p"} if kept else None)
    assert config.wandb == ({"project": "p"} if kept else None)


def test_wandb_switch_by_override(write):
    config, merged = load_config(write(STOCK + "wandb: {project: p}\n"), ["--wandb.enable=false"])
    assert config.wandb is None
    assert "wandb" not in merged


def test_targets_are_not_taken_for_values(write):
    peft = {"_target_": "$a.PeftConfig", "match_fn": "${b}", "dim": "8"}
    config, _ = load_config(write(STOCK + yaml.safe_dump({"peft": peft})))
    assert config.peft == {"_target_": "$a.PeftConfig", "match_fn": "${b}", "dim": 8}


def test_merged_can_be_written_and_read_again(write):
    config, merged = load_config(write(STOCK), ["--optimizer.betas=(0.5, 0.6)"])
    assert load_config(write(yaml.safe_dump(merged), "again.yaml")) == (config, merged)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("true", True),
        ("False", False),
        ("none", None),
        ("null", "null"),
        ("TRUE", "TRUE"),
        ("007", "007"),
        ("1e-4", 1e-4),
        ("(1, 2)", (1, 2)),
        ("'5'", "5"),
        ("train[:5]", "train[:5]"),
        ("1" * 1001, "1" * 1001),
        ("(" * 500, "(" * 500),
        ("a\x00b", "a\x00b"),
        ("[" + "1" * 5000 + "]", "[" + "1" * 5000 + "]"),
    ],
)
def test_literal(text: str, value: Any):
    assert literal(text) == value
    assert type(literal(text)) is type(value)
