#!/usr/bin/env python3
"""What a target server costs: its states over HTTP beside the same target in this process, on one host in one run.

Random weights of real dimensions, in a checkpoint that is written first, so that both hold the same ones. The client
only fetches, nothing is trained: its rate is the bound that the server sets to a trainer.

Examples:
  python scripts/bench_remote.py --json remote.json
  python scripts/bench_remote.py --target-dims tiny --device cpu --tokens 2000       (keeps it alive)
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from bench_ranks import save_target
from bench_train_step import DIMS, TINY_LENGTH, chats

MICRO_BATCH = 8192
START_SECONDS = 300


def main() -> int:
    """Run the parent, or one measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target-dims", choices=DIMS, default="llama-8b")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tokens", type=int, default=131_072, help="of a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sglang-arg", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--json", type=Path, metavar="OUT")
    parser.add_argument("--child", nargs=3, metavar=("TARGET", "URL", "ROWS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    return child(arguments) if arguments.child else parent(arguments)


def parent(arguments: argparse.Namespace) -> int:
    """Write the target, measure, print."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        save_target(arguments, folder)
        rows.append(measure(arguments, "inline", folder, "-", "native"))
        with (Path(folder) / "server.log").open("w+") as log:
            flags = [f"--{k.replace('_', '-')}={v}" for k, v in (pair.split("=", 1) for pair in arguments.sglang_arg)]
            dtype = "bfloat16" if arguments.device == "cuda" else "float32"
            command = [
                sys.executable,
                "-m",
                "nemo_eagle3_sglang.cli",
                "serve-target",
                "--target",
                folder,
                "--port",
                "0",
            ]
            server = subprocess.Popen([*command, "--dtype", dtype, *flags], stdout=log, stderr=log)
            try:
                url = address(server, Path(log.name))
                rows += [measure(arguments, f"server, {kind} rows", folder, url, kind) for kind in ("native", "fp8")]
                server.terminate()
                server.wait(60)
            finally:
                server.kill()
        rows.append(measure(arguments, "inline again", folder, "-", "native"))
        found = {row["name"]: torch.load(Path(folder) / row["states"], weights_only=True) for row in rows}
    for row in rows:
        row.pop("states")
        row["distance"] = distance(found["inline"], found[row["name"]])
        print(
            f"{row['name']:<22}{row['tokens_per_s']:>10,.0f} tokens/s{row['bytes_per_token']:>10,.0f} B/token"
            f"   {row['distance']}"
        )
    if arguments.json:
        packages = ("sglang", "torch", "transformers", "nemo-eagle3-sglang")
        versions = {name: importlib.metadata.version(name) for name in packages}
        device = torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu"
        report = {
            "device": device,
            "versions": versions,
            "command": sys.argv,
            "date": time.strftime("%F"),
            "rows": rows,
        }
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def address(server: subprocess.Popen[bytes], log: Path) -> str:
    """Wait until the server is ready."""
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and server.poll() is None:
        if ready := re.search(r"remote_urls: \[(\S+)\]", log.read_text()):
            return ready[1]
        time.sleep(0.2)
    raise SystemExit(f"the server did not start:\n{log.read_text()[-4000:]}")


def measure(arguments: argparse.Namespace, name: str, folder: str, url: str, kind: str) -> dict[str, Any]:
    """Measure in a process of its own."""
    own = [f"--{k}={getattr(arguments, k.replace('-', '_'))}" for k in ("target-dims", "device", "tokens", "rounds")]
    own += [f"--sglang-arg={pair}" for pair in arguments.sglang_arg]
    command = [sys.executable, __file__, *own, "--child", folder, url, kind]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=400, check=True)
    return {"name": name, **json.loads(done.stdout.strip().splitlines()[-1])}


def distance(wanted: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return mean cosines of the states, and how many choices are the same."""
    cosines = {
        name: float(torch.cosine_similarity(wanted[name].double(), found[name].double(), dim=-1).mean())
        for name in ("aux", "last")
    }
    return {**cosines, "same choice": float((wanted["choices"] == found["choices"]).double().mean())}


def child(arguments: argparse.Namespace) -> int:
    """Fetch the states of synthetic chats and print how fast."""
    from nemo_eagle3_sglang.contracts import BackendRequest
    from nemo_eagle3_sglang.engine import build_runner
    from nemo_eagle3_sglang.remote.card import read_config
    from nemo_eagle3_sglang.remote.client import Remote, RemoteProvider
    from nemo_eagle3_sglang.supervision.source import RunnerSource

    folder, url, kind = arguments.child
    cuda = arguments.device == "cuda"
    device, dtype = torch.device("cuda", 0) if cuda else torch.device("cpu"), torch.bfloat16 if cuda else torch.float32
    tiny = arguments.target_dims == "tiny"
    asked = micro_batches(DIMS[arguments.target_dims]["vocab_size"], TINY_LENGTH if tiny else 2048, arguments.tokens)
    layers = DIMS[arguments.target_dims]["num_hidden_layers"]
    if url == "-":
        options = dict(pair.split("=", 1) for pair in arguments.sglang_arg)
        request = BackendRequest(folder, device, dtype, seq_length=MICRO_BATCH, kv_pool="auto", options=options)
        source = RunnerSource(build_runner(request))
        source.set_aux_layers([1, layers // 2 - 1, layers - 4])

        def run(batches: list[Any]) -> Iterator[Any]:
            for batch in batches:
                yield source.states(batch)
    else:
        provider = RemoteProvider(Remote((url,), rows=kind, ahead=3), read_config(folder), device)

        def run(batches: list[Any]) -> Iterator[Any]:
            waiting: deque[None] = deque()
            for batch in batches:
                provider.submit(batch)
                waiting.append(None)
                if len(waiting) > 2:
                    waiting.popleft()
                    yield provider.collect()
            for _ in waiting:
                yield provider.collect()

    states = next(iter(run(asked[:1])))
    name = f"states_{time.time_ns()}.pt"
    torch.save({k: v.cpu() for k, v in vars(states).items()}, Path(folder) / name)
    hidden, positions = states.last.shape[-1], len(states.last) / len(states.aux)
    item = {"native": states.aux.element_size(), "fp8": 1}[kind]
    scales = {"native": 0, "fp8": 3 * 4 + 4 * positions}[kind]
    size = item * hidden * (3 + positions) + 4 * positions + scales
    speeds = []
    for number in range(arguments.rounds + 1):
        begin, tokens = time.perf_counter(), 0
        for found in run(asked):
            tokens += len(found.aux)
        if cuda:
            torch.cuda.synchronize()
        if number:
            speeds.append(tokens / (time.perf_counter() - begin))
    print(json.dumps({"tokens_per_s": statistics.median(speeds), "bytes_per_token": size, "states": name}))
    return 0


def micro_batches(vocab: int, longest: int, tokens: int) -> list[Any]:
    """Return chat-shaped sequences in micro-batches of at most ``MICRO_BATCH`` tokens, three quarters supervised."""
    import numpy as np

    from nemo_eagle3_sglang.contracts import Sequences

    found, rows, total = [], [], 0
    for chat in chats("chat", vocab, max(64, tokens // 300), longest):
        if sum(len(row["input_ids"]) for row in rows) + len(chat["input_ids"]) > MICRO_BATCH:
            flat = np.concatenate([row["input_ids"] for row in rows])
            mask = np.concatenate([row["loss_mask"] for row in rows])
            found.append(Sequences(flat, [len(row["input_ids"]) for row in rows], np.flatnonzero(mask)))
            total, rows = total + len(flat), []
        if total >= tokens and found:
            break
        rows.append(chat)
    return found


if __name__ == "__main__":
    sys.exit(main())
