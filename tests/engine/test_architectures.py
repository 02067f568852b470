"""Every class of model that SGLang serves: what is captured, what the head gives, and what SGLang will serve.

For each target of :mod:`architectures` the real engine runs on a CPU in float32. :mod:`stock` is the proof that does
not lean on this package: SGLang's own forward over a fresh model without taps or hooks.

``pytest tests/engine/test_architectures.py --targets-table docs/targets.md`` writes the table of results.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import architectures
import pytest
import targets_table
import tiny_models
import torch
from architectures import ARCHITECTURES, CUSTOM, DEFAULT, LAYERS, LENGTHS, TOKENS, UNSORTED, VOCAB, Architecture, Plan
from cpu_substitutes import substituted
from stock import Stock, run_stock

from nemo_eagle3_sglang.contracts import AuxPlan, BackendRequest
from nemo_eagle3_sglang.engine import server_args
from nemo_eagle3_sglang.engine.runner import SGLangRunner
from nemo_eagle3_sglang.errors import CaptureError, ConfigError

HIDDEN = 64
TOLERANCE = 1e-3


@dataclass
class Case:
    """A target in both engines, and what the tests measured of it."""

    architecture: Architecture
    request: BackendRequest
    runner: SGLangRunner
    reference: architectures.Reference
    stock: Stock
    served: dict[tuple[int, ...], Stock]
    results: dict[str, Any] = field(default_factory=dict)


def plans(architecture: Architecture) -> dict[tuple[int, ...], Plan]:
    return architecture.serving if isinstance(architecture.serving, dict) else {}


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """On models this small a second thread only waits for the first, for seconds where other jobs hold the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=ARCHITECTURES, ids=lambda a: a.name)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    architecture = request.param
    folder = tmp_path_factory.mktemp("target")
    model = architectures.save(architecture, folder)
    expected = architectures.reference(model, TOKENS, LENGTHS)
    to_build = tiny_models.make_request(folder, trust_remote_code=True)
    with substituted(architecture.substitutes), one_thread():
        stock = run_stock(to_build, TOKENS, LENGTHS)
        served = {ids: run_stock(to_build, TOKENS, LENGTHS, plan.written) for ids, plan in plans(architecture).items()}
        runner = SGLangRunner.build(to_build)
        built = Case(architecture, to_build, runner, expected, stock, served)
        try:
            yield built
        finally:
            runner.close()
    targets_table.add(architecture, built.results)


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return the largest absolute difference; the shapes must agree."""
    assert ours.shape == theirs.shape
    return float((ours.detach().float() - theirs.detach().float()).abs().max())


def columns(case: Case, ids: Sequence[int]) -> torch.Tensor:
    case.runner.set_aux_layers(ids)
    return case.runner.forward(TOKENS, LENGTHS).aux


def test_every_layer_is_transformers_residual_stream(case):
    architecture, runner = case.architecture, case.runner
    ids = [i for i in range(LAYERS) if i not in architecture.skipped]
    aux = columns(case, ids).split(HIDDEN, dim=-1)
    found = [difference(state, case.reference.streams[i]) for i, state in zip(ids, aux, strict=True)]
    case.results["aux"] = max(found)
    assert max(found) <= TOLERANCE, dict(zip(ids, found, strict=True))
    # The streams must be far enough apart for that to mean something.
    for lower, upper in itertools.pairwise(ids):
        assert difference(case.reference.streams[lower], case.reference.streams[upper]) > 0.1
    assert torch.equal(columns(case, DEFAULT), torch.cat([aux[ids.index(i)] for i in DEFAULT], dim=-1))
    assert runner.info.vocab_size == VOCAB
    assert case.stock.model_class == architecture.sglang_class
    assert runner._capture.text_model.path == architecture.path
    assert ("h+residual" if runner._capture._add_residual else "h") == architecture.stream


def test_a_layer_that_does_not_run_is_refused(case):
    for layer in case.architecture.skipped:
        with pytest.raises(CaptureError, match=rf"decoder layers \[{layer}\] did not run"):
            columns(case, [0, layer])


def test_head_is_transformers_and_the_processors(case):
    case.runner.set_aux_layers([0])
    last = case.runner.forward(TOKENS, LENGTHS).last
    logits = case.runner.head()(last)
    case.results["logits"] = difference(logits, case.reference.logits[:, :VOCAB])
    assert case.results["logits"] <= TOLERANCE
    # SGLang's forward returns those of each sequence's last token.
    ends = torch.tensor(LENGTHS).cumsum(0) - 1
    assert difference(case.stock.logits[ends], case.stock.last_logits) <= TOLERANCE
    ours = logits
    if case.architecture.dropped_bias:
        # SGLang leaves the bias out, here as in serving. When it no longer does, versions.project must not add it.
        bias = case.runner.head()(torch.zeros(1, HIDDEN))
        assert bias.abs().max() > 0.1
        ours = logits - bias
    case.results["processor"] = difference(ours, case.stock.logits)
    assert case.results["processor"] <= TOLERANCE


def test_every_logits_processor_is_tapped(case):
    from sglang.srt.layers.logits_processor import LogitsProcessor

    model = case.runner._runner().model
    assert not [m for m in model.modules() if isinstance(m, LogitsProcessor)]
    assert case.stock.processors == list(case.architecture.processors)


@pytest.mark.parametrize("ids", [DEFAULT, CUSTOM, UNSORTED], ids=["default ids", "custom ids", "unsorted ids"])
def test_plan_under_serving(case, ids):
    if isinstance(case.architecture.serving, str):
        with pytest.raises(ConfigError, match=case.architecture.serving) as error:
            case.runner.plan_aux_layers(ids)
        assert "capture: residual" in str(error.value)
        return
    plan = case.architecture.serving[ids]
    expected = AuxPlan(trained=list(plan.trained), written=list(plan.written))
    # Twice: some models keep flags from one setting to the next.
    assert case.runner.plan_aux_layers(ids) == expected
    assert case.runner.plan_aux_layers(ids) == expected
    # The stock model, served with the written ids, hands its draft what is trained on.
    found = difference(columns(case, plan.trained), case.served[ids].draft_input)
    case.results["served"] = max(found, case.results.get("served", 0.0))
    assert found <= TOLERANCE


def test_unsorted_ids_keep_their_order_under_residual(case, monkeypatch):
    monkeypatch.setattr(case.runner, "_request", dataclasses.replace(case.request, capture="residual"))
    plan = case.runner.plan_aux_layers(UNSORTED)
    assert plan == AuxPlan(trained=list(UNSORTED), written=list(UNSORTED))
    expected = torch.cat([case.reference.streams[i] for i in UNSORTED], dim=-1)
    assert difference(columns(case, plan.trained), expected) <= TOLERANCE


def test_the_start_up_check_is_quick(case):
    """Two to four forwards over 16 tokens; an 8B target on a GPU takes some 30 ms for one."""
    start = time.process_time()
    case.runner._calibrate()
    if plans(case.architecture):
        case.runner.plan_aux_layers(DEFAULT)
    case.results["seconds"] = time.process_time() - start
    # The process's own time, since other jobs may hold the cores.
    assert case.results["seconds"] < 1


def test_the_table_in_the_docs_is_of_these_targets(pytestconfig):
    """Differences move with the machine, the rest must not."""
    if pytestconfig.getoption("targets_table", None):
        pytest.skip("this run writes it")
    page = (Path(__file__).parents[2] / "docs" / "targets.md").read_text(encoding="utf-8")
    for architecture in ARCHITECTURES:
        assert targets_table.facts(architecture) in page


@pytest.mark.parametrize("name", ["enable_dp_attention", "enable_dp_lm_head", "dp_size"])
def test_data_parallel_attention_is_refused_by_name(name, tmp_path):
    value = 2 if name == "dp_size" else True
    request = tiny_models.make_request(tmp_path, options={name: value})
    with pytest.raises(ConfigError, match=rf"recipe_args\.sglang_args\.{name}: {value} cannot be set, .*nothing else"):
        server_args.check_options(request)
