"""The co-located target on a GPU in bfloat16: against transformers, its memory, and the recipe."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from conftest import ROOT

from nemo_eagle3_sglang.contracts import BackendRequest
from nemo_eagle3_sglang.engine.runner import SGLangRunner

LLAMA_1B = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
}


@pytest.fixture(scope="module")
def llama_1b(tmp_path_factory) -> Path:
    """A random model of Llama-3.2-1B's shape."""
    folder = tmp_path_factory.mktemp("llama-1b")
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA_1B, dtype="bfloat16")).bfloat16()
    model.save_pretrained(folder)
    del model
    torch.cuda.empty_cache()
    return folder


@pytest.fixture(scope="module")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct as examples/prepare_smollm2.py writes it."""
    folder = ROOT / os.environ.get("SMOLLM2", "outputs/smollm2/target")
    if not folder.is_dir():
        pytest.fail(f"{folder} is missing: python examples/prepare_smollm2.py {folder}")
    return folder


def smoke(out: Path, name: str, sglang_args: dict[str, str], *arguments: str) -> dict:
    command = [sys.executable, "scripts/smoke_sglang_target.py", "--compare-hf", "--init-dist", "--device", "cuda"]
    for pair in sglang_args.items():
        command += ["--sglang-arg", "=".join(pair)]
    path = out / f"{name}.json"
    result = subprocess.run([*command, "--json", str(path), *arguments], cwd=ROOT, check=False)
    assert result.returncode == 0
    return json.loads(path.read_text(encoding="utf-8"))


def test_random_llama_1b_against_transformers(llama_1b, out, sglang_args):
    smoke(out, "smoke_llama_1b", sglang_args, "--target", str(llama_1b), "--batch", "8", "--seq", "1024")


def test_smollm2_on_real_text_against_transformers(smollm2, out, sglang_args):
    text = ROOT / "examples/data/smollm2_chat_val.jsonl"
    smoke(out, "smoke_smollm2", sglang_args, "--target", str(smollm2), "--batch", "24", "--text", str(text))


def test_close_returns_the_memory_and_a_second_runner_gives_the_same(llama_1b, sglang_args, report):
    request = BackendRequest(
        target=str(llama_1b), device=torch.device("cuda", 0), dtype=torch.bfloat16, seq_length=2048,
        micro_batch_size=4, options=sglang_args,
    )  # fmt: skip
    tokens, held, allocated, states = torch.arange(3000), [], [], []
    torch.zeros(1, device="cuda")
    for _ in range(2):
        before = torch.cuda.mem_get_info()[0]
        runner = SGLangRunner.build(request)
        runner.set_aux_layers([1, 7, 12])
        states.append(runner.forward(tokens, [1000, 2000]).aux.cpu())
        assert runner.free_slots() == runner.capacity.tokens
        assert torch.equal(runner.forward(tokens, [1000, 2000]).aux.cpu(), states[-1]), "repeat runs must be identical"
        runner.close()
        held.append((before - torch.cuda.mem_get_info()[0]) / 2**20)
        allocated.append(torch.cuda.memory_allocated() / 2**20)
    report("close", {"held_after_close_mib": held, "allocated_after_close_mib": allocated})
    assert torch.equal(*states)
    # The first close leaves what belongs to the process: cuBLAS workspaces, rotary caches, CUDA modules.
    assert allocated[0] < 64
    assert allocated[1] <= allocated[0]
    assert held[1] < 64


def test_self_check_is_quick(llama_1b, sglang_args, report):
    import time

    request = BackendRequest(
        target=str(llama_1b), device=torch.device("cuda", 0), dtype=torch.bfloat16, options=sglang_args
    )
    runner = SGLangRunner.build(request)
    start = time.perf_counter()
    plan = runner.plan_aux_layers([1, 7, 12])
    seconds = time.perf_counter() - start
    runner.close()
    report("self_check", {"seconds": seconds})
    assert plan.trained == plan.written == [1, 7, 12]
    assert seconds < 2


def test_quick_start_recipe_trains(smollm2, out, sglang_args):
    rows = ROOT / "examples/data/smollm2_chat.jsonl"
    command = [
        sys.executable, "-m", "nemo_eagle3_sglang.cli", "train", "recipes/smollm2_eagle3_sglang.yaml",
        f"--recipe_args.target_model_name_or_path={smollm2}", f"--recipe_args.train_data_path={rows}",
        f"--recipe_args.output_dir={out / 'draft'}",
        "--recipe_args.num_epochs=8", "--recipe_args.micro_batch_size=8", "--recipe_args.log_every_steps=20",
        *[f"--recipe_args.sglang_args.{k}={v}" for k, v in sglang_args.items()],
    ]  # fmt: skip
    subprocess.run(command, cwd=ROOT, check=True)
    records = [json.loads(line) for line in (out / "draft/metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    (out / "train_smollm2.jsonl").write_text((out / "draft/metrics.jsonl").read_text(encoding="utf-8"))
    losses = [r["train/loss"] for r in records if "train/loss" in r]
    assert len(losses) > 10
    assert losses[-1] < losses[0] - 2
