#!/usr/bin/env python3
"""Can SGLang's hidden states be trained on: on this machine, with this model and these versions?

Stage 1 runs one batch through SGLang and looks at the supervision. Stage 2 (--compare-hf) holds it against the model's
own padded forward and head in transformers, so that no code of this package is on both sides.
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


@dataclass(frozen=True)
class Limits:
    """Thresholds of stage 2; ``max_abs`` is None where rounding alone exceeds any useful bound.

    ``argmax`` leaves room for near ties. ``kl_mean`` catches what neither a cosine nor a ranking can: logits on a
    wrong scale (softcap, multiplier).
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
  mean cosine of every state         >= {EXACT.cosine_mean:<16g} >= {ROUNDED.cosine_mean:g}
  mean KL(HF || SGLang), nats        <= {EXACT.kl_mean:<16g} <= {ROUNDED.kl_mean:g}
  with --text only:
    argmax, position_mask agree      >= {EXACT.argmax:<16g} >= {ROUNDED.argmax:g}
    SGLang's top-1 in HF's top-5     >= {EXACT.top5:<16g} >= {ROUNDED.top5:g}
On random tokens a model is unsure and near ties flip, so agreement of the argmax is informational there. bfloat16 on a
CPU differs by percents: it is no test of anything.

exit status: 0 all criteria hold; 1 one does not (do not train on this target); 2 the request cannot be run.

examples:
  python scripts/smoke_sglang_target.py --target models/smollm2 --device cpu --compare-hf --init-dist
  python scripts/smoke_sglang_target.py --target meta-llama/Llama-3.1-8B-Instruct --batch 8 --seq 2048 \\
      --text chats.jsonl --compare-hf --init-dist --json smoke.json
  python scripts/smoke_sglang_target.py --target models/llama --aux-layer-ids 2 16 29 \\
      --sglang-arg attention_backend=triton --sglang-arg mem_fraction_static=0.4
"""


@dataclass(frozen=True)
class Check:
    """One line of the report; ``passed`` is None for what is only reported."""

    name: str
    value: float | str
    limit: str = "reported"
    passed: bool | None = None


def at_least(name: str, value: float, limit: float) -> Check:
    """Return the criterion ``value >= limit``, which NaN fails."""
    return Check(name, value, f">= {limit:g}", value >= limit)


def at_most(name: str, value: float, limit: float) -> Check:
    """Return the criterion ``value <= limit``, which NaN fails."""
    return Check(name, value, f"<= {limit:g}", value <= limit)


def equal(name: str, value: object, expected: object) -> Check:
    """Return the criterion ``value == expected``."""
    return Check(name, str(value), f"== {expected}", value == expected)


@dataclass(frozen=True)
class Rows:
    """The batch, ``[B, S]`` each, on the CPU, padded right."""

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    lengths: list[int]


@dataclass(frozen=True)
class Job:
    """All that both stages need; ``selected`` ``[D]`` holds the target id of each draft id."""

    request: BackendRequest
    rows: Rows
    real_text: bool
    aux_layer_ids: list[int]
    selected: torch.Tensor
    member: torch.Tensor

    @property
    def cuda(self) -> bool:
        """Whether the target is on a GPU."""
        return self.request.device.type == "cuda"


@dataclass(frozen=True)
class States:
    """What one side says of the T real tokens, on the CPU.

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


def pad_right(sequences: Sequence[Sequence[int]]) -> Rows:
    """Return token sequences as rows."""
    parts = [torch.as_tensor(tokens) for tokens in sequences]
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(part) for part in parts], batch_first=True)
    return Rows(torch.nn.utils.rnn.pad_sequence(parts, batch_first=True), mask, [len(part) for part in parts])


def random_rows(batch: int, seq: int, vocab: int, seed: int) -> Rows:
    """Return random tokens; the first row is full, the last half full, so that padding is seen too."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [max(2, int(n)) for n in torch.linspace(seq, seq / 2, batch)]
    return pad_right([torch.randint(vocab, (n,), generator=generator) for n in lengths])


def text_rows(args: argparse.Namespace, vocab: int) -> Rows:
    """Return the first ``--batch`` texts of ``--text`` in the target's tokens, each cut to ``--seq``."""
    texts = read_texts(args.text)[: args.batch]
    try:
        tokenizer = AutoTokenizer.from_pretrained(args.target, trust_remote_code=args.trust_remote_code)
        sequences = [
            tokenizer(text).input_ids
            if isinstance(text, str)
            else tokenizer(tokenizer.apply_chat_template(text, tokenize=False), add_special_tokens=False).input_ids
            for text in texts
        ]
    except (OSError, ValueError, jinja2.TemplateError) as error:
        raise ConfigError(f"--text {args.text}: the target's tokenizer cannot render it: {error}") from error
    sequences = [tokens[: args.seq] for tokens in sequences if len(tokens) > 1]
    if not sequences:
        raise ConfigError(f"--text {args.text}: its first {args.batch} texts are all shorter than two tokens")
    if (highest := max(map(max, sequences))) >= vocab:
        raise ConfigError(f"--target {args.target}: its tokenizer gives id {highest}, its model has {vocab} tokens")
    return pad_right(sequences)


def read_texts(path: Path) -> list[Any]:
    """Return the conversations of a JSON-lines file, or the texts of a plain one.

    Plain texts are separated by blank lines where there are any, else there is one a line.
    """
    if path.suffix.lower() in chat_data.JSON_LINES:
        rows = list(chat_data.rows("--text", path))
        if bad := [line for line, row in rows if not isinstance(row, dict) or not row.get("messages")]:
            raise ConfigError(f'--text {path} line {bad[0]} has no "messages"')
        return [row["messages"] for _, row in rows]
    try:
        content = path.read_text(encoding="utf-8").strip()
    except UnicodeDecodeError as error:
        raise ConfigError(f"--text {path} is not UTF-8 text: {error.reason}") from error
    return [text for text in content.split("\n\n" if "\n\n" in content else "\n") if text.strip()]


def choose_draft_vocab(rows: Rows, vocab: int, size: int, seed: int) -> torch.Tensor:
    """Return the most frequent tokens of the rows, as training does, and others at random, in order."""
    noise = torch.rand(vocab, generator=torch.Generator().manual_seed(seed))
    counts = torch.bincount(rows.input_ids[rows.attention_mask.bool()], minlength=vocab)
    return (counts + noise).topk(size).indices.sort().values


def run_sglang(job: Job) -> tuple[States, list[Check]]:
    """Stage 1: build, run, close."""
    group = dist.group.WORLD
    allocated, free = (torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]) if job.cuda else (0, 0)
    start = time.perf_counter()
    runner = engine.build_runner(job.request)
    checks = [Check("build, seconds", time.perf_counter() - start)]
    if job.cuda:
        checks.append(Check("build took, GiB of the GPU", (free - torch.cuda.mem_get_info()[0]) / 2**30))
    try:
        states, found = look(runner, job)
    finally:
        runner.close()
    checks += found
    if job.cuda:
        left = (torch.cuda.memory_allocated() - allocated) / 2**20
        checks.append(at_most("left on the GPU after close, MiB", left, LEFT_AFTER_CLOSE_MIB))
    return states, [*checks, check_group(group)]


def look(runner: Any, job: Job) -> tuple[States, list[Check]]:
    """Run one batch, several times, on SGLang's runner; what comes back is on the CPU."""
    backend = RunnerBackend(runner, job.aux_layer_ids)
    backend.set_vocab_mapping(job.selected, job.member)
    batch, timing = supervise(backend, job)
    states = sglang_states(backend, job.rows, batch)
    return states, [*sanity(backend, job.rows, batch, states), *timing, check_memory(job)]


def supervise(backend: RunnerBackend, job: Job) -> tuple[TargetBatch, list[Check]]:
    """Return the batch; run it several times more, for the clock and for bits that must not change."""
    rows, seconds, same = job.rows, [], 0

    def run() -> TargetBatch:
        start = time.perf_counter()
        batch = backend.generate_batch(rows.input_ids, rows.attention_mask, rows.attention_mask)
        if job.cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        return batch

    first = run()
    for _ in range(TIMED_RUNS):
        again = run()
        same += all(torch.equal(value, getattr(again, name)) for name, value in vars(first).items())
    micros = statistics.median(seconds[1:]) / sum(rows.lengths) * 1e6
    return first, [
        equal("repeat runs bit-identical", same, TIMED_RUNS),
        Check("generate_batch, us a token", micros, f"median of {TIMED_RUNS}"),
    ]


@torch.no_grad()
def sglang_states(backend: RunnerBackend, rows: Rows, batch: TargetBatch) -> States:
    """Collect aux states and distributions from ``batch``, the final state from a bare forward."""
    real, supervised = rows.attention_mask.bool(), shift_left(rows.attention_mask).bool()
    sequences = unpad(rows.input_ids, rows.attention_mask)
    last = backend.runner.forward(sequences.tokens, sequences.lengths).last
    head = backend.runner.head()
    argmax, top5 = map(torch.cat, zip(*(rank(head(part)) for part in last.split(CHUNK)), strict=True))
    names = [f"aux layer {i}" for i in backend.aux_layer_ids]
    aux = batch.aux_hidden_states.cpu()[real].chunk(len(names), dim=-1)
    hidden = {**dict(zip(names, aux, strict=True)), "final hidden": last.cpu()}
    probs, in_draft_vocab = batch.target_probs.cpu()[supervised], batch.position_mask.squeeze(-1).cpu()[supervised]
    return States(hidden, argmax, top5, probs, in_draft_vocab)


def rank(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return argmax and top 5 on the CPU; apart, since bf16 logits tie and the two need not break a tie alike."""
    return logits.argmax(dim=-1).cpu(), logits.topk(5, dim=-1).indices.cpu()


def sanity(backend: RunnerBackend, rows: Rows, batch: TargetBatch, states: States) -> list[Check]:
    """Check shapes, dtypes and values of one batch, and that no KV slot was lost."""
    info, (b, s), d = backend.runner.info, rows.input_ids.shape, states.probs.shape[-1]
    finite = all(bool(x.isfinite().all()) for x in (*states.hidden.values(), states.probs))
    zero = sum(int((x == 0).all(dim=-1).sum()) for x in states.hidden.values())
    aux = shape(batch.aux_hidden_states)
    return [
        equal("aux_hidden_states", aux, f"{[b, s, 3 * info.hidden_size]} {dtype_name(backend.runner.dtype)}"),
        equal("target_probs", shape(batch.target_probs), f"{[b, s, d]} float32"),
        equal("position_mask", shape(batch.position_mask), f"{[b, s, 1]} bool"),
        equal("input embeddings", list(backend.runner.input_embeddings().shape), [info.vocab_size, info.hidden_size]),
        equal("all values finite", finite, True),
        equal("tokens with an all-zero state", zero, 0),
        equal("padding is zero", not batch.aux_hidden_states.cpu()[~rows.attention_mask.bool()].any(), True),
        at_most("target_probs: largest |sum - 1|", float((states.probs.sum(dim=-1) - 1).abs().max()), 1e-3),
        Check("positions in the draft vocabulary", float(states.in_draft_vocab.double().mean())),
        equal("KV slots free afterwards", backend.runner.free_slots(), backend.runner.capacity.tokens),
    ]


def check_group(before: dist.ProcessGroup | None) -> Check:
    """Check that ``close()`` left the default process group as it was, and in working order."""
    if before is None:
        return equal("process group left behind", dist.is_initialized(), False)
    survives = dist.is_initialized() and dist.group.WORLD is before
    if survives:
        dist.barrier()
    return equal("caller's process group survives", survives, True)


def check_memory(job: Job) -> Check:
    """Report the peak memory so far: of torch on the GPU, or of this process."""
    peak = torch.cuda.max_memory_allocated() if job.cuda else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Check("peak memory so far, GiB", peak / 2**30)


def run_transformers(job: Job, sglang: States) -> list[Check]:
    """Stage 2, once SGLang is closed: the two need not fit beside each other."""
    request = job.request
    # No attn_implementation: transformers takes sdpa for every model that has it.
    model = AutoModelForCausalLM.from_pretrained(
        request.target, dtype=request.dtype, trust_remote_code=request.trust_remote_code
    )
    model = model.to(request.device).eval()
    parts = [reference_row(model, job, row) for row in range(len(job.rows.lengths))]
    hf = States(
        hidden={name: torch.cat([part.hidden[name] for part in parts]) for name in parts[0].hidden},
        argmax=torch.cat([part.argmax for part in parts]),
        top5=torch.cat([part.top5 for part in parts]),
        probs=torch.cat([part.probs for part in parts]),
        in_draft_vocab=torch.cat([part.in_draft_vocab for part in parts]),
    )
    limits = EXACT if (request.device.type, request.dtype) == ("cpu", torch.float32) else ROUNDED
    return [*compare(sglang, hf, limits, job.real_text), check_memory(job)]


@torch.no_grad()
def reference_row(model: PreTrainedModel, job: Job, row: int) -> States:
    """Run one padded row once for every CHUNK of its logits: the model's own head, but never all of a long row."""
    ids, mask = (x[row : row + 1].to(model.device) for x in (job.rows.input_ids, job.rows.attention_mask))
    length, selected, ranked, probs = job.rows.lengths[row], job.selected.to(model.device), [], []
    for keep in torch.arange(length, device=model.device).split(CHUNK):
        output = model(ids, attention_mask=mask, output_hidden_states=True, use_cache=False, logits_to_keep=keep)
        ranked.append(rank(output.logits[0]))
        probs.append(torch.softmax(output.logits[0].index_select(-1, selected).float(), dim=-1).cpu())
    states = {f"aux layer {i}": output.hidden_states[i + 1] for i in job.aux_layer_ids}
    states["final hidden"] = output.hidden_states[-1]  # this one alone has passed the final norm
    hidden = {name: state[0, :length].cpu() for name, state in states.items()}
    argmax, top5 = map(torch.cat, zip(*ranked, strict=True))
    return States(hidden, argmax, top5, torch.cat(probs)[1:], job.member[argmax][1:])


def compare(sglang: States, hf: States, limits: Limits, real_text: bool) -> list[Check]:
    """Judge the distance between the two sides."""

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
    in_top5 = (sglang.argmax[:, None] == hf.top5).any(dim=-1)
    agreement = [
        at_least("argmax match", mean(sglang.argmax == hf.argmax), limits.argmax),
        at_least("SGLang top-1 in HF top-5", mean(in_top5), limits.top5),
        at_least("position_mask agreement", mean(sglang.in_draft_vocab == hf.in_draft_vocab), limits.argmax),
    ]
    checks += agreement if real_text else [replace(c, limit="informational", passed=None) for c in agreement]
    pairs = list(zip(hf.probs.split(CHUNK), sglang.probs.split(CHUNK), strict=True))
    kl = torch.cat([kl_divergence(p, q) for p, q in pairs])
    return [
        *checks,
        near("target_probs: max abs diff", float(torch.stack([(p - q).abs().max() for p, q in pairs]).max())),
        at_most("KL(HF || SGLang) mean, nats", float(kl.mean()), limits.kl_mean),
        Check("KL(HF || SGLang) max, nats", float(kl.max())),
    ]


def mean(agree: torch.Tensor) -> float:
    """Return the share of true."""
    return float(agree.double().mean())


def kl_divergence(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Return KL(p || q) ``[n]`` in nats of float32 rows ``[n, D]``, whose sums are off one by their rounding."""
    p, q = (x.double() / x.double().sum(dim=-1, keepdim=True) for x in (p, q))
    return (torch.xlogy(p, p) - p * q.clamp_min(torch.finfo(torch.float32).tiny).log()).sum(dim=-1).clamp_min(0)


def prepare(args: argparse.Namespace) -> Job:
    """Check the request and read the input; loads no weights.

    Raises:
        ConfigError: Anything that the user can mend.
    """
    check_paths(args)
    config = load_config(args)
    text, device = config.get_text_config(), choose_device(args.device)
    request = BackendRequest(
        target=args.target,
        device=device,
        dtype=choose_dtype(args.dtype, config, device),
        trust_remote_code=args.trust_remote_code,
        seq_length=args.seq,
        micro_batch_size=args.batch,
        options=parse_options(args.sglang_arg),
    )
    ids, vocab = resolve_aux_layer_ids(args.aux_layer_ids, text.num_hidden_layers), text.vocab_size
    rows = text_rows(args, vocab) if args.text else random_rows(args.batch, args.seq, vocab, args.seed)
    # Half of a small vocabulary, so that the position mask is never trivial.
    selected = choose_draft_vocab(rows, vocab, args.draft_vocab_size or min(32000, vocab // 2), args.seed)
    engine.check_request(request)
    member = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, selected, True)
    return Job(request, rows, args.text is not None, ids, selected, member)


def check_paths(args: argparse.Namespace) -> None:
    """Refuse paths that cannot be."""
    out, text = args.json, args.text
    if out and not out.parent.is_dir():
        raise ConfigError(f"--json {out}: the folder {out.parent} does not exist; make it first")
    if out and (out.is_dir() or not os.access(out.parent, os.W_OK)):
        raise ConfigError(f"--json {out} cannot be written; name a file in a folder that can")
    if text and not text.is_file():
        raise ConfigError(f"--text {text} does not exist")
    if text and not text.read_bytes().strip():
        raise ConfigError(f"--text {text} is empty")


def load_config(args: argparse.Namespace) -> PretrainedConfig:
    """Read the target's config.json and hold the sizes against it."""
    if Path(args.target).is_absolute() and not Path(args.target).is_dir():
        raise ConfigError(f"--target {args.target} does not exist")
    try:
        config = AutoConfig.from_pretrained(args.target, trust_remote_code=args.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--target {args.target} cannot be read: {error}") from error
    text, draft = config.get_text_config(), args.draft_vocab_size or 1
    context = getattr(text, "max_position_embeddings", None) or args.seq
    if args.seq > context:
        raise ConfigError(f"--seq {args.seq} is longer than the target's context; write at most {context}")
    if draft > text.vocab_size:
        raise ConfigError(f"--draft-vocab-size {draft} exceeds the vocabulary; write at most {text.vocab_size}")
    return config


def choose_device(wanted: str) -> torch.device:
    """Return the device."""
    usable = torch.cuda.is_available()
    if wanted == "cuda" and not usable:
        raise ConfigError(f"--device cuda: torch {torch.__version__} sees no usable GPU; use --device cpu")
    if wanted == "cpu" and usable:
        raise ConfigError("--device cpu: SGLang would use the GPU it sees; set CUDA_VISIBLE_DEVICES= (empty)")
    return torch.device("cuda", 0) if usable else torch.device("cpu")


def choose_dtype(wanted: str, config: PretrainedConfig, device: torch.device) -> torch.dtype:
    """Return the dtype: by default the target's own on a GPU, float32 on a CPU."""
    if wanted != "auto" or device.type == "cpu":
        return DTYPES.get(wanted, torch.float32)
    dtype = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
    if dtype is None:
        raise ConfigError("--dtype auto: the target's config.json names no dtype; give --dtype bfloat16")
    return dtype


def parse_options(pairs: Sequence[str]) -> dict[str, Any]:
    """Return ``key=value`` pairs as a mapping; a value is read as JSON, or else as text."""
    options = {}
    for pair in pairs:
        key, found, value = pair.partition("=")
        if not found:
            raise ConfigError(f"--sglang-arg {pair}: write key=value")
        try:
            options[key] = json.loads(value)
        except ValueError:
            options[key] = value
    return options


def version(package: str) -> str:
    """Return the version of an installed distribution."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def dtype_name(dtype: torch.dtype) -> str:
    """Return ``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def shape(tensor: torch.Tensor) -> str:
    """Return shape and dtype in words."""
    return f"{list(tensor.shape)} {dtype_name(tensor.dtype)}"


def describe(job: Job, source: str) -> dict[str, Any]:
    """Return what is run, where, on what."""
    hardware = torch.cuda.get_device_name() if job.cuda else f"{platform.machine()}, {torch.get_num_threads()} threads"
    return {
        "command": shlex.join(sys.argv),
        "target": job.request.target,
        "device": f"{job.request.device} ({hardware})",
        "dtype": dtype_name(job.request.dtype),
        "versions": {**{p: version(p) for p in PACKAGES}, "python": platform.python_version()},
        "sglang_args": dict(job.request.options),
        "input": source,
        "row_lengths": job.rows.lengths,
        "aux_layer_ids": job.aux_layer_ids,
        "draft_vocab_size": len(job.selected),
    }


def print_checks(title: str, checks: Sequence[Check]) -> None:
    """Print an aligned table with a verdict a line."""
    values = [f"{c.value:.6g}" if isinstance(c.value, float) else c.value for c in checks]
    name, value, limit = (max(map(len, x)) for x in ([c.name for c in checks], values, [c.limit for c in checks]))
    print(f"\n{title}")
    for check, text in zip(checks, values, strict=True):
        verdict = "-" if check.passed is None else "PASS" if check.passed else "FAIL"
        print(f"  {check.name:<{name}}  {text:>{value}}  {check.limit:<{limit}}  {verdict}")


def run_stages(job: Job, compare_hf: bool) -> dict[str, list[Check]]:
    """Run and print the stages; a model whose capture is not understood fails the first."""
    try:
        states, checks = run_sglang(job)
    except CaptureError as error:
        checks, compare_hf = [Check("capture", str(error), "understood", False)], False
    stages = {"sglang": checks}
    print_checks("stage 1: SGLang", checks)
    if compare_hf:
        stages["compare_hf"] = run_transformers(job, states)
        print_checks("stage 2: SGLang against transformers, at the real positions", stages["compare_hf"])
        if not job.real_text:
            print("  Random tokens: agreement of the argmax is informational, near ties flip; --text makes it count.")
    return stages


def write_json(path: Path, facts: dict[str, Any], stages: dict[str, list[Check]], passed: bool) -> None:
    """Write the report whole or not at all; NaN and infinity, which JSON lacks, as text."""
    lines = [{"stage": stage, **asdict(check)} for stage, checks in stages.items() for check in checks]
    for line in lines:
        if isinstance(line["value"], float) and not math.isfinite(line["value"]):
            line["value"] = str(line["value"])
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(json.dumps({"passed": passed, **facts, "checks": lines}, indent=2) + "\n", encoding="utf-8")
    os.replace(draft, path)


def run(args: argparse.Namespace) -> bool:
    """Check the request, run the stages and report; return whether all criteria hold."""
    job = prepare(args)
    if args.init_dist:
        # As AutoModel's initialize_distributed does for one process.
        if job.cuda:
            torch.cuda.set_device(job.request.device)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    facts = describe(job, str(args.text or f"random tokens, seed {args.seed}"))
    for key, value in facts.items():
        print(f"{key:<18}{', '.join(f'{k} {v}' for k, v in value.items()) if isinstance(value, dict) else value}")
    stages = run_stages(job, args.compare_hf)
    passed = all(check.passed is not False for checks in stages.values() for check in checks)
    if args.json:
        write_json(args.json, facts, stages, passed)
    print("\nPASS" if passed else "\nFAIL: do not train on this target here")
    return passed


def count(text: str) -> int:
    """Parse a whole number of at least one."""
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add, text = parser.add_argument, "JSON lines with messages (.jsonl), or plain: one text a line, or between blanks"
    add("--target", required=True, metavar="PATH", help="model folder or hub id")
    add("--batch", type=count, default=4, metavar="N", help="rows (default: %(default)s)")
    add("--seq", type=count, default=512, metavar="N", help="most tokens of a row (default: %(default)s)")
    add("--text", type=Path, metavar="FILE", help=f"{text} (default: random tokens)")
    add("--init-dist", action="store_true", help="make a torch.distributed group first, as AutoModel does")
    add("--compare-hf", action="store_true", help="stage 2: compare with transformers")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: a GPU where there is one")
    add("--dtype", choices=("auto", *DTYPES), default="auto", help="default: the target's on a GPU, float32 on a CPU")
    add("--json", type=Path, metavar="OUT", help="also write the report there")
    add("--aux-layer-ids", type=int, nargs="+", metavar="ID", help="three layers (default: 1, N//2-1, N-4)")
    add("--draft-vocab-size", type=count, metavar="N", help="default: 32000, at most half of the vocabulary")
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
        # The package's errors name YAML keys; here the same things are flags.
        message = str(error).replace("recipe_args.sglang_args.", "--sglang-arg ").replace("recipe_args.", "--")
        print(f"error: {message.replace('aux_layer_ids', 'aux-layer-ids')}", file=sys.stderr)
        return 2
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    raise SystemExit(main())
