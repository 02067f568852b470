"""Where the target of a run lives: in this process, in one of its own beside it, or sharded over several ranks."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from nemo_eagle3_sglang import backends
from nemo_eagle3_sglang.config.schema import RecipeArgs
from nemo_eagle3_sglang.contracts import AuxPlan, BackendRequest, SupervisionSource
from nemo_eagle3_sglang.errors import ConfigError
from nemo_eagle3_sglang.sidecar.client import SidecarSource, target_group
from nemo_eagle3_sglang.supervision.aux_layers import resolve_aux_layer_ids
from nemo_eagle3_sglang.supervision.source import RunnerSource

logger = logging.getLogger(__name__)

# SGLang's parallel state is one per process, and wants a default process group that is the target's alone.
ALONE_IN_ITS_PROCESS = ("sglang",)
# They run nothing here: there is no process to choose.
ELSEWHERE = ("remote",)


def backend_request(args: RecipeArgs, device: torch.device, dtype: torch.dtype) -> BackendRequest:
    """Return what the selected backend's factory is given."""
    return BackendRequest(
        target=args.target_model_name_or_path,
        device=device,
        dtype=dtype,
        trust_remote_code=args.trust_remote_code,
        # A packed row holds chats of up to its whole length.
        seq_length=args.packed_sequence_size or args.seq_length,
        micro_batch_size=args.micro_batch_size,
        kv_pool=args.kv_pool,
        capture=args.capture,
        self_check=args.self_check,
        options=args.backend_options(),
    )


def tp_size(options: Mapping[str, Any]) -> int:
    """Return how many ranks share the target; what is no number is refused by the engine's own check."""
    size = options.get("tp_size", 1)
    return size if isinstance(size, int) and size > 0 else 1


def batches_ahead(args: RecipeArgs, world: int) -> int:
    """Return how many micro-batches the target is given before the draft has trained on the one before them.

    Raises:
        ConfigError: The target cannot run beside the trainer.
    """
    depth = args.target_prefetch_depth
    if not depth or args.target_model_backend in ELSEWHERE:
        return depth
    if choose_process(args, world) == "inline":
        raise ConfigError(
            f"recipe_args.target_prefetch_depth: {depth} needs a target that runs beside the trainer; write 0, or "
            "target_process: sidecar"
        )
    return 1


def choose_process(args: RecipeArgs, world: int) -> str:
    """Return ``inline`` or ``sidecar``: where ``recipe_args.target_process`` puts the target; see ``schema.py``.

    Args:
        args: The recipe's.
        world: Processes of the job.

    Raises:
        ConfigError: The job's processes cannot be divided among the targets, or ``inline`` is asked for where the
            target needs a process of its own.
    """
    if args.target_model_backend in ELSEWHERE:
        if args.target_process == "sidecar" or args.sglang_python is not None:
            key = "sglang_python" if args.sglang_python is not None else "target_process: sidecar"
            raise ConfigError(
                f"recipe_args.{key}: target_model_backend: {args.target_model_backend} runs no target here; remove it"
            )
        return "inline"
    tp = tp_size(args.backend_options())
    if world % tp:
        raise ConfigError(
            f"recipe_args.sglang_args.tp_size: {tp} GPUs share a target, this job has {world} processes; start it "
            f"with --nproc-per-node {tp} or a multiple of it"
        )
    alone = args.target_model_backend in ALONE_IN_ITS_PROCESS
    reason = None
    if args.sglang_python is not None:
        reason = f"recipe_args.sglang_python: {args.sglang_python} is another Python"
    elif tp > 1:
        reason = f"recipe_args.sglang_args.tp_size: {tp} ranks share it"
    elif world > 1 and alone:
        reason = f"this job has {world} processes, and SGLang wants a process group of its own"
    if args.target_process == "inline" and reason:
        raise ConfigError(
            f"recipe_args.target_process: inline is not possible, {reason}; write sidecar, or leave it out"
        )
    if args.target_process == "auto":
        return "sidecar" if reason else "inline"
    return args.target_process


def open_source(args: RecipeArgs, request: BackendRequest, world: int, timeout_s: float) -> SupervisionSource:
    """Load the target where it belongs and return what supervision comes from.

    Args:
        args: The recipe's.
        request: What the backend is given; the rows of one rank.
        world: Processes of the job.
        timeout_s: How long a rank may keep others waiting.

    Raises:
        ConfigError: See :func:`choose_process` and the backend's own.
        CaptureError: The target's states cannot be captured with certainty.
    """
    if choose_process(args, world) == "inline":
        opened = backends.load(args.target_model_backend)(request)
        return opened if isinstance(opened, SupervisionSource) else RunnerSource(opened)
    tp = tp_size(request.options)
    group, store = target_group(tp, request.device, timeout_s)
    shared = dataclasses.replace(request, tp_rank=group.rank, micro_batch_size=tp * request.micro_batch_size)
    logger.info("The target runs in a process of its own%s", f", shared by {tp} ranks" if tp > 1 else "")
    return SidecarSource(args.target_model_backend, shared, group, args.sglang_python, store)


def plan_aux_layers(source: SupervisionSource, aux_layer_ids: Sequence[int] | None) -> AuxPlan:
    """Return what to train on and what to write; the engine's own plan where it makes one.

    An engine that says nothing about serving is taken to be served by SGLang, which captures in ascending order
    whatever the draft's config.json says: the draft's input columns would otherwise be permuted without any error.
    """
    ids = resolve_aux_layer_ids(aux_layer_ids, source.info.num_hidden_layers)
    planner = getattr(source, "plan_aux_layers", None)
    plan = (planner(ids) if planner else None) or AuxPlan(trained=sorted(ids), written=sorted(ids))
    if plan.trained != ids:
        logger.warning(
            "recipe_args.aux_layer_ids: %s are trained as %s, the order in which SGLang captures them when it serves",
            ids,
            plan.trained,
        )
    logger.info("Aux layers %s, written for the serving engine as %s", plan.trained, plan.written)
    return plan
