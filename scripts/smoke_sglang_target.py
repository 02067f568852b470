#!/usr/bin/env python3
"""Can SGLang's hidden states be trained on: on this machine, with this model and these versions?

Stage 1 runs one batch through SGLang and looks at the supervision. Stage 2 (--compare-hf) holds it against the model's
own padded forward and head in transformers, so that no code of this package is on both sides.
"""

from __future__ import annotations

import argparse
import json
import math
import operator
import os
import platform
import resource
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import torch
import torch.distributed as dist
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, PreTrainedModel

from nemo_eagle3_sglang import engine
from nemo_eagle3_sglang.contracts import BackendRequest, TargetBatch, TargetRunner
from nemo_eagle3_sglang.errors import CaptureError, ConfigError
from nemo_eagle3_sglang.supervision.align import shift_left
from nemo_eagle3_sglang.supervision.aux_layers import resolve_aux_layer_ids
from nemo_eagle3_sglang.supervision.backend import RunnerBackend
from nemo_eagle3_sglang.supervision.documents import documents
from nemo_eagle3_sglang.training import chat_data

TIMED_RUNS = 3
CHUNK = 1024  # positions of one [CHUNK, V] logits: 0.5 GiB in float32 for V = 128k
LEFT_AFTER_CLOSE_MIB = 64
# Beside max_abs, since some targets have activations of 25,000 (SmolLM2's first token), where one ulp is 2e-3.
ULPS = 8
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PACKAGES = ("sglang", "torch", "transformers", "nemo-automodel")
OPERATORS = {">=": operator.ge, "<=": operator.le, "==": operator.eq}


class Limits(NamedTuple):
    """Thresholds of stage 2.

    ``max_abs`` is infinite where rounding alone exceeds any useful bound, ``argmax`` leaves room for near ties, and
    ``kl_mean`` catches what neither a cosine nor a ranking can: logits on a wrong scale (softcap, multiplier).
    """

    max_abs: float
    cosine_mean: float
    final_cosine: float
    argmax: float
    top5: float
    kl_mean: float


EXACT = Limits(max_abs=1e-3, cosine_mean=0.999, final_cosine=0.999, argmax=0.999, top5=1.0, kl_mean=1e-4)
ROUNDED = Limits(max_abs=math.inf, cosine_mean=0.999, final_cosine=0.99, argmax=0.9, top5=1.0, kl_mean=0.05)
# sglang_args.quantization rounds the weights, and transformers runs them unrounded: the distance is the quantisation's,
# and only what no 8-bit format does is a fault.
QUANTISED = Limits(max_abs=math.inf, cosine_mean=0.98, final_cosine=0.95, argmax=0.8, top5=0.95, kl_mean=0.25)

EPILOG = f"""\
criteria of --compare-hf, repeated beside each value:
                                     float32 on a CPU    anything else (bfloat16 on a GPU)
  max abs diff of states, probs      <= {EXACT.max_abs:<16g} reported
  mean cosine of each aux layer      >= {EXACT.cosine_mean:<16g} >= {ROUNDED.cosine_mean:g}
  mean cosine of the final hidden    >= {EXACT.final_cosine:<16g} >= {ROUNDED.final_cosine:g}
  mean KL(HF || SGLang), nats        <= {EXACT.kl_mean:<16g} <= {ROUNDED.kl_mean:g}
  with --text only:
    argmax, position_mask agree      >= {EXACT.argmax:<16g} >= {ROUNDED.argmax:g}
    SGLang's top-1 in HF's top-5     >= {EXACT.top5:<16g} >= {ROUNDED.top5:g}
On random tokens a model is unsure and near ties flip, so agreement of the argmax is informational there. bfloat16 on a
CPU differs by percents: it is no test of anything. The max abs diff allows {ULPS} float32 ulps of the value beside.
With --sglang-arg quantization=... transformers still runs the checkpoint's own weights, so that the distance is the
quantisation's; the limits are wider then: cosines {QUANTISED.cosine_mean:g}, {QUANTISED.final_cosine:g},
argmax {QUANTISED.argmax:g}, KL {QUANTISED.kl_mean:g}.

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
    value: Any
    limit: str = "reported"
    passed: bool | None = None


def judge(name: str, value: Any, relation: str, limit: Any) -> Check:
    """Return the criterion ``value <relation> limit``, which NaN fails."""
    return Check(name, value, f"{relation} {limit}", OPERATORS[relation](value, limit))


@dataclass(frozen=True)
class Job:
    """What both stages run.

    ``input_ids`` and ``attention_mask`` are ``[B, S]``, padded right, ``selected`` ``[D]`` is the target id of each
    draft id, and ``member`` ``[V]`` is true at those; all on the CPU.
    """

    request: BackendRequest
    aux_layer_ids: list[int]
    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    lengths: list[int]
    real_text: bool
    selected: torch.Tensor
    member: torch.Tensor

    @property
    def cuda(self) -> bool:
        """Whether the target is on a GPU."""
        return self.request.device.type == "cuda"


class States(NamedTuple):
    """What one side says of the T real tokens, on the CPU.

    ``hidden`` ``[T, A+1, H]`` holds the aux layers and the final norm; ``argmax`` ``[T]`` and ``top5`` ``[T, 5]`` are
    over all of V; ``probs`` ``[P, D]`` and ``position_mask`` ``[P]`` leave out the first token of each row.
    """

    hidden: torch.Tensor
    argmax: torch.Tensor
    top5: torch.Tensor
    probs: torch.Tensor
    position_mask: torch.Tensor


def run_sglang(job: Job) -> tuple[States, list[int], list[Check]]:
    """Stage 1: build, run, close. Also returns the layers captured, which the engine may have adapted."""
    group = dist.group.WORLD
    allocated, free = (torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]) if job.cuda else (0, 0)
    start = time.perf_counter()
    runner = engine.build_runner(job.request)
    checks = [Check("build, seconds", time.perf_counter() - start)]
    if job.cuda:
        checks.append(Check("build took, GiB of the GPU", (free - torch.cuda.mem_get_info()[0]) / 2**30))
    try:
        states, captured, found = use(runner, job)
    finally:
        runner.close()
    if job.cuda:
        left = (torch.cuda.memory_allocated() - allocated) / 2**20
        found.append(judge("left on the GPU after close, MiB", left, "<=", LEFT_AFTER_CLOSE_MIB))
    intact = dist.group.WORLD is group
    if group is not None and intact:
        dist.barrier()
    found.append(judge("default process group as before", intact, "==", True))
    return states, captured, checks + found


def use(runner: TargetRunner, job: Job) -> tuple[States, list[int], list[Check]]:
    """Run the batch several times on SGLang's runner; nothing that comes back is on the GPU."""
    backend = RunnerBackend(runner, job.aux_layer_ids)
    backend.set_vocab_mapping(job.selected, job.member)
    seconds, same = [], 0

    def run() -> TargetBatch:
        start = time.perf_counter()
        batch = backend.generate_batch(job.input_ids, job.attention_mask, job.attention_mask)
        if job.cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        return batch

    batch = run()
    for _ in range(TIMED_RUNS):
        again = run()
        same += all(torch.equal(value, getattr(again, name)) for name, value in batch.to_trainer_inputs().items())
    states = sglang_states(runner, job, batch)
    return (
        states,
        backend.aux_layer_ids,
        [
            *sanity(runner, job, batch, states),
            judge("repeat runs bit-identical", same, "==", TIMED_RUNS),
            Check("generate_batch, us a token", statistics.median(seconds[1:]) / sum(job.lengths) * 1e6),
            peak_memory(job),
        ],
    )


@torch.no_grad()
def sglang_states(runner: TargetRunner, job: Job, batch: TargetBatch) -> States:
    """Collect aux states and distributions from ``batch``, the final state from a bare forward."""
    real, supervised = job.attention_mask.bool(), shift_left(job.attention_mask).bool()
    docs = documents(job.input_ids, job.attention_mask, job.attention_mask, trim=False)
    last, head = runner.forward(torch.from_numpy(docs.tokens), docs.lengths.tolist()).last, runner.head()
    argmax, top5 = map(torch.cat, zip(*(rank(head(part)) for part in last.split(CHUNK)), strict=True))
    hidden = torch.cat((batch.aux_hidden_states.cpu()[real], last.cpu()), dim=-1).unflatten(-1, (-1, last.shape[-1]))
    mask = batch.position_mask.squeeze(-1).cpu()[supervised]
    return States(hidden, argmax, top5, batch.target_probs.cpu()[supervised], mask)


def rank(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return argmax and top 5 on the CPU; apart, since bf16 logits tie and the two need not break a tie alike."""
    return logits.argmax(dim=-1).cpu(), logits.topk(5, dim=-1).indices.cpu()


def sanity(runner: Any, job: Job, batch: TargetBatch, states: States) -> list[Check]:
    """Check shapes, dtypes and values of one batch, and that no KV slot was lost."""
    info, (b, s), d = runner.info, job.input_ids.shape, len(job.selected)
    expected = {
        "aux_hidden_states": f"{[b, s, 3 * info.hidden_size]} {runner.dtype}",
        "target_probs": f"{[b, s, d]} torch.float32",
        "position_mask": f"{[b, s, 1]} torch.bool",
    }
    off_one = float((states.probs.sum(dim=-1) - 1).abs().max())
    padding = batch.aux_hidden_states.cpu()[~job.attention_mask.bool()]
    embeddings = list(runner.input_embeddings().shape)
    return [
        *(judge(k, f"{list((x := getattr(batch, k)).shape)} {x.dtype}", "==", v) for k, v in expected.items()),
        judge("input embeddings", embeddings, "==", [info.vocab_size, info.hidden_size]),
        judge("values not finite", int((~states.hidden.isfinite()).sum()), "==", 0),
        judge("all-zero states", int((states.hidden == 0).all(dim=-1).sum()), "==", 0),
        judge("padding is zero", not padding.any(), "==", True),
        judge("target_probs: largest |sum - 1|", off_one, "<=", 1e-3),
        Check("share of positions in the draft vocabulary", mean(states.position_mask)),
        judge("KV slots free afterwards", runner.free_slots(), "==", runner.capacity.tokens),
    ]


def mean(values: torch.Tensor) -> float:
    """Return the mean; of a mask, the share of true."""
    return float(values.double().mean())


def peak_memory(job: Job) -> Check:
    """Report the peak so far: of torch on the GPU, or of this process."""
    peak = torch.cuda.max_memory_allocated() if job.cuda else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Check("peak memory so far, GiB", peak / 2**30)


def run_transformers(job: Job, sglang: States, layers: list[int]) -> list[Check]:
    """Stage 2, once SGLang is closed: the two need not fit beside each other."""
    request = job.request
    # No attn_implementation: transformers takes sdpa for every model that has it.
    model = AutoModelForCausalLM.from_pretrained(
        request.target, dtype=request.dtype, trust_remote_code=request.trust_remote_code
    )
    model = model.to(request.device).eval()
    rows = [reference_row(model, job, row, layers) for row in range(len(job.lengths))]
    hf = States(*(torch.cat(parts) for parts in zip(*rows, strict=True)))
    limits = EXACT if not job.cuda and request.dtype == torch.float32 else ROUNDED
    if request.options.get("quantization"):
        limits = QUANTISED
    return [*compare(sglang, hf, layers, limits, job.real_text), peak_memory(job)]


@torch.no_grad()
def reference_row(model: PreTrainedModel, job: Job, row: int, layers: list[int]) -> States:
    """Run one padded row once for every CHUNK of its logits: the model's own head, but never all of a long row."""
    ids, mask = (x[row : row + 1].to(model.device) for x in (job.input_ids, job.attention_mask))
    length, selected, ranked, probs = job.lengths[row], job.selected.to(model.device), [], []
    for keep in torch.arange(length, device=model.device).split(CHUNK):
        output = model(ids, attention_mask=mask, output_hidden_states=True, use_cache=False, logits_to_keep=keep)
        ranked.append(rank(output.logits[0]))
        probs.append(torch.softmax(output.logits[0].index_select(-1, selected).float(), dim=-1).cpu())
    # hidden_states[0] is the embedding; the last one alone has passed the final norm.
    hidden = torch.stack([output.hidden_states[i][0, :length].cpu() for i in (*(i + 1 for i in layers), -1)], dim=1)
    argmax, top5 = map(torch.cat, zip(*ranked, strict=True))
    return States(hidden, argmax, top5, torch.cat(probs)[1:], job.member[argmax][1:])


def compare(sglang: States, hf: States, layers: list[int], limits: Limits, real_text: bool) -> list[Check]:
    """Judge the distance between the two sides."""
    checks = []
    for i, name in enumerate([*(f"aux layer {layer}" for layer in layers), "final hidden"]):
        ours, theirs = sglang.hidden[:, i].double(), hf.hidden[:, i].double()
        cosine = torch.cosine_similarity(ours, theirs, dim=-1)
        least = limits.cosine_mean if i < len(layers) else limits.final_cosine
        checks += [
            judge(f"{name}: cosine mean", mean(cosine), ">=", least),
            Check(f"{name}: cosine min", float(cosine.min())),
            near(f"{name}: max abs diff", ours, theirs, limits.max_abs),
        ]
    in_top5 = (sglang.argmax[:, None] == hf.top5).any(dim=-1)
    agreement = [
        judge("argmax match", mean(sglang.argmax == hf.argmax), ">=", limits.argmax),
        judge("SGLang top-1 in HF top-5", mean(in_top5), ">=", limits.top5),
        judge("position_mask agreement", mean(sglang.position_mask == hf.position_mask), ">=", limits.argmax),
    ]
    checks += agreement if real_text else [replace(c, limit="informational", passed=None) for c in agreement]
    pairs = list(zip(hf.probs.split(CHUNK), sglang.probs.split(CHUNK), strict=True))
    kl = torch.cat([divergence(p, q) for p, q in pairs])
    return [
        *checks,
        near("target_probs: max abs diff", sglang.probs, hf.probs, limits.max_abs),
        judge("KL(HF || SGLang) mean, nats", mean(kl), "<=", limits.kl_mean),
        Check("KL(HF || SGLang) max, nats", float(kl.max())),
    ]


def near(name: str, ours: torch.Tensor, theirs: torch.Tensor, limit: float) -> Check:
    """Return the criterion that no element differs by more than ``limit`` and a few ulps of itself."""
    difference = (ours - theirs).abs()
    if limit == math.inf:
        return Check(name, float(difference.max()))
    passed = bool((difference <= limit + ULPS * torch.finfo(torch.float32).eps * theirs.abs()).all())
    return Check(name, float(difference.max()), f"<= {limit} + {ULPS} ulp", passed)


def divergence(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Return KL(p || q) ``[n]`` in nats of float32 rows ``[n, D]``, whose sums are off one by their rounding."""
    p, q = (x.double() / x.double().sum(dim=-1, keepdim=True) for x in (p, q))
    return (torch.xlogy(p, p) - p * q.clamp_min(torch.finfo(torch.float32).tiny).log()).sum(dim=-1).clamp_min(0)


def prepare(args: argparse.Namespace) -> Job:
    """Check the request and read the input; loads no weights.

    Raises:
        ConfigError: Anything that the user can mend.
    """
    check_arguments(args)
    config = load_config(args)
    text, device = config.get_text_config(), choose_device(args.device)
    options = dict(map(parse_option, args.sglang_arg))
    request = BackendRequest(
        target=args.target,
        device=device,
        dtype=choose_dtype(args.dtype, config, device),
        trust_remote_code=args.trust_remote_code,
        seq_length=args.seq,
        micro_batch_size=args.batch,
        options=options,
    )
    layers, vocab = resolve_aux_layer_ids(args.aux_layer_ids, text.num_hidden_layers), text.vocab_size
    generator = torch.Generator().manual_seed(args.seed)
    rows = [torch.as_tensor(x) for x in (text_rows(args, vocab) if args.text else random_rows(args, vocab, generator))]
    # The draft vocabulary: tokens of the rows first, as in training. Half of V at most, or the mask would be trivial.
    rating = torch.bincount(torch.cat(rows), minlength=vocab) + torch.rand(vocab, generator=generator)
    selected = rating.topk(args.draft_vocab_size or min(32000, vocab // 2)).indices.sort().values
    engine.check_request(request)
    return Job(
        request=request,
        aux_layer_ids=layers,
        input_ids=pad_sequence(rows, batch_first=True),
        attention_mask=pad_sequence([torch.ones_like(row) for row in rows], batch_first=True),
        lengths=[len(row) for row in rows],
        real_text=args.text is not None,
        selected=selected,
        member=torch.zeros(vocab, dtype=torch.bool).index_fill_(0, selected, True),
    )


def check_arguments(args: argparse.Namespace) -> None:
    """Refuse paths and counts that cannot be."""
    out, text, draft = args.json, args.text, 1 if args.draft_vocab_size is None else args.draft_vocab_size
    # A token is supervised by the one before it, so a row has two.
    for flag, value, least in (("batch", args.batch, 1), ("seq", args.seq, 2), ("draft-vocab-size", draft, 1)):
        if value < least:
            raise ConfigError(f"--{flag} {value}: write at least {least}")
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


def parse_option(pair: str) -> tuple[str, Any]:
    """Split ``key=value``; a value is read as JSON, or else as text."""
    key, found, value = pair.partition("=")
    if not found:
        raise ConfigError(f"--sglang-arg {pair}: write key=value")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def random_rows(args: argparse.Namespace, vocab: int, generator: torch.Generator) -> list[torch.Tensor]:
    """Return random tokens; the first row is full, the last half full, so that padding is seen too."""
    lengths = [max(2, int(n)) for n in torch.linspace(args.seq, args.seq / 2, args.batch)]
    return [torch.randint(vocab, (n,), generator=generator) for n in lengths]


def text_rows(args: argparse.Namespace, vocab: int) -> list[list[int]]:
    """Return the first ``--batch`` texts of ``--text`` in the target's tokens, each cut to ``--seq``."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(args.target, trust_remote_code=args.trust_remote_code)
        if args.text.suffix.lower() in chat_data.JSON_LINES:
            chat_data.check_files("--text", [args.text])
            chats = [row["messages"] for row in chat_data.sample("--text", [args.text], args.batch)]
            texts = [tokenizer.apply_chat_template(chat, tokenize=False) for chat in chats]
            rows = [tokenizer(text, add_special_tokens=False).input_ids for text in texts]
        else:
            content = args.text.read_text(encoding="utf-8").strip()
            texts = content.split("\n\n" if "\n\n" in content else "\n")
            rows = [tokenizer(text).input_ids for text in texts if text.strip()][: args.batch]
    except ConfigError:
        raise
    except (OSError, ValueError, KeyError, jinja2.TemplateError) as error:
        raise ConfigError(f"--text {args.text} cannot be rendered in the target's tokens: {error}") from error
    rows = [tokens[: args.seq] for tokens in rows if len(tokens) > 1]
    if not rows:
        raise ConfigError(f"--text {args.text}: its first {args.batch} texts are all shorter than two tokens")
    if (highest := max(map(max, rows))) >= vocab:
        raise ConfigError(f"--target {args.target}: its tokenizer gives id {highest}, its model has {vocab} tokens")
    return rows


def version(package: str) -> str:
    """Return the version of an installed distribution."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def describe(args: argparse.Namespace, job: Job) -> dict[str, Any]:
    """Return what is run, where, on what."""
    hardware = torch.cuda.get_device_name() if job.cuda else f"{platform.machine()}, {torch.get_num_threads()} threads"
    return {
        "command": shlex.join(sys.argv),
        "target": args.target,
        "device": f"{job.request.device} ({hardware})",
        "dtype": str(job.request.dtype),
        "versions": {**{package: version(package) for package in PACKAGES}, "python": platform.python_version()},
        "sglang_args": dict(job.request.options),
        "input": str(args.text or f"random tokens, seed {args.seed}"),
        "row_lengths": job.lengths,
        "aux_layer_ids": job.aux_layer_ids,
        "draft_vocab_size": len(job.selected),
    }


def print_checks(title: str, checks: Sequence[Check]) -> None:
    """Print an aligned table with a verdict a line."""
    values = [f"{c.value:.6g}" if isinstance(c.value, float) else str(c.value) for c in checks]
    name, value, limit = (max(map(len, x)) for x in ([c.name for c in checks], values, [c.limit for c in checks]))
    print(f"\n{title}")
    for check, text in zip(checks, values, strict=True):
        verdict = "-" if check.passed is None else "PASS" if check.passed else "FAIL"
        print(f"  {check.name:<{name}}  {text:>{value}}  {check.limit:<{limit}}  {verdict}")


def run_stages(job: Job, compare_hf: bool) -> dict[str, list[Check]]:
    """Run and print the stages; a model whose capture is not understood fails the first."""
    try:
        states, layers, checks = run_sglang(job)
    except CaptureError as error:
        checks, compare_hf = [Check("capture", str(error), "understood", False)], False
    stages = {"sglang": checks}
    print_checks("stage 1: SGLang", checks)
    if compare_hf:
        stages["compare_hf"] = run_transformers(job, states, layers)
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
    facts = describe(args, job)
    for key, value in facts.items():
        text = ", ".join(f"{k} {v}" for k, v in value.items()) or "defaults" if isinstance(value, dict) else value
        print(f"{key:<18}{text}")
    stages = run_stages(job, args.compare_hf)
    passed = all(check.passed is not False for checks in stages.values() for check in checks)
    if args.json:
        write_json(args.json, facts, stages, passed)
    print("\nPASS" if passed else "\nFAIL: do not train on this target here")
    return passed


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add, text = parser.add_argument, "JSON lines with messages (.jsonl), or plain: one text a line, or between blanks"
    add("--target", required=True, metavar="PATH", help="model folder or hub id")
    add("--batch", type=int, default=4, metavar="N", help="rows (default: %(default)s)")
    add("--seq", type=int, default=512, metavar="N", help="most tokens of a row (default: %(default)s)")
    add("--text", type=Path, metavar="FILE", help=f"{text} (default: random tokens)")
    add("--init-dist", action="store_true", help="make a torch.distributed group first, as AutoModel does")
    add("--compare-hf", action="store_true", help="stage 2: compare with transformers")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: a GPU where there is one")
    add("--dtype", choices=("auto", *DTYPES), default="auto", help="default: the target's on a GPU, float32 on a CPU")
    add("--json", type=Path, metavar="OUT", help="also write the report there")
    add("--aux-layer-ids", type=int, nargs="+", metavar="ID", help="three layers (default: 1, N//2-1, N-4)")
    add("--draft-vocab-size", type=int, metavar="N", help="default: 32000, at most half of the vocabulary")
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
