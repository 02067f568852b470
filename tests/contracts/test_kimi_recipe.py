"""The Kimi K2.7 Code recipe without its target: validation, the checks that need a config.json, and its arithmetic."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from nemo_eagle3_sglang import cli
from nemo_eagle3_sglang.config.load import load_config
from nemo_eagle3_sglang.training import memory, preflight

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes/kimi_k2.7_code_eagle3.yaml"
DRAFT = ROOT / "examples/kimi-k2.7-code-eagle3.json"
CONFIG = ROOT / "tests/fixtures/kimi_k2.7_code_config.json"
SCRIPT = ROOT / "examples/run_kimi_k2.7_code_eagle3.sh"
AUX_IDS = [1, 29, 57]
GPU_BYTES = 184e9


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The recipe with a folder that holds the target's config.json, and code of the checkpoint that cannot run."""
    monkeypatch.chdir(ROOT)
    config = json.loads(CONFIG.read_text())
    config["auto_map"] = {"AutoConfig": "configuration_kimi_k25.KimiK25Config"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    gone = "from transformers.utils import is_torch_fx_available_of_4\n"
    (tmp_path / "configuration_kimi_k25.py").write_text(gone)
    return load_config(RECIPE, [f"--recipe_args.target_model_name_or_path={tmp_path}"])[0]


def test_validates(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert cli.main(["validate", str(RECIPE)]) == 0
    assert "draft_config: examples/kimi-k2.7-code-eagle3.json" in capsys.readouterr().out


def test_says_that_it_has_not_run():
    header = RECIPE.read_text().split("\nrecipe:")[0]
    assert "NOT RUN YET" in header


def test_arguments_are_sglangs(recipe):
    pytest.importorskip("sglang", reason="names are those of the installed sglang")
    from nemo_eagle3_sglang.engine import versions

    assert set(recipe.recipe_args.sglang_args) <= versions.server_arg_names()


def test_target_and_draft_pass_the_checks(recipe):
    """A dry run of ``check_run`` up to what needs the tokenizer, the data and the engine."""
    pytest.importorskip("nemo_automodel", reason="the draft classes are AutoModel's")
    from nemo_eagle3_sglang.training import recipe as automodel

    args = recipe.recipe_args
    target = preflight.load_target_config(args)
    assert target.architectures == ["KimiK25ForConditionalGeneration"]
    assert preflight.check_target(args, target) == AUX_IDS
    choice = automodel.DRAFTS.choose(args, target)
    assert choice.own
    text = target.text_config
    values = text.to_dict() | {"draft_vocab_size": args.draft_vocab_size, "target_hidden_size": text.hidden_size}
    with automodel.DRAFTS.building(choice), torch.device("meta"):
        spec = automodel.EAGLE3_DRAFT_REGISTRY[choice.architecture]
        draft = spec.draft_cls(type(text).from_dict(values))
    assert draft.model.layers[0].self_attn.q_proj.weight.shape == (64 * 128, 2 * 7168)
    assert draft.model.fc.weight.shape == (7168, 3 * 7168)
    assert draft.lm_head.weight.shape == (32000, 7168)
    assert draft.t2d.shape == (163840,)


def test_without_a_draft_file_the_target_still_has_a_draft(recipe):
    pytest.importorskip("nemo_automodel", reason="the draft classes are AutoModel's")
    from nemo_eagle3_sglang.training import recipe as automodel

    args = recipe.recipe_args.model_copy(update={"draft_config": None})
    target = preflight.load_target_config(args)
    choice = automodel.DRAFTS.choose(args, target)
    with torch.device("meta"):
        config = automodel.EAGLE3_DRAFT_REGISTRY[choice.architecture].draft_cls(target.text_config).config
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (64, 64, 128)
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (163584, 163585, 163839)
    assert config.rope_parameters["rope_type"] == "yarn"


def test_draft_file(recipe):
    values, text = json.loads(DRAFT.read_text()), memory.read_text_config(CONFIG)
    assert values["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == AUX_IDS == recipe.recipe_args.aux_layer_ids
    assert values["draft_vocab_size"] == recipe.recipe_args.draft_vocab_size == 32000
    for key in ("hidden_size", "intermediate_size", "vocab_size", "bos_token_id", "eos_token_id", "pad_token_id"):
        assert values[key] == text[key], key
    read = AutoConfig.from_pretrained(DRAFT)
    assert (read.model_type, read.num_hidden_layers, read.dtype) == ("llama", 1, torch.bfloat16)


def run_of(recipe, target) -> memory.Run:
    args = recipe.recipe_args
    options = args.sglang_args
    return memory.Run(
        target=target,
        draft=json.loads(DRAFT.read_text()),
        world=16,
        tp=options["tp_size"],
        rows=args.micro_batch_size,
        length=args.seq_length,
        ttt_steps=args.ttt_steps,
        kv_tokens=options["max_total_tokens"],
    )


def tables() -> list[list[str]]:
    """Return the tables in the recipe's comments, line by line."""
    found: list[list[str]] = [[]]
    for line in RECIPE.read_text().splitlines():
        if re.fullmatch(r"#   .+: +\d+\.\d GiB", line):
            found[-1].append(line.removeprefix("#   "))
        elif found[-1]:
            found.append([])
    return found[:-1]


def test_comments_are_what_the_code_computes(recipe):
    quantised = memory.read_text_config(CONFIG)
    whole = {key: value for key, value in quantised.items() if key != "quantization_config"}
    assert tables() == [run_of(recipe, target).lines(GPU_BYTES) for target in (quantised, whole)]
    assert all(run_of(recipe, target).peak() < GPU_BYTES - 10 * memory.GIB for target in (quantised, whole))


def test_pool_and_share_hold_what_a_forward_needs(recipe):
    args, text = recipe.recipe_args, memory.read_text_config(CONFIG)
    options, run = args.sglang_args, run_of(recipe, text)
    assert options["max_total_tokens"] == options["max_prefill_tokens"] == run.forward_tokens
    parts = run.parts()
    assert (parts["target weights"] + parts["KV pool"]) / GPU_BYTES < options["mem_fraction_static"]
    comments = RECIPE.read_text()
    assert f"({memory.kv_bytes_per_token(text, 16):,} bytes a token)" in comments
    whole = memory.target_bytes({k: v for k, v in text.items() if k != "quantization_config"}, 16)
    assert f"the weights alone are {whole / GPU_BYTES:.0%}" in comments
    assert (whole + parts["KV pool"]) / GPU_BYTES < float(re.search(r"write (0\.\d+) then", comments)[1])
    assert args.packed_sequence_size == run.length


def script(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k in ("PATH", "HOME", "LANG")} | {"PYTHON": sys.executable} | env
    return subprocess.run(["bash", SCRIPT, *args], capture_output=True, text=True, timeout=120, env=env, check=False)


def test_script_starts_sixteen_processes_over_four_nodes():
    done = script("--dry-run", "--recipe_args.num_epochs=2", RDZV_ENDPOINT="node0:29500", RUN_ID="r1")
    assert done.returncode == 0, done.stderr
    words = done.stdout.split()
    assert {"--nnodes=4", "--nproc-per-node=4", "--rdzv-endpoint=node0:29500", "--rdzv-id=r1"} <= set(words)
    assert words[0] == "timeout"
    assert "--max-restarts=0" in words
    assert words[-4:] == [
        "-m",
        "nemo_automodel.cli.app",
        "recipes/kimi_k2.7_code_eagle3.yaml",
        "--recipe_args.num_epochs=2",
    ]


def test_script_explains_itself():
    done = script("--help")
    assert done.returncode == 0
    for name in ("RDZV_ENDPOINT", "WORLD", "GPUS_PER_NODE", "TIME_LIMIT", "JOIN_TIMEOUT", "RECIPE", "srun"):
        assert name in done.stdout


@pytest.mark.parametrize(
    ("args", "env", "words"),
    [
        ([], {}, "RDZV_ENDPOINT is not set"),
        ([], {"RDZV_ENDPOINT": "node0"}, "RDZV_ENDPOINT=node0: write HOST:PORT"),
        ([], {"WORLD": "15", "RDZV_ENDPOINT": "n:1"}, "WORLD=15 is not a multiple of GPUS_PER_NODE=4"),
        ([], {"WORLD": "many", "RDZV_ENDPOINT": "n:1"}, "WORLD=many is not a number"),
        ([], {"RECIPE": "no.yaml", "RDZV_ENDPOINT": "n:1"}, "RECIPE=no.yaml does not exist"),
        (["--recipe_args.seq_lenght=1"], {"RDZV_ENDPOINT": "n:1"}, "seq_lenght"),
        (["extra"], {"RDZV_ENDPOINT": "n:1"}, "extra: write overrides as"),
    ],
)
def test_script_refuses(args, env, words):
    done = script(*args, **env)
    assert done.returncode == 2
    assert "error: " in done.stderr
    assert words in done.stderr


def test_script_is_clean():
    shellcheck = shutil.which("shellcheck")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed")
    done = subprocess.run([shellcheck, SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
