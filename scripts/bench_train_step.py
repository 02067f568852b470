#!/usr/bin/env python3
"""Training-step speed and memory: this package beside AutoModel's own EAGLE-3 trainer, on one device in one run.

Random weights of real dimensions and the same chats for all. Each configuration lives in a process of its own (SGLang
allows one target a process); the processes take turns, a few steps each, so that a drift of the machine falls on all.
The draft vocabulary's mask is set to "all inside": random targets choose their tokens evenly over V, and only a quarter
of the supervised positions would carry loss.

Examples:
  python scripts/bench_train_step.py --json step.json
  python scripts/bench_train_step.py --configs ours-bf16 ours-fp8 --lengths full --profile profiles
  python scripts/bench_train_step.py --growth --json growth.json && \
      python scripts/bench_train_step.py --plot-from growth.json --plot growth.png
  python scripts/bench_train_step.py --target-dims kimi-head
  python scripts/bench_train_step.py --target-dims tiny --device cpu --tokens-per-round 600     (keeps it alive)

Configurations:
  automodel-default   AutoModel's colocated backend and trainer, micro-batch 1, rows padded to 2,048
  automodel-packed    the same, rows of 2,048 packed, micro-batch 4
  ours-bf16           SGLang target, rows of 4,096 packed, micro-batch 2, this package's trainer
  ours-fp8            the same, the target's weights quantised to fp8 by SGLang
  ours-automodel      SGLang target as ours-bf16, AutoModel's trainer (trainer: automodel)
  ours-sidecar        as ours-bf16, the target in a process of its own; memory is the trainer's alone
  ours-sidecar-ahead  the same, the target one micro-batch ahead (target_prefetch_depth: 1)
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import random
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

GIB = 2**30
DIMS: dict[str, dict[str, Any]] = {
    "llama-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
    },
    "llama-1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 128256,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 512,
    },
}
# Vocabulary, hidden size and tokens of the supervision alone: a 1T model does not fit here, its head does.
KIMI_HEAD = {"vocab": 163_840, "hidden": 7168, "tokens": 2048, "draft_vocab": 32_000}
CONFIGS = (
    "automodel-default",
    "automodel-packed",
    "ours-bf16",
    "ours-fp8",
    "ours-automodel",
    "ours-sidecar",
    "ours-sidecar-ahead",
)
DEFAULT_CONFIGS = CONFIGS[:4]
# (packed_sequence_size or 0, micro_batch_size)
SHAPES = {"automodel-default": (0, 1), "automodel-packed": (2048, 4)}
OUR_SHAPE = (4096, 2)
SEQ_LENGTH = 2048
# Longest chat and row with --target-dims tiny.
TINY_LENGTH = 256
TTT_STEPS = 4
GROWTH_LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)
GROWTH_TOKENS = (2048, 4096, 8192, 16384, 32768)
# Between two kernels that are both queued the device itself takes one to three microseconds; it waits for the host
# only where a gap is longer.
LAUNCH_GAP_US = 5
MARK = "@@"


def main() -> int:
    """Run the parent, or one configuration's process."""
    arguments = parse()
    if arguments.child:
        return Child(arguments).serve()
    if arguments.plot_from:
        return plot(arguments.plot_from, arguments.plot)
    if arguments.target_dims == "kimi-head":
        return kimi_head(arguments)
    return run(arguments)


def parse() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target-dims", choices=(*DIMS, "kimi-head"), default="llama-8b")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--configs", nargs="+", choices=CONFIGS, default=DEFAULT_CONFIGS)
    parser.add_argument("--lengths", choices=("chat", "full"), default="chat", help="chat: lognormal, mean about 580")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens-per-round", type=int, default=65_536, help="work of a configuration's turn")
    parser.add_argument("--draft-vocab", type=int, default=32_000)
    parser.add_argument(
        "--growth", action="store_true", help="sequence length 1k-32k and micro-batch 2k-32k, ours-bf16"
    )
    parser.add_argument("--no-fused", action="store_true", help="without torch.compile of the elementwise parts")
    parser.add_argument("--profile", type=Path, metavar="DIR", help="write the largest kernels and waits as text")
    parser.add_argument("--sglang-arg", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--timeout", type=float, default=240, help="seconds for one answer of a configuration")
    parser.add_argument("--json", type=Path, metavar="OUT")
    parser.add_argument("--plot-from", type=Path, metavar="JSON")
    parser.add_argument("--plot", type=Path, metavar="PNG", default=Path("growth.png"))
    parser.add_argument("--child", choices=CONFIGS, help=argparse.SUPPRESS)
    return parser.parse_args()


# ---------------------------------------------------------------------------------------------------------------------
# The work


def chats(lengths: str, vocab: int, count: int, longest: int = SEQ_LENGTH) -> list[dict[str, list[int]]]:
    """Return token chats, the last three quarters supervised; the same at every call."""
    rng = random.Random(0)
    rows = []
    for _ in range(count):
        total = longest if lengths == "full" else min(2000, longest, max(60, int(rng.lognormvariate(6.2, 0.7))))
        rows.append(chat(rng, total, vocab))
    return rows


def chat(rng: random.Random, total: int, vocab: int) -> dict[str, list[int]]:
    """Return one chat of ``total`` random tokens, the last three quarters supervised."""
    prompt = max(20, total // 4)
    return {
        "input_ids": [rng.randrange(vocab) for _ in range(total)],
        "loss_mask": [0] * prompt + [1] * (total - prompt),
    }


def batches(
    rows: list[dict[str, list[int]]], packed: int, micro_batch: int, pin: bool
) -> list[dict[str, torch.Tensor]]:
    """Pad or pack as AutoModel's data loader does, on the host."""
    from nemo_automodel.components.datasets.llm.eagle3 import _pack_collate, _stack_batch, build_packed_eagle3_dataset

    if packed:
        samples, collate = build_packed_eagle3_dataset(rows, packed_sequence_size=packed, pad_token_id=0), _pack_collate
    else:
        samples = [
            {
                "input_ids": row["input_ids"] + [0] * (SEQ_LENGTH - len(row["input_ids"])),
                "loss_mask": row["loss_mask"] + [0] * (SEQ_LENGTH - len(row["input_ids"])),
                "attention_mask": [1] * len(row["input_ids"]) + [0] * (SEQ_LENGTH - len(row["input_ids"])),
            }
            for row in rows
        ]
        collate = _stack_batch
    # Whole micro-batches only, so that every step does the same amount of work.
    groups = [samples[i : i + micro_batch] for i in range(0, len(samples) - micro_batch + 1, micro_batch)]
    made = [collate(group) for group in groups]
    return [{k: v.pin_memory() for k, v in batch.items()} if pin else batch for batch in made]


# ---------------------------------------------------------------------------------------------------------------------
# One configuration, in its own process


class Child:
    """Builds a configuration and measures on request; one JSON line a request, one an answer."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments, self.name = arguments, arguments.child
        self.cuda = arguments.device == "cuda"
        self.device = torch.device("cuda", 0) if self.cuda else torch.device("cpu")
        self.dtype = torch.bfloat16 if self.cuda else torch.float32
        self.ours = self.name.startswith("ours")
        self.data: list[dict[str, torch.Tensor]] = []
        self.next = 0
        self.parts: dict[str, list[tuple[Any, Any]]] | None = None
        self.losses: list[torch.Tensor] = []

    def serve(self) -> int:
        """Build, then answer requests until the parent closes the pipe."""
        try:
            with tempfile.TemporaryDirectory() as folder:
                self.build(folder)
                self.answer({"ready": True, **self.memory})
                for line in sys.stdin:
                    request = json.loads(line)
                    try:
                        self.answer(getattr(self, request.pop("do"))(**request))
                    except torch.OutOfMemoryError as error:
                        torch.cuda.empty_cache()
                        self.answer({"error": f"out of memory: {str(error).splitlines()[0][:120]}"})
        except Exception as error:
            self.answer({"error": f"{type(error).__name__}: {error}"})
            raise
        return 0

    def answer(self, data: dict[str, Any]) -> None:
        """Send one answer."""
        print(MARK + json.dumps(data), flush=True)

    # Building

    def build(self, folder: str) -> None:
        """Build target, draft and data, and take the first steps."""
        import transformers

        arguments = self.arguments
        self.config = transformers.LlamaConfig(
            **DIMS[arguments.target_dims],
            architectures=["LlamaForCausalLM"],
            rope_theta=500_000.0,
            max_position_embeddings=40_960,
            rms_norm_eps=1e-5,
            tie_word_embeddings=False,
            pad_token_id=0,
            dtype=self.dtype,
        )
        self.config.save_pretrained(folder)
        vocab = self.config.vocab_size
        self.draft_vocab = min(arguments.draft_vocab, vocab // 2)
        ids, mask = torch.arange(self.draft_vocab), torch.ones(vocab, dtype=torch.bool)
        self.packed, self.micro_batch = SHAPES.get(self.name, OUR_SHAPE)
        if arguments.target_dims == "tiny":
            self.packed, self.micro_batch = self.packed and TINY_LENGTH, 2
        target_bytes = self.held()
        self.target = self.build_sglang(folder) if self.ours else self.build_hf()
        self.target.set_vocab_mapping(ids, mask)
        target_bytes = self.held() - target_bytes
        self.build_draft(ids, mask)
        longest, count = (TINY_LENGTH, 32) if arguments.target_dims == "tiny" else (SEQ_LENGTH, 512)
        self.load(chats(arguments.lengths, vocab, count, longest))
        self.run_steps(2)
        self.sync()
        self.settled = self.held()
        # Torch's allocator does not see what SGLang's pool takes apart from the weights.
        self.memory = {
            "static_gib": self.settled / GIB,
            "target_gib": target_bytes / GIB,
            "kv_pool_gib": self.pool / GIB,
        }

    def build_sglang(self, folder: str) -> Any:
        """Return the co-located SGLang target, its KV pool sized to a micro-batch."""
        from nemo_eagle3_sglang.contracts import BackendRequest
        from nemo_eagle3_sglang.engine.runner import SGLangRunner
        from nemo_eagle3_sglang.supervision.backend import RunnerBackend

        options = dict(pair.split("=", 1) for pair in self.arguments.sglang_arg)
        if self.name == "ours-fp8":
            options["quantization"] = "fp8"
        request = BackendRequest(
            target=folder,
            device=self.device,
            dtype=self.dtype,
            seq_length=GROWTH_TOKENS[-1] if self.arguments.growth else self.packed,
            micro_batch_size=1 if self.arguments.growth else self.micro_batch,
            kv_pool="auto",
            options={"load_format": "dummy", **options},
        )
        ids = [1, self.config.num_hidden_layers // 2 - 1, self.config.num_hidden_layers - 4]
        if self.name.startswith("ours-sidecar"):
            from nemo_eagle3_sglang.sidecar.client import SidecarSource

            self.pool = 0
            return RunnerBackend(SidecarSource("sglang", request), ids)
        runner = SGLangRunner.build(request)
        cache = runner._runner().token_to_kv_pool
        sizes = cache.get_kv_size_bytes()
        self.pool = sum(sizes) if isinstance(sizes, tuple) else sizes
        return RunnerBackend(runner, ids)

    def build_hf(self) -> Any:
        """Return AutoModel's colocated target."""
        from nemo_automodel.components.speculative.eagle.target import HFEagle3TargetModel
        from transformers import LlamaForCausalLM

        self.pool = 0
        torch.set_default_dtype(self.dtype)
        with self.device:
            model = LlamaForCausalLM._from_config(self.config, attn_implementation="sdpa").eval().requires_grad_(False)
        torch.set_default_dtype(torch.float32)
        return HFEagle3TargetModel(model)

    def build_draft(self, ids: torch.Tensor, mask: torch.Tensor) -> None:
        """Make draft, trainer and optimizer as the recipes do."""
        from nemo_automodel.components.speculative.eagle.core import Eagle3TrainerModule
        from nemo_automodel.components.speculative.eagle.draft_llama import LlamaEagle3DraftModel

        from nemo_eagle3_sglang.training import pointwise
        from nemo_eagle3_sglang.training.trainer import FlatTrainer

        if self.arguments.no_fused:
            pointwise.fused = lambda function: function

        class Flat(FlatTrainer, Eagle3TrainerModule):
            """As the recipe mixes it."""

        torch.manual_seed(0)
        config = type(self.config).from_dict(self.config.to_dict())
        config.draft_vocab_size, config.target_hidden_size = self.draft_vocab, config.hidden_size
        config.torch_dtype, config.attn_implementation = self.dtype, "eager"
        draft = LlamaEagle3DraftModel(config).to(device=self.device, dtype=self.dtype)
        draft.copy_embeddings_from_target(self.target.get_input_embeddings())
        draft.freeze_embeddings()
        self.flat = self.ours and self.name != "ours-automodel"
        kind = Flat if self.flat else Eagle3TrainerModule
        self.trainer = kind(draft, selected_token_ids=ids, selected_token_mask=mask, ttt_steps=TTT_STEPS).to(
            self.device
        )
        parameters = [p for p in self.trainer.parameters() if p.requires_grad]
        # As the recipes build it: AutoModel's by torch's default, ours fused.
        fused = {"fused": True} if self.flat and self.cuda else {}
        self.optimizer = torch.optim.AdamW(parameters, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.0, **fused)

    def load(self, rows: list[dict[str, list[int]]]) -> None:
        """Take other chats."""
        self.ahead: Any = None
        self.data, self.next = batches(rows, self.packed, self.micro_batch, self.cuda), 0

    # Running

    def forward(self) -> tuple[Any, int]:
        """Run target and draft on the next micro-batch; return metrics and real tokens."""
        batch = self.data[self.next % len(self.data)]
        self.next += 1
        tokens = int(batch["attention_mask"].sum())
        if self.name == "ours-sidecar-ahead":
            plan, self.ahead = self.ahead or self.target.submit(batch, TTT_STEPS), None
            self.ahead = self.target.submit(self.data[self.next % len(self.data)], TTT_STEPS)
            with self.part("target"):
                inputs = {"batch": self.target.collect(plan)}
        elif self.flat:
            with self.part("target"):
                inputs = {"batch": self.target.flat_batch(batch, TTT_STEPS)}
        else:
            on_device = batch if self.ours else {k: v.to(self.device, non_blocking=True) for k, v in batch.items()}
            with self.part("target"):
                inputs = self.target.generate_batch(**on_device).to_trainer_inputs()
        with self.part("draft forward"):
            return self.trainer(**inputs), tokens

    def run_steps(self, count: int = 0, tokens: int = 0) -> tuple[int, int]:
        """Train ``count`` steps or ``tokens`` tokens; return both as they were."""
        done = seen = 0
        while done < count or seen < tokens:
            metrics, real = self.forward()
            with self.part("draft backward"):
                metrics.loss.backward()
            with self.part("optimizer"):
                torch.nn.utils.clip_grad_norm_(self.trainer.parameters(), 1.0)
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=True)
            self.losses.append(metrics.loss.detach())
            del metrics
            done, seen = done + 1, seen + real
        return done, seen

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time a part of a step, where parts are wanted."""
        if self.parts is None:
            yield
            return
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if self.cuda else [0.0, 0.0]
        for i in range(2):
            if self.cuda:
                marks[i].record()
            else:
                marks[i] = time.perf_counter()
            if i == 0:
                yield
        self.parts.setdefault(name, []).append(tuple(marks))

    # Requests

    def round(self, tokens: int) -> dict[str, Any]:
        """Train on ``tokens`` real tokens."""
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        self.losses.clear()
        self.sync()
        start = time.perf_counter()
        steps, seen = self.run_steps(tokens=tokens)
        enqueued = time.perf_counter() - start
        self.sync()
        seconds = time.perf_counter() - start
        peak = torch.cuda.max_memory_allocated() if self.cuda else 0
        return {
            "steps": steps,
            "tokens": seen,
            "seconds": seconds,
            "host_enqueue_ms": enqueued / steps * 1e3,
            "peak_gib": peak / GIB,
            "dynamic_gib": (peak - self.settled) / GIB if self.cuda else 0.0,
            "loss": float(torch.stack(self.losses).mean()),
        }

    def split(self, steps: int) -> dict[str, float]:
        """Return median milliseconds by part; the events do not make the host wait."""
        self.parts = {}
        self.run_steps(steps)
        self.sync()
        found = {
            name: statistics.median((a.elapsed_time(b) if self.cuda else (b - a) * 1e3) for a, b in pairs)
            for name, pairs in self.parts.items()
        }
        self.parts = None
        return found

    def profile(self, steps: int) -> dict[str, Any]:
        """Return the milliseconds a step in which the GPU ran something and in which it waited, and what ran."""
        from torch.profiler import ProfilerActivity, profile

        self.sync()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            self.run_steps(steps)
            self.sync()
        # Annotations and the driver's own marks stand on the device's time line too; they are no work.
        spans = sorted(
            (event.time_range.start, event.time_range.end)
            for event in profiler.events()
            if event.device_type == torch.autograd.DeviceType.CUDA
            and not event.is_user_annotation
            and not event.name.startswith(("step[", "Optimizer.step", "Command Buffer"))
        )
        busy, reached, gaps = 0.0, spans[0][0], []
        for start, end in spans:
            gaps.append(start - reached)
            busy += max(0.0, end - max(start, reached))
            reached = max(reached, end)
        averages = profiler.key_averages()
        waits = {
            e.key: e.count / steps
            for e in averages
            if e.key in ("cudaStreamSynchronize", "cudaDeviceSynchronize", "aten::item")
        }
        if self.arguments.profile:
            self.arguments.profile.mkdir(parents=True, exist_ok=True)
            path = self.arguments.profile / f"{self.name}.txt"
            path.write_text(averages.table(sort_by="self_device_time_total", row_limit=45, max_name_column_width=90))
        return {
            "busy_ms": busy / 1e3 / steps,
            "idle_ms": sum(g for g in gaps if g > 0) / 1e3 / steps,
            "host_ms": sum(g for g in gaps if g > LAUNCH_GAP_US) / 1e3 / steps,
            "kernels_per_step": len(spans) / steps,
            "waits_per_step": waits,
        }

    def shape(self, length: int, micro_batch: int, tokens: int) -> dict[str, Any]:
        """Measure rows of ``length``: one chat of that length each, or chats packed where ``length`` is 0."""
        rng = random.Random(0)
        if length:
            count = max(1, tokens // length) * 3
            rows = [chat(rng, length, self.config.vocab_size) for _ in range(count)]
            self.packed, self.micro_batch = length, micro_batch
        else:
            rows = chats("chat", self.config.vocab_size, max(64, tokens // 100))
            self.packed, self.micro_batch = min(tokens, 4096), max(1, tokens // 4096)
        self.load(rows)
        self.run_steps(2)
        return self.round(4 * tokens)

    def held(self) -> int:
        """Return the bytes that torch's allocator has given out."""
        return torch.cuda.memory_allocated() if self.cuda else 0

    def sync(self) -> None:
        """Wait for the device."""
        if self.cuda:
            torch.cuda.synchronize()


# ---------------------------------------------------------------------------------------------------------------------
# The parent


class Configuration:
    """A child process; an answer that does not come in time is an error of that configuration alone."""

    def __init__(self, name: str, arguments: argparse.Namespace) -> None:
        self.name, self.error, self.timeout = name, None, arguments.timeout
        command = [sys.executable, __file__, "--child", name, *sys.argv[1:]]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, do: str, **request: Any) -> dict[str, Any] | None:
        """Send a request and return its answer; ``None`` after an error."""
        if self.error:
            return None
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps({"do": do, **request}) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            self.error = "its process has ended"
            return None
        return self.read()

    def read(self) -> dict[str, Any] | None:
        """Wait for one answer."""
        timer = threading.Timer(self.timeout, self.process.kill)
        timer.start()
        try:
            for line in self.process.stdout or ():
                if line.startswith(MARK):
                    answer = json.loads(line.removeprefix(MARK))
                    if "error" in answer:
                        self.error = answer["error"]
                        return None
                    return answer
        finally:
            timer.cancel()
        self.error = f"no answer within {self.timeout:.0f} s, or its process died"
        return None

    def close(self) -> None:
        """End the process."""
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def run(arguments: argparse.Namespace) -> int:
    """Start the configurations, measure, end them."""
    names = ["ours-bf16"] if arguments.growth else list(arguments.configs)
    say(f"building {', '.join(names)}")
    configurations = [Configuration(name, arguments) for name in names]
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu",
        "versions": {n: version(n) for n in ("torch", "triton", "sglang", "nemo-automodel", "transformers")},
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": "python " + shlex.join(["scripts/bench_train_step.py", *sys.argv[1:]]),
        "target_dims": arguments.target_dims,
        "lengths": arguments.lengths,
        "rows": [],
    }
    try:
        memory = {c.name: c.read() for c in configurations}
        say("built: " + ", ".join(f"{c.name} {c.error or 'ok'}" for c in configurations))
        measure = measure_growth if arguments.growth else measure_steps
        measure(arguments, configurations, memory, report)
    finally:
        for configuration in configurations:
            configuration.close()
    return int(any("error" in row for row in report["rows"]) and not arguments.growth)


def measure_steps(
    arguments: argparse.Namespace,
    configurations: list[Configuration],
    memory: dict[str, Any],
    report: dict[str, Any],
) -> None:
    """Run the rounds, then the instrumented steps, and print the table."""
    rounds: dict[str, list[dict[str, Any]]] = {c.name: [] for c in configurations}
    extra: dict[str, dict[str, Any]] = {c.name: {} for c in configurations}

    def save() -> None:
        report["rows"] = [
            summarise(c.name, c.error, rounds[c.name], memory[c.name], extra[c.name]) for c in configurations
        ]
        write(arguments.json, report)

    for number in range(arguments.rounds):
        for configuration in configurations:
            if answer := configuration.ask("round", tokens=arguments.tokens_per_round):
                rounds[configuration.name].append(answer)
                say(f"round {number + 1}: {configuration.name} {answer['tokens'] / answer['seconds']:,.0f} tokens/s")
        save()
    for configuration in configurations:
        if answer := configuration.ask("split", steps=6):
            extra[configuration.name]["ms"] = answer
        if arguments.device == "cuda" and (answer := configuration.ask("profile", steps=3)):
            extra[configuration.name] |= answer
        save()
    print_table(report)


def summarise(
    name: str, error: str | None, rounds: list[dict[str, Any]], memory: dict[str, Any] | None, extra: dict[str, Any]
) -> dict[str, Any]:
    """Return one row: medians over the rounds."""
    if not rounds:
        return {"name": name, "error": error or "no round was run"}

    def median(of: Callable[[dict[str, Any]], float]) -> float:
        return statistics.median(of(r) for r in rounds)

    step = median(lambda r: r["seconds"] / r["steps"] * 1e3)
    row = {
        "name": name,
        "real_tokens_per_s": median(lambda r: r["tokens"] / r["seconds"]),
        "real_tokens_per_step": median(lambda r: r["tokens"] / r["steps"]),
        "step_ms": step,
        "peak_gib": median(lambda r: r["peak_gib"]),
        "dynamic_gib": median(lambda r: r["dynamic_gib"]),
        "host_enqueue_ms": median(lambda r: r["host_enqueue_ms"]),
        "loss": rounds[-1]["loss"],
        **(memory or {}),
        **extra,
        "all_tokens_per_s": [r["tokens"] / r["seconds"] for r in rounds],
    }
    if error:
        row["error"] = error
    return row


def measure_growth(
    arguments: argparse.Namespace,
    configurations: list[Configuration],
    memory: dict[str, Any],
    report: dict[str, Any],
) -> None:
    """Measure over chat lengths and micro-batch sizes."""
    (configuration,) = configurations
    shapes = [("length", length, max(1, 8192 // length), max(8192, length)) for length in GROWTH_LENGTHS]
    shapes += [("micro-batch", 0, 0, tokens) for tokens in GROWTH_TOKENS]
    for kind, length, micro_batch, tokens in shapes:
        answer = configuration.ask("shape", length=length, micro_batch=micro_batch, tokens=tokens)
        row = {"name": configuration.name, "kind": kind, "length": length, "tokens": tokens}
        if answer is None:
            row["error"], configuration.error = configuration.error, None
        else:
            row |= {
                "real_tokens_per_s": answer["tokens"] / answer["seconds"],
                "dynamic_gib": answer["dynamic_gib"],
                "peak_gib": answer["peak_gib"],
            }
        say(json.dumps(row))
        report["rows"].append(row)
        write(arguments.json, report)
        if configuration.process.poll() is not None:
            break


def kimi_head(arguments: argparse.Namespace) -> int:
    """Memory of the supervision alone at the shape of Kimi K2: ours beside AutoModel's."""
    from nemo_automodel.components.speculative.eagle.core import _compute_target_distribution

    from nemo_eagle3_sglang.supervision.head import draft_targets

    sizes = KIMI_HEAD if arguments.device == "cuda" else {name: max(8, n // 64) for name, n in KIMI_HEAD.items()}
    device = torch.device(arguments.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    weight = torch.randn(sizes["vocab"], sizes["hidden"], device=device).to(dtype) / 64
    hidden = torch.randn(sizes["tokens"], sizes["hidden"], device=device).to(dtype)
    ids = torch.arange(sizes["draft_vocab"], device=device)
    mask = torch.zeros(sizes["vocab"], dtype=torch.bool, device=device).index_fill_(0, ids, True)
    loss_mask = torch.ones(1, sizes["tokens"], device=device)
    rows = []

    def measure(name: str, function: Callable[[], Any]) -> None:
        function()
        before = 0
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        start = time.perf_counter()
        kept = function()
        peak = 0
        if device.type == "cuda":
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated()
        del kept
        rows.append({"name": name, "gib": (peak - before) / GIB, "ms": (time.perf_counter() - start) * 1e3})
        print(f"{name:12s} {rows[-1]['gib']:6.2f} GiB  {rows[-1]['ms']:8.2f} ms")

    measure("ours", lambda: draft_targets(lambda h: h @ weight.T, hidden, ids, mask))
    measure("automodel", lambda: _compute_target_distribution((hidden @ weight.T)[None], ids, mask, loss_mask))
    write(arguments.json, {"sizes": sizes, "rows": rows, "command": shlex.join(["python", *sys.argv])})
    return 0


def print_table(report: dict[str, Any]) -> None:
    """Print the report as a table."""
    print(f"\n{report['device']}, {report['versions']}, {report['target_dims']}, {report['lengths']}, {report['date']}")
    parts = ("target", "draft forward", "draft backward", "optimizer")
    columns = (
        "tokens/s",
        "step ms",
        "target",
        "forward",
        "backward",
        "optim.",
        "idle ms",
        "host ms",
        "peak",
        "dynamic",
        "KV pool",
    )
    print(f"{'':18s}" + "".join(f"{name:>10s}" for name in (*columns, "loss")))
    for row in report["rows"]:
        if "real_tokens_per_s" not in row:
            print(f"{row['name']:18s} {row['error']}")
            continue
        ms = row.get("ms", {})
        values = [
            row["step_ms"],
            *(ms.get(part, float("nan")) for part in parts),
            row.get("idle_ms", float("nan")),
            row.get("host_ms", float("nan")),
            row["peak_gib"],
            row["dynamic_gib"],
            row.get("kv_pool_gib", 0.0),
        ]
        numbers = "".join(f"{value:10.2f}" for value in values)
        print(f"{row['name']:18s}{row['real_tokens_per_s']:10,.0f}{numbers}{row['loss']:10.3f}")


def plot(source: Path, target: Path) -> int:
    """Draw tokens/s and memory over sequence length and micro-batch."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    report = json.loads(source.read_text(encoding="utf-8"))
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for axis, kind, x in zip(axes, ("length", "micro-batch"), ("length", "tokens"), strict=True):
        rows = [row for row in report["rows"] if row["kind"] == kind and "real_tokens_per_s" in row]
        axis.plot([r[x] for r in rows], [r["real_tokens_per_s"] for r in rows], "o-", color="tab:blue")
        axis.set(xscale="log", ylim=(0, 1.1 * max(r["real_tokens_per_s"] for r in rows)))
        axis.set_ylabel("real tokens/s", color="tab:blue")
        axis.set_xlabel("tokens of a chat" if kind == "length" else "tokens of a micro-batch, chat-shaped lengths")
        axis.set_xticks([r[x] for r in rows], [f"{r[x] // 1024}k" for r in rows])
        axis.minorticks_off()
        memory = axis.twinx()
        memory.plot([r[x] for r in rows], [r["dynamic_gib"] for r in rows], "s--", color="tab:orange")
        memory.set_ylim(0, 1.1 * max(r["dynamic_gib"] for r in report["rows"]) + 0.1)
        memory.set_ylabel("dynamic GiB (dashed)", color="tab:orange")
        axis.grid(alpha=0.3)
    figure.suptitle(f"{report['device']}, {report['target_dims']}, {report['date']}")
    figure.savefig(target, dpi=120)
    return 0


def say(text: str) -> None:
    """Print a line of progress."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


def write(path: Path | None, data: dict[str, Any]) -> None:
    """Write the report, if one is wanted; also between rounds, so that a killed run leaves its numbers."""
    if path is not None:
        path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    sys.exit(main())
