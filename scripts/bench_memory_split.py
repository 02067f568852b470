#!/usr/bin/env python3
"""How ``mem_fraction_static`` splits a GPU between SGLang and the draft.

Builds the co-located target once per fraction in the same process (each closed before the next), runs one micro-batch
and prints what SGLang holds, how many tokens its KV pool takes and what is left. Random weights: only a config.json of
the wanted dimensions is needed.

Examples:
  python scripts/bench_memory_split.py
  python scripts/bench_memory_split.py --fractions 0.3 0.5 0.7 --json split.json --sglang-arg attention_backend=triton
  python scripts/bench_memory_split.py --dims tiny --device cpu       (keeps the script alive where there is no GPU)
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers

from nemo_eagle3_sglang.contracts import BackendRequest
from nemo_eagle3_sglang.engine.runner import SGLangRunner

GIB = 2**30
DIMS: dict[str, dict[str, Any]] = {
    "llama-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "max_position_embeddings": 4096,
    },
}


def main() -> int:
    """Print one row per fraction."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dims", choices=DIMS, default="llama-8b")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--fractions", type=float, nargs="+", default=[0.3, 0.5, 0.7])
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of the micro-batch (default: %(default)s)")
    parser.add_argument("--sglang-arg", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--json", type=Path, metavar="OUT")
    arguments = parser.parse_args()
    options = dict(pair.split("=", 1) for pair in arguments.sglang_arg)
    with tempfile.TemporaryDirectory() as folder:
        config = transformers.LlamaConfig(**DIMS[arguments.dims], architectures=["LlamaForCausalLM"], dtype="bfloat16")
        config.save_pretrained(folder)
        rows = [measure(folder, arguments, {**options, "mem_fraction_static": f}) for f in arguments.fractions]
    report = {"device": device_name(arguments.device), "versions": versions(), "dims": arguments.dims, "rows": rows}
    print(f"{report['device']}, {report['versions']}, {arguments.dims}, {arguments.tokens} tokens a micro-batch")
    print(
        "mem_fraction_static  weights GiB  KV tokens  SGLang GiB  peak GiB in a forward  left for draft GiB  build s  "
        "check s  us/token"
    )
    for row in rows:
        print(
            f"{row['mem_fraction_static']:19.2f}  {row['weights_gib']:11.2f}  {row['kv_tokens']:9d}  "
            f"{row['sglang_gib']:10.2f}  {row['peak_gib']:21.2f}  {row['left_gib']:18.2f}  {row['build_s']:7.1f}  "
            f"{row['self_check_s']:7.2f}  {row['us_per_token']:8.1f}"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


def measure(folder: str, arguments: argparse.Namespace, options: dict[str, Any]) -> dict[str, Any]:
    """Build a target with ``options``, run one micro-batch, close it."""
    cuda = arguments.device == "cuda"
    request = BackendRequest(
        target=folder,
        device=torch.device("cuda", 0) if cuda else torch.device("cpu"),
        dtype=torch.bfloat16 if cuda else torch.float32,
        seq_length=2048,
        micro_batch_size=max(1, arguments.tokens // 2048),
        options={"load_format": "dummy", **options},
    )
    before, start = used(cuda), time.perf_counter()
    runner = SGLangRunner.build(request)
    build = time.perf_counter() - start
    weights = sum(p.numel() * p.element_size() for p in runner._runner().model.parameters())
    held = used(cuda) - before
    checked = time_self_check(runner, cuda)
    runner.set_aux_layers([1, 3, 4])
    forward = peak_forward(runner, arguments.tokens, cuda)
    row = {
        "mem_fraction_static": options["mem_fraction_static"],
        "weights_gib": weights / GIB,
        "kv_tokens": runner.capacity.tokens,
        "sglang_gib": held / GIB,
        "peak_gib": torch.cuda.max_memory_allocated() / GIB if cuda else 0.0,
        "left_gib": torch.cuda.mem_get_info()[0] / GIB if cuda else 0.0,
        "build_s": build,
        "self_check_s": checked,
        "us_per_token": forward / arguments.tokens * 1e6,
    }
    runner.close()
    row["held_after_close_gib"] = (used(cuda) - before) / GIB
    return row


def time_self_check(runner: SGLangRunner, cuda: bool) -> float:
    """Return the seconds of what every start does: calibrate, and compare with SGLang's own capture."""
    used(cuda)
    start = time.perf_counter()
    runner._calibrate()
    runner.plan_aux_layers([1, 3, 4])
    used(cuda)
    return time.perf_counter() - start


def peak_forward(runner: SGLangRunner, tokens: int, cuda: bool) -> float:
    """Run forwards over rows of at most 2048 tokens, the peak counter reset before, and return their median seconds."""
    lengths = [2048] * (tokens // 2048) + ([tokens % 2048] if tokens % 2048 else [])
    ids = torch.arange(tokens) % runner.info.vocab_size
    runner.forward(ids, lengths)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(5):
        used(cuda)
        start = time.perf_counter()
        runner.forward(ids, lengths)
        used(cuda)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def used(cuda: bool) -> int:
    """Return the bytes in use on the device."""
    if not cuda:
        return 0
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free


def device_name(device: str) -> str:
    """Return what the numbers were measured on."""
    return torch.cuda.get_device_name() if device == "cuda" else "cpu"


def versions() -> str:
    """Return the versions that matter, in one string."""
    return ", ".join(f"{name} {version(name)}" for name in ("sglang", "torch", "transformers"))


if __name__ == "__main__":
    sys.exit(main())
