"""``docs/targets.md`` out of :mod:`architectures` and what ``tests/engine/test_architectures.py`` measured.

The last column is merged in from ``docs/benchmarks/targets_h200.json``, which ``tests/gpu/test_architectures.py``
writes on a GPU; without that file it says "not run".
"""

from __future__ import annotations

import datetime
import json
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from architectures import ARCHITECTURES, CUSTOM, DEFAULT, UNSORTED, Architecture

GPU_RESULTS = Path(__file__).resolve().parents[1] / "docs/benchmarks/targets_h200.json"
COMMAND = "pytest tests/engine/test_architectures.py --targets-table docs/targets.md"
HEADER = """# Targets

What the adapter captures of each class of model that SGLang serves, and how a draft of it is served. Made by a test
run, not by hand:

    {command}

{date}, {versions}, {machine}, float32, tiny random models (8 layers, hidden size 64, vocabulary 500, which SGLang pads
to 512), two texts of 37 and 12 tokens.

**What the numbers are.** Largest absolute difference over all positions:

- *aux*: every decoder layer's output, the last one's too, against transformers' residual stream (plain hooks on its
  decoder layers). Kimi is held against the DeepSeek-V3 that it wraps, MiniCPM against Granite with the same
  multipliers: transformers has no class of its own for either.
- *logits*: the runner's head against transformers' logits.
- *processor*: the runner's head against SGLang's own logits processor, which the tap replaces.
- *served*: the columns trained on against what a fresh SGLang model, without taps or hooks, returns to its draft worker
  once `set_eagle3_layers_to_capture` was called with the ids written, for ids {default}, {custom} and {unsorted}.

**What they do not show.** Nothing here ran with quantised weights (`tests/engine/test_quantised_targets.py`,
`tests/gpu/test_quantised.py`) or with images. "CPU, with …" names what SGLang lacks or gets wrong on a CPU and the
tests put in its place (`tests/cpu_substitutes.py`); there the capture is shown to be right, and not SGLang's kernel.
{gpu}

**Serving.** `recipe_args.capture: serving` trains on what SGLang will capture for the ids written into the draft's
config.json. The rule for these differs between models and is observed at start-up, not known: the column shows what is
written for {custom}. A model that is refused can be trained with `capture: residual`, for another serving engine.

"""
NOTES = """
- **Gemma-3** is refused under `serving` because SGLang's capture yields the last block's output before it is added to
  the residual: no layer's stream.
- **DeepSeek and Kimi** add one to the ids only where the first is 1, so other ids are written one higher; with layer 0
  among them the 1 must not come first: {unsorted} is trained as 0, 3, 5 and written as 4, 6, 1.
- **Unsorted ids**: SGLang captures in ascending order whatever the order of the ids, so `serving` trains in ascending
  order; `residual` keeps the order given.
- **Mistral-3, Llava**: only the text model inside has the setter, and SGLang calls the root's.
- **Mllama**: cross-attention layers do not run without an image and are refused as aux layers.
- **Phi-2** (and Phi-3.5-MoE, GPT-J): SGLang's logits processor leaves out the bias of the head. The runner adds it; the
  *processor* column compares without it.
- **Soft-capped attention** (Gemma-2) is refused on a CPU, where SGLang ignores the cap.
"""

COLUMNS = (
    "architecture",
    "SGLang class",
    "layers hooked",
    "logits processors tapped",
    "stream",
    "head",
    "`serving`",
    "checked on",
    "aux",
    "logits",
    "processor",
    "served",
    "on a GPU: aux, logits, served",
)

_results: dict[str, dict[str, Any]] = {}


def add(architecture: Architecture, results: dict[str, Any]) -> None:
    """Keep what was measured of a target."""
    _results[architecture.name] = results


def facts(architecture: Architecture) -> str:
    """Return the part of a target's row that is the same on every machine."""
    layers = f"`{architecture.path}.layers`"
    processors = ", ".join(f"`{name}`" for name in architecture.processors)
    if isinstance(architecture.serving, str):
        serving = "refused: " + architecture.serving
    else:
        serving = f"{architecture.rule}: {', '.join(map(str, architecture.serving[CUSTOM].written))}"
    substitutes = ", ".join(name.replace("_", " ") for name in architecture.substitutes)
    checked = "CPU" + (f", with {substitutes}" if substitutes else "")
    stream = architecture.stream.replace("+", " + ")
    cells = [architecture.name, f"`{architecture.sglang_class}`", layers, processors, stream, architecture.head]
    return "| " + " | ".join([*cells, serving, checked]) + " |"


def gpu_results() -> dict[str, Any]:
    """Return the committed results of ``tests/gpu/test_architectures.py``, empty where there are none."""
    return json.loads(GPU_RESULTS.read_text(encoding="utf-8")) if GPU_RESULTS.is_file() else {}


def gpu_note(run: dict[str, Any]) -> str:
    """Return what the page says about the GPU's column."""
    if not run:
        return "Nothing here ran on a GPU with SGLang's own attention and expert kernels, in bf16."
    return (
        "The last column did run on a GPU with SGLang's own kernels and nothing put in their place, on models four "
        f"times as wide: {run['device']}, {run['dtype']}, {run['date']}, {run['versions']}, `{run['sglang_args']}` "
        "(`tests/gpu/test_architectures.py`). It has the median cosine to transformers in float32 of all layers' rows "
        "and of the logits, in brackets that of transformers' own bf16, and the largest relative difference between "
        "the columns trained on and the states that stock SGLang serves. The worst rows are in "
        "`docs/benchmarks/targets_h200.json`: a near-tie of a random router flips an expert in any bf16."
    )


def gpu_cell(result: dict[str, Any] | None) -> str:
    """Return a target's cell of the GPU's column: numbers, or why there are none."""
    if result is None:
        return "not run"
    if error := result.get("error"):
        words = " ".join(error.split()).replace("|", "/")
        return f"does not run ({result['stage']}): {words[:200]}"
    if result["problems"]:
        return "fails: " + result["problems"][0].replace("|", "/")[:200]
    medians = [f"{result[k]['median']:.4f} ({result[k]['transformers']['median']:.4f})" for k in ("aux", "logits")]
    return ", ".join([*medians, _number(result["served"])])


def _number(difference: float | None) -> str:
    """Return a difference for the table: a dash where there is none to measure, a bare 0 where the bits agree."""
    return "–" if difference is None else f"{difference:.0e}" if difference else "0"


def write(path: Path) -> str:
    """Write the page if every target was measured in this run, and return what was done."""
    missing = [a.name for a in ARCHITECTURES if not {"aux", "logits", "processor"} <= _results.get(a.name, {}).keys()]
    if missing:
        return f"{path} is left as it is: no results for {', '.join(missing)}"
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("sglang", "torch", "transformers"))
    on_gpu = gpu_results()
    page = HEADER.format(
        gpu=gpu_note(on_gpu),
        command=COMMAND,
        date=datetime.datetime.now(tz=datetime.UTC).date(),
        versions=f"Python {platform.python_version()}, {versions}",
        machine=f"{platform.machine()} CPU",
        **{name: list(ids) for name, ids in (("default", DEFAULT), ("custom", CUSTOM), ("unsorted", UNSORTED))},
    )
    page += f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|\n"
    for architecture in ARCHITECTURES:
        found = _results[architecture.name]
        numbers = [_number(found.get(k)) for k in ("aux", "logits", "processor", "served")]
        numbers.append(gpu_cell(on_gpu.get("targets", {}).get(architecture.name)))
        page += f"{facts(architecture)} {' | '.join(numbers)} |\n"
    path.write_text(page + NOTES.format(unsorted=list(UNSORTED)), encoding="utf-8")
    slowest = max(found.get("seconds", 0.0) for found in _results.values())
    return f"{path} written; the slowest start-up check took {slowest:.2f} s"
