"""Whether a recipe fits its GPUs: the arithmetic of ``memory.py`` on a recipe and the target's config.json."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from transformers import PretrainedConfig

from nemo_eagle3_sglang.config.schema import Config, RecipeArgs
from nemo_eagle3_sglang.engine.server_args import MEM_FRACTION_STATIC, PAGE_ROOM
from nemo_eagle3_sglang.errors import ConfigError
from nemo_eagle3_sglang.training import draft_registry, memory
from nemo_eagle3_sglang.training.preflight import check_target, load_target_config
from nemo_eagle3_sglang.training.target import choose_process

# The CUDA context, NCCL, cuBLAS workspaces and the allocator's fragmentation; measured 1 to 3 GiB without NCCL.
OUTSIDE = 4 * memory.GIB
# A second process on the GPU, for a target beside the trainer; taken to be half as much again, not measured.
BESIDE = 2 * memory.GIB
# Bits of a linear layer's weight where SGLang quantises a bf16 checkpoint as it loads.
LOADED_BITS = {"fp8": 8, "w8a8_int8": 8, "w8a8_fp8": 8}


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a rank of a run needs and has.

    Attributes:
        run: The numbers of the run.
        gpu_bytes: Memory of a GPU.
        pool: ``half`` or ``auto``.
        sidecar: Whether the target has a process of its own.
        share: ``mem_fraction_static``.
    """

    run: memory.Run
    gpu_bytes: float
    pool: str
    share: float
    sidecar: bool = False

    @property
    def outside(self) -> float:
        """Bytes that neither torch nor SGLang counts."""
        return OUTSIDE + (BESIDE if self.sidecar else 0)

    @property
    def reserved(self) -> float:
        """Bytes that SGLang takes: its share of the GPU, or under ``auto`` weights and one forward's pool."""
        parts = self.run.parts()
        needed = parts["target weights"] + parts["KV pool"]
        return needed if self.pool == "auto" else max(needed, self.share * self.gpu_bytes)

    @property
    def peak(self) -> float:
        """Bytes at the worse of the two peaks, the KV pool as it is reserved."""
        parts = self.run.parts()
        return self.run.peak() - parts["target weights"] - parts["KV pool"] + self.reserved

    @property
    def fits(self) -> bool:
        """Whether the peak, and what is outside torch's allocator, is below the GPU's memory."""
        return self.peak + self.outside <= self.gpu_bytes and self._pool_fits

    @property
    def _pool_fits(self) -> bool:
        parts = self.run.parts()
        return self.pool == "auto" or parts["target weights"] + parts["KV pool"] <= self.share * self.gpu_bytes

    def lines(self) -> list[str]:
        """Return the table and the verdict."""
        parts = self.run.parts()
        spare = self.reserved - parts["target weights"] - parts["KV pool"]
        rows = [f"{name + ':':<34}{size / memory.GIB:8.1f} GiB" for name, size in parts.items()]
        if spare > 0:
            name = f"KV pool beyond a forward ({self.share:g}):"
            rows.insert(2, f"{name:<34}{spare / memory.GIB:8.1f} GiB")
        rows.append(f"{'peak in torch and SGLang:':<34}{self.peak / memory.GIB:8.1f} GiB")
        rows.append(f"{'CUDA, NCCL, fragmentation:':<34}{self.outside / memory.GIB:8.1f} GiB")
        rows.append(f"{'a GPU has:':<34}{self.gpu_bytes / memory.GIB:8.1f} GiB")
        return [*rows, "", self.verdict()]

    def verdict(self) -> str:
        """Return one sentence: fits or not, and what to change."""
        free = (self.gpu_bytes - self.peak - self.outside) / memory.GIB
        if self.fits:
            return f"fits, {free:.1f} GiB to spare"
        if not self._pool_fits:
            return (
                "does not fit: weights and one micro-batch's KV pool are more than mem_fraction_static "
                f"{self.share:g} of the GPU. Raise recipe_args.sglang_args.mem_fraction_static, or write "
                "recipe_args.kv_pool: auto"
            )
        cures = ["recipe_args.kv_pool: auto"] if self.pool == "half" else []
        cures += ["a smaller micro_batch_size or packed_sequence_size", "sglang_args.quantization: fp8"]
        return f"does not fit by {-free:.1f} GiB. Try " + ", ".join(cures) + ", or more GPUs (sglang_args.tp_size)"


def make_plan(config: Config, gpus: int, gpu_bytes: float, supervised: float = 1.0) -> Plan:
    """Read the target's config.json and return the plan; nothing else is loaded.

    Args:
        config: The validated YAML.
        gpus: GPUs of the job, one process each.
        gpu_bytes: Memory of a GPU.
        supervised: Share of the tokens that carry loss.

    Raises:
        ConfigError: The target has no config.json that can be read, or the GPUs are not a multiple of ``tp_size``.
    """
    args = config.recipe_args
    target_config = load_target_config(args)
    check_target(args, target_config)
    text = target_config.get_text_config()
    options = args.backend_options()
    tp = _number(options, "tp_size", 1, int)
    if gpus % tp:
        raise ConfigError(f"--gpus {gpus} is not a multiple of recipe_args.sglang_args.tp_size: {tp}")
    if args.seq_length is None or args.ttt_steps is None:
        raise ConfigError("recipe_args.seq_length and recipe_args.ttt_steps are needed for a plan")
    length = args.packed_sequence_size or args.seq_length
    pool, tokens = args.kv_pool, options.get("max_total_tokens")
    if tokens:
        pool = "auto"
    elif pool == "auto":
        forward = tp * args.micro_batch_size * length
        tokens = forward + forward // PAGE_ROOM
    run = memory.Run(
        target=text.to_dict(),
        draft=_draft(args, text),
        world=gpus,
        tp=tp,
        rows=args.micro_batch_size,
        length=length,
        ttt_steps=args.ttt_steps,
        kv_tokens=tokens,
        trainer="automodel" if args.trainer == "automodel" else "flat",
        supervised=supervised,
        linear_bits=LOADED_BITS.get(options.get("quantization"), 16),
    )
    share = _number(options, "mem_fraction_static", MEM_FRACTION_STATIC, float)
    return Plan(run, gpu_bytes, pool, share, sidecar=choose_process(args, gpus) == "sidecar")


def _number(options: Mapping[str, Any], name: str, default: float, kind: Callable[[Any], Any]) -> Any:
    """Return a positive number of ``sglang_args``.

    Raises:
        ConfigError: It is none.
    """
    value = options.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0 or kind(value) != value:
        raise ConfigError(f"recipe_args.sglang_args.{name}: {value!r} is no number above 0")
    return kind(value)


def _draft(args: RecipeArgs, text: PretrainedConfig) -> dict[str, Any]:
    shape = draft_registry.read_file(args.draft_config, text) if args.draft_config is not None else None
    values = draft_registry.draft_config(text, shape).to_dict()
    return {**values, "draft_vocab_size": args.draft_vocab_size or text.vocab_size}
