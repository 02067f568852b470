"""`nemo-eagle3-sglang plan`: the estimate against what runs measured, and what it says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import transformers
import yaml

from nemo_eagle3_sglang.cli import main
from nemo_eagle3_sglang.training import memory

ROOT = Path(__file__).parents[3]
MEASURED = json.loads((ROOT / "docs/benchmarks/train_step_h200.json").read_text())
LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
}


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """The work of the committed benchmark, as a recipe."""
    transformers.LlamaConfig(**LLAMA_8B, architectures=["LlamaForCausalLM"], dtype="bfloat16").save_pretrained(
        tmp_path / "target"
    )
    config = {
        "recipe_args": {
            "target_model_name_or_path": str(tmp_path / "target"),
            "target_model_backend": "sglang",
            "train_data_path": "train.jsonl",
            "output_dir": str(tmp_path / "out"),
            "kv_pool": "auto",
            "packed_sequence_size": 4096,
            "seq_length": 2048,
            "micro_batch_size": 2,
            "num_epochs": 1,
            "ttt_steps": 4,
            "draft_vocab_size": 32000,
        },
        "optimizer": {"lr": 1.0e-4},
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def plan(capsys, *arguments: object) -> tuple[int, dict[str, float], str]:
    """Return exit status, GiB by name and the verdict."""
    try:
        status = main(["plan", *map(str, arguments)])
    except SystemExit as ended:
        status = int(ended.code or 0)
    out = capsys.readouterr().out
    parts = {name.strip(): float(size) for name, size in re.findall(r"^(.+?): +([\d.]+) GiB$", out, flags=re.MULTILINE)}
    return status, parts, out.splitlines()[-1] if out else ""


@pytest.mark.parametrize(("row", "options"), [("ours-bf16", []), ("ours-fp8", ["quantization=fp8"])])
def test_within_ten_percent_of_what_ran(recipe, capsys, row, options):
    measured = next(r for r in MEASURED["rows"] if r["name"] == row)
    overrides = [f"--recipe_args.sglang_args.{option}" for option in options]
    _, parts, _ = plan(capsys, recipe, "--gpu-memory", 141, "--supervised", 0.75, *overrides)
    assert parts["peak in torch and SGLang"] == pytest.approx(measured["peak_gib"], rel=0.1)
    assert parts["KV pool"] == pytest.approx(measured["kv_pool_gib"], abs=0.06)
    assert parts["target weights"] == pytest.approx(measured["target_gib"] - measured["kv_pool_gib"], rel=0.02)
    draft = measured["static_gib"] - measured["target_gib"]
    trained, _ = memory.draft_counts({**LLAMA_8B, "draft_vocab_size": 32000})
    assert parts["draft, gradients, AdamW"] == pytest.approx(draft + 2 * trained / memory.GIB, rel=0.05)
    activations = parts["supervision"] + parts["draft activations"]
    assert activations == pytest.approx(measured["dynamic_gib"], rel=0.1)


def test_fits_or_not_and_what_to_change(recipe, capsys):
    status, parts, verdict = plan(capsys, recipe, "--gpu-memory", 80)
    assert status == 0
    assert re.fullmatch(r"fits, \d+\.\d GiB to spare", verdict)
    assert parts["a GPU has"] == pytest.approx(80e9 / memory.GIB, abs=0.1)
    status, _, verdict = plan(capsys, recipe, "--gpu-memory", 24)
    assert status == 1
    assert verdict.startswith("does not fit by ")
    assert "quantization: fp8" in verdict


def test_the_half_that_sglang_reserves_counts(recipe, capsys):
    auto = plan(capsys, recipe, "--gpu-memory", 141)[1]["peak in torch and SGLang"]
    status, parts, _ = plan(capsys, recipe, "--gpu-memory", 141, "--recipe_args.kv_pool=half")
    assert status == 0
    assert parts["KV pool beyond a forward (0.5)"] > 40
    assert parts["peak in torch and SGLang"] > auto + 40
    status, _, verdict = plan(capsys, recipe, "--gpu-memory", 24, "--recipe_args.kv_pool=half")
    assert status == 1
    assert "mem_fraction_static" in verdict


def test_a_second_process_on_the_gpu_counts(recipe, capsys):
    one = plan(capsys, recipe, "--gpu-memory", 141)[1]["CUDA, NCCL, fragmentation"]
    two = plan(capsys, recipe, "--gpu-memory", 141, "--gpus", 2)[1]["CUDA, NCCL, fragmentation"]
    assert two > one


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--gpus", 3, "--recipe_args.sglang_args.tp_size=2"], "--gpus 3 is not a multiple"),
        (["--gpus", 0], "--gpus is at least 1"),
        (["--recipe_args.sglang_args.tp_size=0"], "sglang_args.tp_size: 0 is no number above 0"),
        (["--recipe_args.sglang_args.mem_fraction_static=half"], "mem_fraction_static: 'half' is no number above 0"),
        (["--recipe_args.aux_layer_ids=[1,3,99]"], "99 is out of range"),
        (["--recipe_args.sglang_args.max_total_tokens=9000"], "recipe_args.kv_pool: auto sizes the pool"),
        (["--recipe_args.target_model_name_or_path=nowhere/at/all"], "target_model_name_or_path"),
    ],
)
def test_bad_input(recipe, capsys, arguments, words):
    assert main(["plan", str(recipe), *map(str, arguments)]) == 2
    assert words in capsys.readouterr().err
