"""At every start: are the states that training will read the ones that SGLang will serve the draft with?

One forward over a few tokens, with every decoder layer hooked and SGLang's own EAGLE-3 capture switched on beside the
hooks. SGLang serves through ``set_eagle3_layers_to_capture``, whose rule for ids differs between models: most add one
to each, deepseek_v2 only when the first id is 1, gpt_oss not when the largest is N, Gemma-3 captures the delta without
the residual. So the rule is not known here, it is observed: of a few candidate ids the ones are taken that lead SGLang
to the hooked states, and they are what the draft's config.json gets.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from nemo_eagle3_sglang.contracts import AuxPlan
from nemo_eagle3_sglang.errors import CaptureError, ConfigError

SETTER = "set_eagle3_layers_to_capture"

# Largest ||served - hooked|| / ||hooked|| over tokens. The two are the same sum of the same tensors, so they agree to
# rounding (bf16: 2^-8); neighbouring layers of real models differ by more than a tenth.
SAME = 2e-2

RESIDUAL_CHOICE = "set recipe_args.capture: residual to train on the residual stream for another serving engine"


@dataclass(frozen=True)
class Observed:
    """One forward with SGLang's capture on.

    Attributes:
        served: ``[T, H]`` each, in the order in which SGLang hands them to a draft.
        streams: ``[T, H]`` each, the residual stream after every decoder layer.
    """

    served: list[torch.Tensor]
    streams: list[torch.Tensor]


def plan_aux_layers(aux_layer_ids: Sequence[int], observe: Callable[[list[int]], Observed]) -> AuxPlan:
    """Return the layers to train on and the ids to write, so that SGLang serves exactly what is trained.

    The order given is kept where SGLang keeps it; where it captures in ascending order, the ids are sorted. Only ids
    that were observed are returned: a rule may depend on their order.

    Args:
        aux_layer_ids: The layers that were asked for.
        observe: Runs one forward with SGLang's capture set to the ids it is given.

    Raises:
        ConfigError: No candidate leads SGLang to these layers; the message says which layers it captures instead.
    """
    asked, ascending = list(aux_layer_ids), sorted(aux_layer_ids)
    for layers in (asked, ascending) if asked != ascending else (ascending,):
        findings = []
        for written in _candidates(layers):
            observed = observe(written)
            found = [_layer_of(state, observed.streams) for state in observed.served]
            if found == layers:
                return AuxPlan(trained=layers, written=written)
            findings.append(_explain(written, layers, found))
    raise ConfigError(
        "recipe_args.capture: 'serving' is not possible with this target, SGLang would serve the draft with other "
        f"states than it is trained on. {' '.join(dict.fromkeys(findings))} Either choose other "
        "recipe_args.aux_layer_ids or " + RESIDUAL_CHOICE
    )


def _candidates(layers: Sequence[int]) -> list[list[int]]:
    """Return the ids that may lead SGLang to ``layers``: as they are, one higher, and so with the first one last.

    The last is for deepseek_v2, which adds one itself to ids that begin with 1: layers 0, 3, 5 take 4, 6, 1.
    """
    higher = [i + 1 for i in layers]
    return [list(layers), higher, [*higher[1:], higher[0]]]


def _layer_of(state: torch.Tensor, streams: Sequence[torch.Tensor]) -> int | None:
    """Return the layer whose stream ``state`` is, or None when it is none's."""
    distances = [relative_distance(state, stream) for stream in streams]
    nearest = min(range(len(distances)), key=distances.__getitem__)
    return nearest if distances[nearest] <= SAME else None


def relative_distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the largest ``||a - b|| / ||b||`` over the tokens of two ``[T, H]`` states; inf for different shapes."""
    if a.shape != b.shape:
        return float("inf")
    norm = b.double().norm(dim=-1)
    ratio = (a.double() - b.double()).norm(dim=-1)[norm > 0] / norm[norm > 0]
    return float(ratio.nan_to_num(float("inf")).max()) if ratio.numel() else float("inf")


def _explain(candidate: Sequence[int], wanted: Sequence[int], found: Sequence[int | None]) -> str:
    if len(found) != len(wanted):
        return f"With ids {list(candidate)} it captures {len(found)} states instead of {len(wanted)}."
    if not any(got is not None for got in found):
        return f"With ids {list(candidate)}, it gives no layer's residual stream for any of them."
    parts = [
        f"layer {want} it gives " + ("no layer's residual stream" if got is None else f"the output of layer {got}")
        for want, got in zip(wanted, found, strict=True)
        if want != got
    ]
    return f"With ids {list(candidate)}, for " + ", for ".join(parts) + "."


def check_setter(model: nn.Module) -> None:
    """Raise ``ConfigError`` for a model that SGLang cannot serve with an EAGLE-3 draft at all."""
    if not callable(getattr(model, SETTER, None)):
        raise ConfigError(
            f"recipe_args.capture: 'serving' is not possible with {type(model).__name__}: SGLang has no EAGLE-3 "
            f"capture for it (no {SETTER}), so it cannot serve the draft; {RESIDUAL_CHOICE}"
        )


@contextlib.contextmanager
def serving_capture(model: nn.Module, ids: Sequence[int]) -> Iterator[None]:
    """Switch SGLang's own capture on for ``ids``, and put the model's flags back afterwards.

    There is no call that switches it off again, and some models keep flags per layer that the setter never clears
    (Qwen3-MoE), so the plain attributes of all modules are restored instead.
    """
    before = {module: _flags(module) for module in model.modules()}
    try:
        getattr(model, SETTER)(list(ids))
        yield
    finally:
        for module, flags in before.items():
            for name in _flags(module).keys() - flags.keys():
                delattr(module, name)
            for name, value in flags.items():
                setattr(module, name, value)


def _flags(module: nn.Module) -> dict[str, Any]:
    """Return a module's own attributes that can be flags: numbers, strings, None, and lists or tuples (copied)."""
    plain = {k: v for k, v in vars(module).items() if isinstance(v, bool | int | float | str | type(None))}
    return plain | {k: type(v)(v) for k, v in vars(module).items() if type(v) in (list, tuple, set)}


def split_served(aux: Any, hidden_size: int) -> list[torch.Tensor]:
    """Return the states in what SGLang hands to its logits processor: a list, or one packed ``[T, K*H]`` tensor.

    Raises:
        CaptureError: Nothing was handed over although the capture is on.
    """
    if aux is None:
        raise CaptureError("SGLang's own EAGLE-3 capture is on but hands no states to the logits processor")
    if isinstance(aux, torch.Tensor):
        return list(aux.split(hidden_size, dim=-1))
    return list(aux)


def check_rows(name: str, rows: int, wanted: int, vocab_size: int, claimed: int | None) -> None:
    """Check that an embedding or head has the rows it claims and at least those of its tokens.

    Args:
        name: For the error.
        rows: Rows of the weight in memory.
        wanted: Tokens that this rank holds, all of the vocabulary where the target is not sharded.
        vocab_size: V of the target's config.
        claimed: Rows without padding as SGLang's module states it, where it does.

    Raises:
        CaptureError: Fewer rows than tokens, or another vocabulary claimed than the config has.
    """
    if rows < wanted:
        raise CaptureError(f"the target's {name} has {rows} rows, its vocabulary {wanted}")
    if claimed is not None and claimed != vocab_size:
        raise CaptureError(
            f"the target's {name} says it holds {claimed} tokens, its config {vocab_size}; rows would be cut wrongly"
        )
