#!/usr/bin/env python3
"""Several GPUs: data-parallel scaling, and a target shared by ranks beside a whole one, on one host in one run.

Random weights of real dimensions, in a checkpoint that is written first, so that a sharded target holds the same ones.
Layouts are measured one after another, the single GPU before and behind the others: a drift of the machine shows.

Examples:
  python scripts/bench_ranks.py --ranks 2 --json ranks.json
  python scripts/bench_ranks.py --ranks 2 --target-dims tiny --device cpu --tokens 2000       (keeps it alive)
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from bench_train_step import DIMS, GIB, OUR_SHAPE, TINY_LENGTH, TTT_STEPS, batches, chats
from torch.nn.parallel import DistributedDataParallel

SAME_COSINE = 0.999


def main() -> int:
    """Run the parent, or one rank of a layout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--target-dims", choices=DIMS, default="llama-8b")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tokens", type=int, default=65_536, help="real tokens of a rank's round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sglang-arg", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--timeout", type=float, default=400, help="seconds for one layout")
    parser.add_argument("--json", type=Path, metavar="OUT")
    parser.add_argument("--child", nargs=2, metavar=("TARGET", "TP"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        return rank(arguments)
    if arguments.device == "cuda" and torch.cuda.device_count() < arguments.ranks:
        print(f"{torch.cuda.device_count()} GPUs are visible, --ranks {arguments.ranks}", file=sys.stderr)
        return 2
    return parent(arguments)


def parent(arguments: argparse.Namespace) -> int:
    """Write the target, measure the layouts, print the table."""
    n = arguments.ranks
    with tempfile.TemporaryDirectory() as folder:
        save_target(arguments, folder)
        layouts = [("one", 1, 1), (f"dp {n}", n, 1), (f"tp {n}", n, n), ("one again", 1, 1)]
        rows = [measure(arguments, folder, *layout) for layout in layouts]
        states = [torch.load(Path(folder) / f"states_tp{tp}.pt", weights_only=True) for tp in (1, n)]
    cosines = {
        k: float(torch.cosine_similarity(a.float(), states[1][k].float(), dim=-1).mean()) for k, a in states[0].items()
    }
    one = statistics.mean(r["tokens_per_s"] for r in rows if r["name"].startswith("one"))
    for row in rows:
        row["scaling"] = row["tokens_per_s"] / one
        print(
            f"{row['name']:<10}{row['tokens_per_s']:>12,.0f} tokens/s {row['scaling']:6.2f} {row['used_gib']:8.1f} GiB"
        )
    print("supervision of the shared target beside the whole one, mean cosine:", cosines)
    if arguments.json:
        device = torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu"
        arguments.json.write_text(json.dumps({"device": device, "rows": rows, "cosine": cosines}, indent=1) + "\n")
    return 0 if min(cosines.values()) >= SAME_COSINE else 1


def save_target(arguments: argparse.Namespace, folder: str) -> None:
    """Write a random checkpoint in the dtype of the run."""
    dtype = torch.bfloat16 if arguments.device == "cuda" else torch.float32
    config = transformers.LlamaConfig(
        **DIMS[arguments.target_dims],
        architectures=["LlamaForCausalLM"],
        rope_theta=500_000.0,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        dtype=dtype,
    )
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    with torch.device(arguments.device):
        model = transformers.LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder)


def measure(arguments: argparse.Namespace, folder: str, name: str, world: int, tp: int) -> dict[str, Any]:
    """Run one layout in processes of its own and return rank 0's answer."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    own = [f"--{k}={getattr(arguments, k.replace('-', '_'))}" for k in ("target-dims", "device", "tokens", "rounds")]
    own += [f"--sglang-arg={pair}" for pair in arguments.sglang_arg]
    children = []
    for i in range(world):
        env = {"RANK": str(i), "WORLD_SIZE": str(world), "LOCAL_RANK": str(i), "LOCAL_WORLD_SIZE": str(world)}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        command = [sys.executable, __file__, *own, "--child", folder, str(tp)]
        children.append(subprocess.Popen(command, env={**os.environ, **env}, stdout=subprocess.PIPE, text=True))
    try:
        answers = [child.communicate(timeout=arguments.timeout)[0] for child in children]
    finally:
        for child in children:
            child.kill()
    if any(child.returncode for child in children):
        raise SystemExit(f"{name}: exit codes {[child.returncode for child in children]}")
    return {"name": name, **json.loads(answers[0].strip().splitlines()[-1])}


def rank(arguments: argparse.Namespace) -> int:
    """Train on synthetic chats as the recipe does, the target in a process of its own."""
    from nemo_automodel.components.speculative.eagle.core import Eagle3TrainerModule
    from nemo_automodel.components.speculative.eagle.draft_llama import LlamaEagle3DraftModel

    from nemo_eagle3_sglang.contracts import BackendRequest
    from nemo_eagle3_sglang.sidecar.client import SidecarSource, target_group
    from nemo_eagle3_sglang.supervision.backend import RunnerBackend
    from nemo_eagle3_sglang.training.trainer import FlatTrainer

    class Flat(FlatTrainer, Eagle3TrainerModule):
        """As the recipe mixes it."""

    folder, tp = arguments.child[0], int(arguments.child[1])
    cuda, local = arguments.device == "cuda", int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    number, world = dist.get_rank(), dist.get_world_size()
    dtype = torch.bfloat16 if cuda else torch.float32
    packed, rows = (TINY_LENGTH, 2) if arguments.target_dims == "tiny" else OUR_SHAPE
    group, store = target_group(tp, device, 300)
    options: dict[str, Any] = dict(pair.split("=", 1) for pair in arguments.sglang_arg)
    options["tp_size"] = tp
    request = BackendRequest(
        folder,
        device,
        dtype,
        seq_length=packed,
        micro_batch_size=rows * tp,
        kv_pool="auto",
        options=options,
        tp_rank=group.rank,
    )
    source = SidecarSource("sglang", request, group, store=store)
    vocab, layers = source.info.vocab_size, source.info.num_hidden_layers
    target = RunnerBackend(source, [1, layers // 2 - 1, layers - 4])
    size = min(32_000, vocab // 2)
    ids, mask = torch.arange(size), torch.ones(vocab, dtype=torch.bool)
    target.set_vocab_mapping(ids, mask)

    config = transformers.AutoConfig.from_pretrained(folder)
    config.draft_vocab_size, config.target_hidden_size = size, config.hidden_size
    config.torch_dtype, config.attn_implementation = dtype, "eager"
    torch.manual_seed(0)
    draft = LlamaEagle3DraftModel(config).to(device=device, dtype=dtype)
    draft.copy_embeddings_from_target(target.get_input_embeddings())
    draft.freeze_embeddings()
    trainer: Any = Flat(draft, selected_token_ids=ids, selected_token_mask=mask, ttt_steps=TTT_STEPS).to(device)
    if world > 1:
        trainer = DistributedDataParallel(trainer, device_ids=[local] if cuda else None)
    optimizer = torch.optim.AdamW([p for p in trainer.parameters() if p.requires_grad], lr=1e-4, fused=cuda)

    longest, count = (TINY_LENGTH, 32) if arguments.target_dims == "tiny" else (2048, 512)
    made = chats("chat", vocab, count * world, longest)
    data = batches(made[number::world], packed, rows, cuda)
    # The same micro-batch of every rank, so that a shared target is asked what a whole one is.
    first = target.flat_batch(batches(made[:count], packed, rows, cuda)[0], TTT_STEPS)
    if number == 0:
        states = {"aux": first.aux, "draft logits": first.draft_logits}
        torch.save({k: v.cpu() for k, v in states.items()}, Path(folder) / f"states_tp{tp}.pt")
    position = 0

    def step() -> int:
        nonlocal position
        batch = data[position % len(data)]
        position += 1
        trainer(target.flat_batch(batch, TTT_STEPS)).loss.backward()
        torch.nn.utils.clip_grad_norm_(trainer.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return int(batch["attention_mask"].sum())

    speeds = []
    for round_number in range(arguments.rounds + 1):
        # As many steps on every rank; the first round warms up.
        steps = 2 if round_number == 0 else max(1, arguments.tokens // (packed * rows))
        dist.barrier()
        begin = time.perf_counter()
        seen = torch.tensor([float(sum(step() for _ in range(steps)))], device=device)
        dist.all_reduce(seen)
        if cuda:
            torch.cuda.synchronize()
        if round_number:
            speeds.append(seen.item() / (time.perf_counter() - begin))
    free, total = torch.cuda.mem_get_info(device) if cuda else (0, 0)
    source.close()
    if number == 0:
        print(
            json.dumps(
                {"tokens_per_s": statistics.median(speeds), "used_gib": (total - free) / GIB, "ranks": world, "tp": tp}
            )
        )
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
