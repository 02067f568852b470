"""One target in SGLang and in transformers: what is captured, what the head gives, what is served; on a GPU in bf16.

The yardstick is transformers in float32 with the checkpoint's own (bf16) weights. How far bf16 may be from it depends
on the model and its weights, so transformers itself is run in bf16 beside it: SGLang must be about as near.
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
import dataclasses
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import architectures
import quantised
import tiny_models
import torch
from architectures import BY_NAME, CUSTOM, DEFAULT, LAYERS, LENGTHS, TOKENS, UNSORTED, Architecture
from cpu_substitutes import substituted
from quantised import QUANTISED_BY_NAME, Quantised
from stock import Stock, run_stock

from nemo_eagle3_sglang.contracts import AuxPlan, BackendRequest
from nemo_eagle3_sglang.engine.runner import SGLangRunner
from nemo_eagle3_sglang.engine.self_check import SAME, relative_distance
from nemo_eagle3_sglang.errors import CaptureError, ConfigError

# Without a GPU: float32, with what SGLang lacks on a CPU put in its place.
ON_CPU = os.environ.get("ZOO_DEVICE") == "cpu" or not torch.cuda.is_available()
DEVICE = torch.device("cpu") if ON_CPU else torch.device("cuda", 0)
DTYPE = torch.float32 if ON_CPU else torch.bfloat16
# Heads of 64 and hidden size 256: the kernels for rope, MoE and MLA do not take the CPU's heads of 16.
WIDTH = 4

# Whether int4 experts add as SGLang ships them; see repeatable_experts().
ATOMICS = contextvars.ContextVar("ATOMICS", default=False)

# A row (one token at one layer) is near when its cosine to float32 is at least this. transformers' own bf16 on a CPU,
# dense targets of this table: at least 0.9936, median 0.9996 or more; neighbouring layers are 0.95 apart or less.
NEAR = 0.99
# A wrong expert, picked at a near-tie of the router, turns a single row into another (0.45 seen in transformers' own
# bf16, a third of the rows of gpt-oss below NEAR). So nothing is asked of the worst row, but of the median and of the
# share of near rows, and both relative to transformers' own bf16. Flips are not the same ones in two engines.
TIMES_THE_FLOOR, ROUNDING, SHARE = 3.0, 3e-4, 0.2
# Two orders below a wrong scale, cap or row; kernels of one model in one dtype differ by rounding.
SAME_LOGITS = 2e-2

Stage = Callable[[str], None]


def request_for(folder: Path, architecture: Architecture | None = None, **overrides: Any) -> BackendRequest:
    """Return a request for ``folder`` on the device, with a small KV pool: several workers share the GPU."""
    options: dict[str, Any] = {}
    if not ON_CPU:
        options = {"max_total_tokens": 4096, "max_running_requests": 64, "mem_fraction_static": 0.3}
        options |= dict(pair.split("=", 1) for pair in os.environ.get("SGLANG_ARGS", "").split())
        options |= architecture.gpu_options if architecture else {}
    fields = {"device": DEVICE, "dtype": DTYPE, "trust_remote_code": True, "options": options}
    return tiny_models.make_request(folder, **{**fields, **overrides})


def place(names: tuple[str, ...]) -> contextlib.AbstractContextManager[Any]:
    """Put CPU substitutes in place on a CPU; on a GPU everything is SGLang's own."""
    return substituted(names) if ON_CPU else contextlib.nullcontext()


def cosines(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """Return the cosine of each row, on the CPU; the shapes must agree."""
    assert ours.shape == theirs.shape, f"{tuple(ours.shape)} beside {tuple(theirs.shape)}"
    return torch.cosine_similarity(ours.detach().double(), theirs.detach().double(), dim=-1).cpu()


def summary(rows: torch.Tensor) -> dict[str, float]:
    """Return what is kept of the cosines of many rows."""
    return {"median": rows.median().item(), "min": rows.min().item(), "near": (rows >= NEAR).double().mean().item()}


class Checks:
    """Collects what is wrong, so that one run shows all of it."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def expect(self, fine: bool, words: str) -> None:
        if not fine:
            self.problems.append(words)

    def near(self, name: str, found: dict[str, float], floor: dict[str, float]) -> None:
        """Ask that ``found`` is about as near to float32 as transformers' own bf16."""
        allowed = TIMES_THE_FLOOR * (1 - floor["median"]) + ROUNDING
        self.expect(1 - found["median"] <= allowed, f"{name}: median cosine {found['median']:.5f}, {floor=}")
        enough = floor["near"] - SHARE
        self.expect(found["near"] >= enough, f"{name}: {found['near']:.2f} of the rows are near, {floor=}")


def reference_pair(
    model: Any, round_activations: Callable[[Any], None] | None = None
) -> tuple[architectures.Reference, architectures.Reference]:
    """Return what transformers gives in float32 and in the device's dtype, there with activations rounded too."""
    tokens = TOKENS.to(DEVICE)
    # float32 must be float32, and transformers' grouped product of experts is made for bf16.
    torch.backends.cuda.matmul.allow_tf32 = False
    model.set_experts_implementation("eager")
    exact = architectures.reference(model.to(DEVICE), tokens, LENGTHS)
    rounded = copy.deepcopy(model)
    for parameter in rounded.parameters():
        parameter.data = parameter.data.to(DTYPE)
    if round_activations:
        round_activations(rounded)
    return exact, architectures.reference(rounded, tokens, LENGTHS)


@contextlib.contextmanager
def opened(request: BackendRequest) -> Iterator[SGLangRunner]:
    runner = SGLangRunner.build(request)
    try:
        yield runner
    finally:
        runner.close()


def measure(name: str, stage: Stage) -> dict[str, Any]:
    """Run one target of :mod:`architectures` and return numbers, and ``problems`` in words."""
    architecture = BY_NAME[name]
    with tempfile.TemporaryDirectory() as folder, place(architecture.substitutes):
        stage("transformers")
        with architectures.widened(WIDTH):
            model = architectures.save(architecture, Path(folder), DTYPE)
        return compare(architecture, Path(folder), model, stage)


def measure_quantised(name: str, stage: Stage) -> dict[str, Any]:
    """Run one target of :mod:`quantised` against transformers with the dequantised weights."""
    case = QUANTISED_BY_NAME[name]
    substitutes = (*case.architecture.substitutes, *([case.substitute] if case.substitute else []))
    with tempfile.TemporaryDirectory() as folder, place(substitutes):
        stage("transformers")
        with architectures.widened(WIDTH):
            model = quantised.save(case, Path(folder), DTYPE)
        with repeatable_experts():
            return compare(case.architecture, Path(folder), model, stage, case)


@contextlib.contextmanager
def repeatable_experts() -> Iterator[None]:
    """Sum the int4 experts' products in a fixed order.

    SGLang's Marlin experts add with atomics in bf16 on Hopper, so two forwards of one model differ: by half of a state
    where the router turns. What is compared here would drown in that; ``repeat`` in the report tells how much it is.
    """
    if ON_CPU:
        yield
        return
    from sglang.srt.layers.moe.fused_moe_triton import fused_marlin_moe as marlin

    gemm = marlin.moe_wna16_marlin_gemm

    def in_order(*args: Any, **kwargs: Any) -> torch.Tensor:
        return gemm(*args, **{**kwargs, "use_atomic_add": kwargs["use_atomic_add"] and ATOMICS.get()})

    with mock.patch.object(marlin, "moe_wna16_marlin_gemm", in_order):
        yield


def repeat(runner: SGLangRunner) -> float:
    """Return how far two forwards of one runner are apart, with SGLang's kernels as they are."""
    token = ATOMICS.set(True)
    try:
        first, second = (runner.forward(TOKENS, LENGTHS).last.clone() for _ in range(2))
    finally:
        ATOMICS.reset(token)
    return relative_distance(first, second)


def compare(
    architecture: Architecture,
    folder: Path,
    model: Any,
    stage: Stage,
    case: Quantised | None = None,
) -> dict[str, Any]:
    """Hold the checkpoint in ``folder``, in SGLang, against ``model``.

    Args:
        architecture: What is known of the target.
        folder: The checkpoint.
        model: The transformers model with the same weights, in float32.
        stage: Called with the name of each part of the work.
        case: How the checkpoint is quantised, where it is.
    """
    checks = Checks()
    references = reference_pair(model, quantised.fp8_activations if case and case.quantised_activations else None)
    embeddings = model.get_input_embeddings().weight.detach()
    del model
    request = request_for(folder, architecture)
    stage("stock")
    stock = run_stock(request, TOKENS, LENGTHS)
    checks.expect(stock.model_class == architecture.sglang_class, f"SGLang's class is {stock.model_class}")
    if case:
        module, method = case.method
        found = {v for k, v in stock.methods.items() if k.endswith(module)}
        checks.expect(any(method in v for v in found), f"{module} is run by {found}, not by {method}")
    served = {}
    for ids, plan in (architecture.serving if isinstance(architecture.serving, dict) else {}).items():
        stage(f"stock, serving {list(ids)}")
        served[ids] = run_stock(request, TOKENS, LENGTHS, plan.written)
    stage("runner")
    with opened(request) as runner:
        numbers = states_and_logits(runner, references, stock, checks, architecture)
        numbers["served"] = plans(runner, architecture, served, checks)
        residual(runner, references[0], checks)
        rows = runner.input_embeddings()
        wanted = embeddings[: runner.info.vocab_size].to(rows)
        checks.expect(torch.equal(rows, wanted), "the input embeddings are other rows")
        for layer in architecture.skipped:
            checks.expect(refuses(runner, layer), f"layer {layer} does not run, and is not refused")
        if case:
            numbers["repeat"] = repeat(runner)
    if case:
        numbers["methods"] = sorted(set(stock.methods.values()))
    return {**numbers, "problems": checks.problems}


def states_and_logits(
    runner: SGLangRunner,
    references: tuple[architectures.Reference, architectures.Reference],
    stock: Stock,
    checks: Checks,
    architecture: Architecture | None = None,
) -> dict[str, Any]:
    """Hold every layer's state, the final hidden state and the logits against transformers and SGLang's processor."""
    exact, rounded = references
    ids = [i for i, stream in enumerate(exact.streams) if stream is not None]
    runner.set_aux_layers(ids)
    states = runner.forward(TOKENS, LENGTHS)
    logits = runner.head()(states.last)
    aux = states.aux.split(runner.info.hidden_size, dim=-1)
    found = {
        "aux": torch.stack([cosines(state, exact.streams[i]) for i, state in zip(ids, aux, strict=True)]),
        "last layer": cosines(aux[-1], exact.streams[ids[-1]]),
        "last": cosines(states.last, exact.last),
        "logits": cosines(logits, exact.logits[:, : runner.info.vocab_size]),
    }
    floor = {
        "aux": torch.stack([cosines(rounded.streams[i], exact.streams[i]) for i in ids]),
        "last layer": cosines(rounded.streams[ids[-1]], exact.streams[ids[-1]]),
        "last": cosines(rounded.last, exact.last),
        "logits": cosines(rounded.logits, exact.logits)[: len(logits)],
    }
    numbers: dict[str, Any] = {}
    for name, rows in found.items():
        numbers[name] = summary(rows)
        numbers[name]["transformers"] = summary(floor[name])
        checks.near(name, numbers[name], numbers[name]["transformers"])
    for i, state in zip(ids, aux, strict=True):
        medians = {j: cosines(state, exact.streams[j]).median().item() for j in ids}
        nearest = max(medians, key=medians.__getitem__)
        checks.expect(nearest == i, f"layer {i}'s state is nearest to layer {nearest}'s: {medians}")
    ours = logits.float()
    if architecture and architecture.dropped_bias:
        # SGLang leaves the bias out, here as in serving.
        ours = ours - runner.head()(torch.zeros_like(states.last[:1])).float()
    numbers["processor"] = distance(ours, stock.logits)
    checks.expect(numbers["processor"] <= SAME_LOGITS, f"the head is {numbers['processor']:.3f} off the processor's")
    ends = torch.tensor(LENGTHS, device=DEVICE).cumsum(0) - 1
    at_ends = distance(stock.logits[ends], stock.last_logits)
    checks.expect(at_ends <= SAME_LOGITS, f"SGLang's forward returns other logits than its processor: {at_ends:.3f}")
    return numbers


def distance(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return the largest difference of logits, in parts of the largest logit."""
    assert ours.shape == theirs.shape, f"{tuple(ours.shape)} beside {tuple(theirs.shape)}"
    return float((ours.float() - theirs.float()).abs().max() / theirs.float().abs().max())


def plans(
    runner: SGLangRunner, architecture: Architecture, served: dict[tuple[int, ...], Stock], checks: Checks
) -> float | None:
    """Check what is planned under ``serving`` and return how far SGLang's draft input is from what is trained on."""
    largest = None
    for ids in (DEFAULT, CUSTOM, UNSORTED):
        try:
            plan = runner.plan_aux_layers(ids)
        except ConfigError as error:
            wanted = architecture.serving
            checks.expect(isinstance(wanted, str) and wanted in str(error), f"{list(ids)} are refused: {error}")
            continue
        if isinstance(architecture.serving, str):
            checks.expect(False, f"{list(ids)} are planned as {plan}, not refused")
            continue
        wanted = architecture.serving[ids]
        checks.expect(plan == AuxPlan(list(wanted.trained), list(wanted.written)), f"{list(ids)} are planned as {plan}")
        runner.set_aux_layers(plan.trained)
        states = runner.forward(TOKENS, LENGTHS).aux
        largest = max(largest or 0.0, relative_distance(states, served[ids].draft_input))
    checks.expect(largest is None or largest <= SAME, f"the states served are {largest} off those trained on")
    return largest


def residual(runner: SGLangRunner, exact: architectures.Reference, checks: Checks) -> None:
    """Check that ``residual`` keeps unsorted ids in their order."""
    before, runner._request = runner._request, dataclasses.replace(runner._request, capture="residual")
    plan = runner.plan_aux_layers(UNSORTED)
    runner._request = before
    checks.expect(plan == AuxPlan(list(UNSORTED), list(UNSORTED)), f"residual plans {plan}")
    runner.set_aux_layers(plan.trained)
    columns = runner.forward(TOKENS, LENGTHS).aux.split(runner.info.hidden_size, dim=-1)
    ran = [i for i in range(LAYERS) if exact.streams[i] is not None]
    for i, column in zip(UNSORTED, columns, strict=True):
        nearest = max(ran, key=lambda j: cosines(column, exact.streams[j]).median().item())
        checks.expect(nearest == i, f"residual gives layer {nearest} in the place of {i}")


def refuses(runner: SGLangRunner, layer: int) -> bool:
    runner.set_aux_layers([0, layer])
    try:
        runner.forward(TOKENS, LENGTHS)
    except CaptureError:
        return True
    return False
