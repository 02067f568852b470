#!/usr/bin/env python3
"""Can SGLang's hidden states be trained on: on this machine, with this model and these versions?

Stage 1 builds the target in SGLang and looks at the supervision of one batch. Stage 2 (``--compare-hf``) holds it
against the model's own forward in transformers, padded and with its own head, so that nothing of this package's
unpadding, capture or head is on both sides.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import resource
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import jinja2
import torch
import torch.distributed as dist
import yaml
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, PreTrainedModel

from nemo_eagle3_sglang import engine
from nemo_eagle3_sglang.contracts import BackendRequest, TargetBatch
from nemo_eagle3_sglang.errors import CaptureError, ConfigError
from nemo_eagle3_sglang.supervision.align import shift_left, unpad
from nemo_eagle3_sglang.supervision.aux_layers import resolve_aux_layer_ids
from nemo_eagle3_sglang.supervision.backend import RunnerBackend
from nemo_eagle3_sglang.training import chat_data

TIMED_RUNS = 3
CHUNK = 1024  # positions of one [CHUNK, V] logits: 0.5 GiB in float32 for V = 128k
LEFT_AFTER_CLOSE_MIB = 64
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PACKAGES = ("sglang", "torch", "transformers", "nemo-automodel")
# The package's errors name YAML keys; here the same things are flags.
FLAGS = {
    "recipe_args.aux_layer_ids": "--aux-layer-ids",
    "recipe_args.seq_length": "--seq",
    "recipe_args.sglang_args.": "--sglang-arg ",
    "recipe_args.sglang_args": "--sglang-arg",
    "recipe_args.target_model_name_or_path": "--target",
    "recipe_args.": "--",
}


@dataclass(frozen=True)
class Limits:
    """Thresholds of stage 2; ``max_abs`` is None where rounding alone exceeds any useful bound.

    ``argmax`` leaves room for near ties. ``kl_mean`` catches what neither a cosine nor a ranking can: a wrong scale of
    the logits (softcap, multiplier).
    """

    max_abs: float | None
    cosine_mean: float
    argmax: float
    top5: float
    kl_mean: float


EXACT = Limits(max_abs=1e-3, cosine_mean=0.999, argmax=0.999, top5=1.0, kl_mean=1e-4)
ROUNDED = Limits(max_abs=None, cosine_mean=0.999, argmax=0.95, top5=1.0, kl_mean=0.05)

EPILOG = f"""\
criteria of --compare-hf (the report repeats each beside its value):
                                     float32 on a CPU    anything else (bfloat16 on a GPU)
  max abs diff of states, probs      <= {EXACT.max_abs:<16g} reported
  mean cosine of each aux layer      >= {EXACT.cosine_mean:<16g} >= {ROUNDED.cosine_mean:g}
  mean KL(HF || SGLang), nats        <= {EXACT.kl_mean:<16g} <= {ROUNDED.kl_mean:g}
  with --text only:
    argmax, position_mask agree      >= {EXACT.argmax:<16g} >= {ROUNDED.argmax:g}
    SGLang's top-1 in HF's top-5     == {EXACT.top5:<16g} == {ROUNDED.top5:g}
On random tokens a model is unsure, near ties flip, and argmax agreement is informational. bfloat16 on a CPU differs
by percents: it is no test of anything.

exit status: 0 all criteria hold; 1 one does not (do not train on this target); 2 the request cannot be run.

examples:
  python scripts/smoke_sglang_target.py --target models/smollm2 --device cpu --compare-hf --init-dist
  python scripts/smoke_sglang_target.py --target meta-llama/Llama-3.1-8B-Instruct --batch 8 --seq 2048 \\
      --text chats.jsonl --compare-hf --init-dist --json smoke.json
  python scripts/smoke_sglang_target.py --target models/llama --sglang-arg attention_backend=triton \\
      --sglang-arg mem_fraction_static=0.4 --aux-layer-ids 2 16 29
"""


@dataclass(frozen=True)
class Check:
    """One line of the report; ``passed`` is None for what is only reported."""

    name: str
    value: float | str
    limit: str = "reported"
    passed: bool | None = None


def at_least(name: str, value: float, limit: float) -> Check:
    """Return the criterion ``value >= limit``; NaN fails."""
    return Check(name, value, f">= {limit:g}", value >= limit)


def at_most(name: str, value: float, limit: float) -> Check:
    """Return the criterion ``value <= limit``; NaN fails."""
    return Check(name, value, f"<= {limit:g}", value <= limit)


def equal(name: str, value: object, expected: object) -> Check:
    """Return the criterion ``value == expected``."""
    return Check(name, str(value), f"== {expected}", value == expected)


@dataclass(frozen=True)
class Rows:
    """The batch: ``input_ids`` and ``attention_mask`` ``[B, S]`` on the CPU, padded right."""

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    source: str
    real_text: bool

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row."""
        return self.attention_mask.sum(dim=1).tolist()


@dataclass(frozen=True)
class DraftVocab:
    """``selected`` ``[D]``, target id of each draft id, and ``member`` ``[V]`` bool."""

    selected: torch.Tensor
    member: torch.Tensor


@dataclass(frozen=True)
class States:
    """What one side says of the rows, on the CPU.

    Attributes:
        hidden: ``[T, H]`` of each aux layer, in the order of the ids, and of the final norm, by name.
        argmax: ``[T]``, over all of V.
        top5: ``[T, 5]``.
        probs: ``[P, D]`` over the draft vocabulary, at every real token but the first of its row.
        in_draft_vocab: ``[P]`` bool, the position mask there.
    """

    hidden: dict[str, torch.Tensor]
    argmax: torch.Tensor
    top5: torch.Tensor
    probs: torch.Tensor
    in_draft_vocab: torch.Tensor


def padded(sequences: Sequence[Sequence[int]], source: str, real_text: bool) -> Rows:
    """Pad token sequences right into rows."""
    ids = torch.zeros((len(sequences), max(map(len, sequences))), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, tokens in enumerate(sequences):
        ids[row, : len(tokens)] = torch.as_tensor(tokens)
        mask[row, : len(tokens)] = 1
    return Rows(ids, mask, source, real_text)


def random_rows(batch: int, seq: int, vocab: int, seed: int) -> Rows:
    """Return random tokens; the first row is full, the last half full, so that padding is seen too."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [max(2, int(n)) for n in torch.linspace(seq, seq / 2, batch)]
    return padded([torch.randint(vocab, (n,), generator=generator) for n in lengths], f"random, seed {seed}", False)


def text_rows(args: argparse.Namespace, vocab: int) -> Rows:
    """Return the first ``--batch`` texts of ``--text`` in the target's tokens, each cut to ``--seq``."""
    tokenizer = AutoTokenizer.from_pretrained(args.target, trust_remote_code=args.trust_remote_code)
    if args.text.suffix.lower() in chat_data.JSON_LINES:
        chats = [_messages(args.text, line, row) for line, row in chat_data.rows("--text", args.text)]
        try:
            texts = [tokenizer.apply_chat_template(chat, tokenize=False) for chat in chats[: args.batch]]
        except (ValueError, jinja2.TemplateError) as error:
            raise ConfigError(f"--text {args.text}: the target's chat template does not render it: {error}") from error
        sequences = [tokenizer(text, add_special_tokens=False).input_ids for text in texts]
    else:
        sequences = [tokenizer(text).input_ids for text in read_texts(args.text)[: args.batch]]
    sequences = [tokens[: args.seq] for tokens in sequences if len(tokens) > 1]
    if not sequences:
        raise ConfigError(f"--text {args.text}: no text of two tokens or more in its first {args.batch}")
    if (highest := max(map(max, sequences))) >= vocab:
        raise ConfigError(f"--target {args.target}: its tokenizer gives id {highest}, its model has {vocab} tokens")
    return padded(sequences, str(args.text), True)


def _messages(path: Path, line: int, row: Any) -> list[dict[str, Any]]:
    if not isinstance(row, dict) or not isinstance(row.get("messages"), list) or not row["messages"]:
        raise ConfigError(f'--text {path} line {line} has no list of "messages"')
    return row["messages"]


def read_texts(path: Path) -> list[str]:
    """Return the texts of a plain file: separated by blank lines where there are any, else one a line."""
    try:
        content = path.read_text(encoding="utf-8").replace("\r\n", "\n").strip()
    except UnicodeDecodeError as error:
        raise ConfigError(f"--text {path} is not UTF-8 text: {error.reason}") from error
    return [text.strip() for text in content.split("\n\n" if "\n\n" in content else "\n") if text.strip()]


def choose_draft_vocab(rows: Rows, vocab: int, size: int, seed: int) -> DraftVocab:
    """Take the most frequent tokens of the rows, as training does, and others at random."""
    noise = torch.rand(vocab, generator=torch.Generator().manual_seed(seed))
    counts = torch.bincount(rows.input_ids[rows.attention_mask.bool()], minlength=vocab)
    selected = (counts + noise).topk(size).indices.sort().values
    return DraftVocab(selected, torch.zeros(vocab, dtype=torch.bool).index_fill_(0, selected, True))


@torch.no_grad()
def engine_states(backend: RunnerBackend, rows: Rows, batch: TargetBatch) -> States:
    """Collect what SGLang says: aux states and distributions from ``batch``, the final state from a bare forward."""
    real = rows.attention_mask.bool()
    supervised = shift_left(rows.attention_mask).bool()
    sequences = unpad(rows.input_ids, rows.attention_mask)
    last = backend.runner.forward(sequences.tokens, sequences.lengths).last
    head = backend.runner.head()
    ranked = [_rank(head(part)) for part in last.split(CHUNK)]
    aux = batch.aux_hidden_states.cpu()[real].chunk(len(backend.aux_layer_ids), dim=-1)
    names = [f"aux layer {i}" for i in backend.aux_layer_ids]
    return States(
        hidden={**dict(zip(names, aux, strict=True)), "final hidden": last.cpu()},
        argmax=torch.cat([argmax for argmax, _ in ranked]),
        top5=torch.cat([top5 for _, top5 in ranked]),
        probs=batch.target_probs.cpu()[supervised],
        in_draft_vocab=batch.position_mask.squeeze(-1).cpu()[supervised],
    )


def _rank(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    # argmax apart from topk: bf16 logits tie, and the two need not break a tie alike.
    return logits.argmax(dim=-1).cpu(), logits.topk(5, dim=-1).indices.cpu()


@torch.no_grad()
def reference_states(model: PreTrainedModel, rows: Rows, aux_layer_ids: Sequence[int], vocab: DraftVocab) -> States:
    """Collect what transformers says, a padded row at a time."""
    parts = [_reference_row(model, rows, row, aux_layer_ids, vocab) for row in range(len(rows.input_ids))]
    join: Callable[[str], torch.Tensor] = lambda field: torch.cat([getattr(p, field) for p in parts])  # noqa: E731
    return States(
        hidden={name: torch.cat([p.hidden[name] for p in parts]) for name in parts[0].hidden},
        **{field: join(field) for field in ("argmax", "top5", "probs", "in_draft_vocab")},
    )


def _reference_row(
    model: PreTrainedModel, rows: Rows, row: int, aux_layer_ids: Sequence[int], vocab: DraftVocab
) -> States:
    """Run one row once for every CHUNK of its logits: the model's own head, never ``[S, V]`` of a long row."""
    ids, mask = (x[row : row + 1].to(model.device) for x in (rows.input_ids, rows.attention_mask))
    selected, ranked, probs = vocab.selected.to(model.device), [], []
    for keep in torch.arange(rows.lengths[row], device=model.device).split(CHUNK):
        output = model(
            input_ids=ids, attention_mask=mask, output_hidden_states=True, use_cache=False, logits_to_keep=keep
        )
        ranked.append(_rank(output.logits[0]))
        probs.append(torch.softmax(output.logits[0].index_select(-1, selected).float(), dim=-1).cpu())
    states = {f"aux layer {i}": output.hidden_states[i + 1] for i in aux_layer_ids}
    states["final hidden"] = output.hidden_states[-1]
    argmax = torch.cat([a for a, _ in ranked])
    return States(
        hidden={name: state[0, : len(argmax)].cpu() for name, state in states.items()},
        argmax=argmax,
        top5=torch.cat([t for _, t in ranked]),
        probs=torch.cat(probs)[1:],
        in_draft_vocab=vocab.member[argmax][1:],
    )


def compare(sglang: States, hf: States, limits: Limits, real_text: bool) -> list[Check]:
    """Hold the two sides against each other at the real positions and judge the distances."""

    def near(name: str, difference: float) -> Check:
        return Check(name, difference) if limits.max_abs is None else at_most(name, difference, limits.max_abs)

    checks = []
    for name, reference in hf.hidden.items():
        ours, theirs = sglang.hidden[name].double(), reference.double()
        cosine = torch.cosine_similarity(ours, theirs, dim=-1)
        checks += [
            at_least(f"{name}: cosine mean", float(cosine.mean()), limits.cosine_mean),
            Check(f"{name}: cosine min", float(cosine.min())),
            near(f"{name}: max abs diff", float((ours - theirs).abs().max())),
        ]
    agreement = {
        "argmax match": (sglang.argmax == hf.argmax, limits.argmax),
        "SGLang top-1 in HF top-5": ((sglang.argmax[:, None] == hf.top5).any(dim=-1), limits.top5),
        "position_mask agreement": (sglang.in_draft_vocab == hf.in_draft_vocab, limits.argmax),
    }
    for name, (agree, limit) in agreement.items():
        check = at_least(name, float(agree.double().mean()), limit)
        checks.append(check if real_text else replace(check, limit="informational", passed=None))
    kl = torch.cat([_kl(p, q) for p, q in zip(hf.probs.split(CHUNK), sglang.probs.split(CHUNK), strict=True)])
    return [
        *checks,
        near("target_probs: max abs diff", float((hf.probs - sglang.probs).abs().max())),
        at_most("KL(HF || SGLang) mean, nats", float(kl.mean()), limits.kl_mean),
        Check("KL(HF || SGLang) max, nats", float(kl.max())),
    ]


def _kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    q = q.double().clamp_min(torch.finfo(torch.float32).tiny)
    return (torch.xlogy(p.double(), p.double()) - p.double() * q.log()).sum(dim=-1)


def supervise(backend: RunnerBackend, rows: Rows) -> tuple[TargetBatch, list[Check]]:
    """Run the batch, then several times more for the clock and for bits that must not change."""
    cuda, seconds, same = backend.runner.device.type == "cuda", [], 0

    def run() -> TargetBatch:
        batch = backend.generate_batch(rows.input_ids, rows.attention_mask, rows.attention_mask)
        if cuda:
            torch.cuda.synchronize()
        return batch

    first = run()
    for _ in range(TIMED_RUNS):
        start = time.perf_counter()
        again = run()
        seconds.append(time.perf_counter() - start)
        same += all(torch.equal(value, getattr(again, name)) for name, value in vars(first).items())
    micros = statistics.median(seconds) / sum(rows.lengths) * 1e6
    return first, [
        equal("repeat runs bit-identical", same, TIMED_RUNS),
        Check("generate_batch, us a token", micros, f"median of {TIMED_RUNS}"),
    ]


def inspect(backend: RunnerBackend, rows: Rows, batch: TargetBatch, states: States) -> list[Check]:
    """Check shapes, dtypes and plain sanity of one batch."""
    info, dtype, (b, s) = backend.runner.info, backend.runner.dtype, rows.input_ids.shape
    embeddings, draft = backend.get_input_embeddings().weight, states.probs.shape[-1]
    finite = all(bool(x.isfinite().all()) for x in (*states.hidden.values(), states.probs))
    zero = sum(int((x == 0).all(dim=-1).sum()) for x in states.hidden.values())
    return [
        equal("aux_hidden_states", _shape(batch.aux_hidden_states), f"{[b, s, 3 * info.hidden_size]} {_name(dtype)}"),
        equal("target_probs", _shape(batch.target_probs), f"{[b, s, draft]} float32"),
        equal("position_mask", _shape(batch.position_mask), f"{[b, s, 1]} bool"),
        equal("input embeddings", list(embeddings.shape), [info.vocab_size, info.hidden_size]),
        equal("all values finite", finite, True),
        equal("tokens with an all-zero state", zero, 0),
        equal("padding left at zero", not batch.aux_hidden_states.cpu()[~rows.attention_mask.bool()].any(), True),
        at_most("target_probs: largest |sum - 1|", float((states.probs.sum(dim=-1) - 1).abs().max()), 1e-3),
        Check("positions in the draft vocabulary", float(states.in_draft_vocab.double().mean())),
        equal("KV slots free afterwards", backend.runner.free_slots(), backend.runner.capacity.tokens),
    ]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _shape(tensor: torch.Tensor) -> str:
    return f"{list(tensor.shape)} {_name(tensor.dtype)}"


def run_engine(
    request: BackendRequest, rows: Rows, vocab: DraftVocab, aux_layer_ids: Sequence[int]
) -> tuple[States, list[Check]]:
    """Stage 1: build, run, close; what comes back is on the CPU."""
    cuda, group = request.device.type == "cuda", dist.group.WORLD
    allocated = torch.cuda.memory_allocated() if cuda else 0
    free = torch.cuda.mem_get_info()[0] if cuda else 0
    start = time.perf_counter()
    runner = engine.build_runner(request)
    checks = [Check("build, seconds", time.perf_counter() - start)]
    if cuda:
        checks.append(Check("build took, GiB of the GPU", (free - torch.cuda.mem_get_info()[0]) / 2**30))
    try:
        backend = RunnerBackend(runner, aux_layer_ids)
        backend.set_vocab_mapping(vocab.selected, vocab.member)
        batch, timing = supervise(backend, rows)
        states = engine_states(backend, rows, batch)
        checks += [*inspect(backend, rows, batch, states), *timing, Check("peak memory, GiB", peak_gib(request.device))]
    finally:
        del runner
        backend.close()
    del backend, batch
    if cuda:
        left = (torch.cuda.memory_allocated() - allocated) / 2**20
        checks.append(at_most("left on the GPU after close, MiB", left, LEFT_AFTER_CLOSE_MIB))
    return states, [*checks, check_group(group)]


def check_group(before: dist.ProcessGroup | None) -> Check:
    """Check that ``close()`` left the default process group as it was, and in working order."""
    if before is None:
        return equal("default process group left behind", dist.is_initialized(), False)
    survived = dist.is_initialized() and dist.group.WORLD is before
    if survived:
        dist.barrier()
    return equal("caller's process group survives", survived, True)


def peak_gib(device: torch.device) -> float:
    """Return the peak memory so far: of torch on the GPU, or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def run_transformers(
    request: BackendRequest, rows: Rows, vocab: DraftVocab, aux_layer_ids: Sequence[int], sglang: States
) -> list[Check]:
    """Stage 2, once SGLang is closed: both need not fit beside each other."""
    # No attn_implementation: transformers takes sdpa for every model that has it.
    model = AutoModelForCausalLM.from_pretrained(
        request.target, dtype=request.dtype, trust_remote_code=request.trust_remote_code
    )
    hf = reference_states(model.to(request.device).eval(), rows, aux_layer_ids, vocab)
    limits = EXACT if (request.device.type, request.dtype) == ("cpu", torch.float32) else ROUNDED
    return [*compare(sglang, hf, limits, rows.real_text), Check("peak memory, GiB", peak_gib(request.device))]


def init_dist(device: torch.device) -> None:
    """Make the default group that AutoModel's recipe makes for one process (its ``initialize_distributed``)."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def check_paths(args: argparse.Namespace) -> None:
    """Refuse paths that cannot be, before anything is loaded."""
    if args.json and not args.json.parent.is_dir():
        raise ConfigError(f"--json {args.json}: the folder {args.json.parent} does not exist; make it first")
    if args.json and args.json.is_dir():
        raise ConfigError(f"--json {args.json} is a folder; name a file in it")
    if args.json and not os.access(args.json.parent, os.W_OK):
        raise ConfigError(f"--json {args.json}: the folder {args.json.parent} cannot be written")
    if args.text and not args.text.is_file():
        raise ConfigError(f"--text {args.text} does not exist")
    if args.text and not args.text.read_bytes().strip():
        raise ConfigError(f"--text {args.text} is empty")


def load_config(args: argparse.Namespace) -> PretrainedConfig:
    """Read the target's config.json and check sizes against it."""
    try:
        config = AutoConfig.from_pretrained(args.target, trust_remote_code=args.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--target {args.target} cannot be read: {error}") from error
    text = config.get_text_config()
    context = getattr(text, "max_position_embeddings", None)
    if context is not None and args.seq > context:
        raise ConfigError(f"--seq {args.seq} is longer than the target's context; write at most {context}")
    if args.draft_vocab_size is not None and args.draft_vocab_size > text.vocab_size:
        raise ConfigError(
            f"--draft-vocab-size {args.draft_vocab_size} is larger than the vocabulary; write at most {text.vocab_size}"
        )
    return config


def choose_device(wanted: str) -> torch.device:
    """Return the device; SGLang cannot run on the CPU of a host whose GPUs it sees."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"--device cuda: torch {torch.__version__} sees no usable GPU; use --device cpu")
    if wanted == "cpu" and torch.cuda.is_available():
        raise ConfigError("--device cpu on a host with GPUs: set CUDA_VISIBLE_DEVICES= (empty), SGLang would use them")
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def choose_dtype(wanted: str, config: PretrainedConfig, device: torch.device) -> torch.dtype:
    """Return the dtype: on a GPU the target's own, on a CPU float32."""
    if wanted != "auto":
        return DTYPES[wanted]
    if device.type == "cpu":
        return torch.float32
    dtype = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
    if dtype is None:
        raise ConfigError("--dtype auto: the target's config.json names no dtype; give --dtype bfloat16")
    return dtype


def parse_options(pairs: Sequence[str]) -> dict[str, Any]:
    """Return ``key=value`` pairs as a mapping; values are read as YAML."""
    for pair in pairs:
        if "=" not in pair:
            raise ConfigError(f"--sglang-arg {pair}: write key=value")
    return {key: yaml.safe_load(value) for key, value in (pair.split("=", 1) for pair in pairs)}


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def describe(request: BackendRequest, rows: Rows, vocab: DraftVocab, aux_layer_ids: Sequence[int]) -> dict[str, Any]:
    """Return what was run, where, on what."""
    cuda = request.device.type == "cuda"
    return {
        "command": shlex.join(sys.argv),
        "target": request.target,
        "device": f"{request.device} {torch.cuda.get_device_name(request.device) if cuda else platform.machine()}",
        "dtype": _name(request.dtype),
        "versions": {**{p: _version(p) for p in PACKAGES}, "python": platform.python_version()},
        "sglang_args": dict(request.options),
        "input": rows.source,
        "row_lengths": rows.lengths,
        "aux_layer_ids": list(aux_layer_ids),
        "draft_vocab_size": len(vocab.selected),
    }


def print_facts(facts: dict[str, Any]) -> None:
    """Print what was run, one fact a line."""
    for key, value in facts.items():
        if isinstance(value, dict):
            value = ", ".join(f"{k} {v}" for k, v in value.items()) or "(defaults)"
        print(f"{key:<18}{value}")


def print_checks(title: str, checks: Sequence[Check]) -> None:
    """Print an aligned table with a verdict a line."""
    values = [f"{c.value:.6g}" if isinstance(c.value, float) else c.value for c in checks]
    widths = [max(map(len, column)) for column in ([c.name for c in checks], values, [c.limit for c in checks])]
    print(f"\n{title}")
    for check, value in zip(checks, values, strict=True):
        verdict = "-" if check.passed is None else "PASS" if check.passed else "FAIL"
        print(f"  {check.name:<{widths[0]}}  {value:>{widths[1]}}  {check.limit:<{widths[2]}}  {verdict}")


def write_json(path: Path, report: dict[str, Any]) -> None:
    """Write the report whole or not at all."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(json.dumps(report, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(draft, path)


def to_json(check: Check) -> dict[str, Any]:
    """Return the check for JSON, which has no NaN and no infinity."""
    value = check.value
    return {**asdict(check), "value": str(value) if isinstance(value, float) and not math.isfinite(value) else value}


def run(args: argparse.Namespace) -> bool:
    """Check the request, run the stages and report; return whether all criteria hold."""
    check_paths(args)
    config = load_config(args)
    text = config.get_text_config()
    aux_layer_ids = resolve_aux_layer_ids(args.aux_layer_ids, text.num_hidden_layers)
    device = choose_device(args.device)
    request = BackendRequest(
        target=args.target,
        device=device,
        dtype=choose_dtype(args.dtype, config, device),
        trust_remote_code=args.trust_remote_code,
        seq_length=args.seq,
        micro_batch_size=args.batch,
        options=parse_options(args.sglang_arg),
    )
    rows = (
        text_rows(args, text.vocab_size) if args.text else random_rows(args.batch, args.seq, text.vocab_size, args.seed)
    )
    # Half of a small vocabulary, so that the position mask is never trivial.
    size = args.draft_vocab_size or min(32000, text.vocab_size // 2)
    vocab = choose_draft_vocab(rows, text.vocab_size, size, args.seed)
    engine.check_request(request)
    if args.init_dist:
        init_dist(device)
    facts = describe(request, rows, vocab, aux_layer_ids)
    print_facts(facts)
    stages = run_stages(args.compare_hf, request, rows, vocab, aux_layer_ids)
    passed = all(check.passed is not False for checks in stages.values() for check in checks)
    if args.json:
        checks = [{"stage": stage, **to_json(check)} for stage, checks in stages.items() for check in checks]
        write_json(args.json, {"passed": passed, **facts, "checks": checks})
    print(f"\n{'PASS' if passed else 'FAIL: do not train on this target here'}")
    return passed


def run_stages(compare_hf: bool, request: BackendRequest, *batch: Any) -> dict[str, list[Check]]:
    """Run and print the stages; a model whose capture is not understood fails the first."""
    stages: dict[str, list[Check]] = {}
    try:
        states, stages["sglang"] = run_engine(request, *batch)
    except CaptureError as error:
        stages["sglang"] = [Check("capture", str(error), "understood", False)]
        compare_hf = False
    print_checks("stage 1: SGLang", stages["sglang"])
    if compare_hf:
        stages["compare_hf"] = run_transformers(request, *batch, states)
        print_checks("stage 2: SGLang against transformers, at the real positions", stages["compare_hf"])
        if not batch[0].real_text:
            print("  Random tokens: argmax agreement is informational, near ties flip. Give --text to make it count.")
    return stages


def _count(least: int) -> Callable[[str], int]:
    def count(text: str) -> int:
        if (value := int(text)) < least:
            raise argparse.ArgumentTypeError(f"{value} is less than {least}")
        return value

    return count


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--target", required=True, metavar="PATH", help="model folder or hub id")
    add("--batch", type=_count(1), default=4, metavar="N", help="rows (default: %(default)s)")
    add("--seq", type=_count(2), default=512, metavar="N", help="most tokens of a row (default: %(default)s)")
    add("--text", type=Path, metavar="FILE", help="real text: one a line, or separated by blank lines; or JSON lines "
        "with messages (.jsonl), rendered by the chat template (default: random tokens)")  # fmt: skip
    add("--init-dist", action="store_true", help="make a torch.distributed group first, as AutoModel does")
    add("--compare-hf", action="store_true", help="stage 2: compare with transformers")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: a GPU where there is one")
    add("--dtype", choices=("auto", *DTYPES), default="auto", help="default: the target's on a GPU, float32 on a CPU")
    add("--json", type=Path, metavar="OUT", help="also write the report there")
    add("--aux-layer-ids", type=int, nargs="+", metavar="ID", help="three layers (default: 1, N//2-1, N-4)")
    add("--draft-vocab-size", type=_count(1), metavar="N", help="default: 32000, at most half of the vocabulary")
    add("--sglang-arg", action="append", default=[], metavar="KEY=VALUE", help="a field of ServerArgs; repeatable")
    add("--trust-remote-code", action="store_true", help="run code that came with the checkpoint")
    add("--seed", type=int, default=0, help="of random tokens and draft vocabulary (default: %(default)s)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    args = parse_args(argv)
    try:
        return 0 if run(args) else 1
    except ConfigError as error:
        message = str(error)
        for key, flag in FLAGS.items():
            message = message.replace(key, flag)
        print(f"error: {message}", file=sys.stderr)
        return 2
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    raise SystemExit(main())
