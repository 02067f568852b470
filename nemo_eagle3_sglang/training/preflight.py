"""Everything that can be refused before any weights load: nothing is written until all of it holds.

Each check raises :class:`~nemo_eagle3_sglang.errors.ConfigError` with the YAML key, its value and what to write.
What needs AutoModel's code (draft registry, chat rendering) is in ``recipe.py``.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from omegaconf import OmegaConf
from transformers import AutoConfig, PretrainedConfig

from nemo_eagle3_sglang import backends
from nemo_eagle3_sglang.config import values
from nemo_eagle3_sglang.config.schema import Config, RecipeArgs
from nemo_eagle3_sglang.errors import ConfigError
from nemo_eagle3_sglang.supervision.aux_layers import resolve_aux_layer_ids

logger = logging.getLogger(__name__)


def world_size() -> int:
    """Return the processes of this job, as torchrun or a scheduler tells them."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def check_device(wanted: str) -> torch.device:
    """Return the device that the recipe will train on.

    Args:
        wanted: ``auto``, ``cuda`` or ``cpu``.

    Raises:
        ConfigError: CUDA was asked for and torch has none, or a GPU is there that this torch cannot use.
    """
    usable, present = torch.cuda.is_available(), _gpu_present()
    if wanted == "cpu" and usable:
        raise ConfigError(
            "recipe_args.device: 'cpu' on a host with GPUs: AutoModel would still take one; "
            "hide them with CUDA_VISIBLE_DEVICES= (empty) in the environment"
        )
    if not usable and (wanted == "cuda" or (wanted == "auto" and present)):
        raise ConfigError(f"recipe_args.device: {wanted!r} needs a CUDA device, but {_cuda_problem(present)}")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if usable else torch.device("cpu")


def _gpu_present() -> bool:
    """Return whether the host has an NVIDIA GPU that was not hidden on purpose."""
    return Path("/dev/nvidia0").exists() and os.environ.get("CUDA_VISIBLE_DEVICES", "0") not in ("", "-1")


def _cuda_problem(present: bool) -> str:
    build = torch.version.cuda
    if build is None:
        return f"torch {torch.__version__} is built without CUDA; install the CUDA build that sglang pins"
    if present:
        return (
            f"torch {torch.__version__} (CUDA {build}) cannot use the one in this host; the NVIDIA driver is likely "
            f"older than CUDA {build} needs: update it"
        )
    return (
        f"torch {torch.__version__} (CUDA {build}) sees none; "
        "a small model can be trained on a CPU with --recipe_args.device=cpu"
    )


def load_target_config(args: RecipeArgs) -> PretrainedConfig:
    """Load the target's config.json from a folder or the hub."""
    target = args.target_model_name_or_path
    if _reads_as_folder(target) and not Path(target).is_dir():
        raise ConfigError(f"recipe_args.target_model_name_or_path: there is no folder {target}")
    if Path(target).is_dir() and not (Path(target) / "config.json").is_file():
        raise ConfigError(f"recipe_args.target_model_name_or_path: {target} holds no config.json")
    try:
        return AutoConfig.from_pretrained(target, trust_remote_code=args.trust_remote_code)
    except (OSError, ValueError, ImportError, AttributeError, StrictDataclassError) as error:
        raise ConfigError(f"recipe_args.target_model_name_or_path: {target!r} cannot be read: {error}") from error


def _reads_as_folder(target: str) -> bool:
    """Return whether ``target`` can only be meant as a local folder, so that no hub need be asked."""
    return (
        target.startswith((".", "/", "~")) or target.count("/") > 1 or ("/" in target and Path(target).parent.is_dir())
    )


# What a checkpoint cannot be gone on without: the draft's weights mean nothing under another value.
RESUME_FIXED = (
    "target_model_name_or_path",
    "aux_layer_ids",
    "capture",
    "draft_vocab_size",
    "draft_config",
    "fc_norm",
    "norm_output",
)
RESUME_NOTED = (
    "train_data_path",
    "train_split",
    "mask_reasoning_content",
    "seq_length",
    "packed_sequence_size",
    "micro_batch_size",
    "grad_accumulation_steps",
    "ttt_steps",
    "freeze_embeddings",
)


def check_resume(checkpoint: Path, args: RecipeArgs, text: PretrainedConfig) -> list[str]:
    """Compare the configuration that AutoModel keeps in a checkpoint with this run's.

    Args:
        checkpoint: Folder that the run would resume from.
        args: This run's.
        text: The target's text config.

    Returns:
        What else differs, to be logged: ``key: then -> now``.

    Raises:
        ConfigError: The target, the layers or the draft differ: training would silently go on with the wrong draft.
    """
    path = checkpoint / "config.yaml"
    if not path.is_file():
        return []
    saved = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    # As AutoModel reads it: ${VAR} replaced, "200" a number. A variable that is not set any more stays as written.
    then = values.read(saved.get("recipe_args", {}), "recipe_args", []) if isinstance(saved, dict) else {}

    def differing(keys: Sequence[str]) -> list[str]:
        pairs = ((key, then.get(key, type(args).model_fields[key].default), getattr(args, key)) for key in keys)
        return [
            f"{key}: {old} -> {new}"
            for key, old, new in pairs
            if _comparable(key, old, text, args.capture) != _comparable(key, new, text, args.capture)
        ]

    if changed := differing(RESUME_FIXED):
        raise ConfigError(
            f"{checkpoint} is the checkpoint of another draft ({'; '.join(changed)}); this run would go on from it: "
            "choose another recipe_args.output_dir, or remove the checkpoints"
        )
    return differing(RESUME_NOTED)


def _comparable(key: str, value: Any, text: PretrainedConfig, capture: str) -> Any:
    """Return ``value`` in a form in which two ways to write the same thing are equal."""
    if key == "aux_layer_ids":
        ids = resolve_aux_layer_ids(value, text.num_hidden_layers)
        # Under `serving` the engine may sort them; under `residual` the order is that of the draft's input columns.
        return ids if capture == "residual" else sorted(ids)
    if key == "draft_vocab_size":
        return value or text.vocab_size
    if key in ("target_model_name_or_path", "draft_config") and value and Path(value).exists():
        return str(Path(value).resolve())
    return value


def check_target(args: RecipeArgs, config: PretrainedConfig) -> list[int]:
    """Check the recipe against the target's config and return the aux ids.

    Raises:
        ConfigError: No dtype in the config, aux ids, sequence length or draft vocabulary that the target cannot have.
    """
    text, target = config.get_text_config(), args.target_model_name_or_path
    if (getattr(text, "dtype", None) or getattr(config, "dtype", None)) is None:
        raise ConfigError(
            f'{target}: config.json names no dtype, and the draft takes its own from it; add "dtype": "bfloat16" '
            "(or what the weights are in)"
        )
    context = getattr(text, "max_position_embeddings", None)
    if context is not None and args.seq_length > context:
        raise ConfigError(
            f"recipe_args.seq_length: {args.seq_length} is longer than the target's context of {context} tokens "
            f"(max_position_embeddings); write at most {context}"
        )
    if args.draft_vocab_size is not None and args.draft_vocab_size > text.vocab_size:
        raise ConfigError(
            f"recipe_args.draft_vocab_size: {args.draft_vocab_size} is larger than the target's vocabulary of "
            f"{text.vocab_size}; write at most that, or null for all of it"
        )
    return resolve_aux_layer_ids(args.aux_layer_ids, text.num_hidden_layers)


def check_output_dir(path: str, key: str = "recipe_args.output_dir") -> None:
    """Prove that a folder can be made at ``path``, or is there, and that a file can be written in it.

    Leaves nothing behind: the folder itself is made when there is something to put in it.

    Args:
        path: The folder.
        key: YAML key, for the error.
    """
    try:
        existing = next(folder for folder in (Path(path), *Path(path).parents) if folder.exists())
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise ConfigError(f"{key}: {path} cannot be written: {error.strerror or error}") from error


def is_ours(args: RecipeArgs) -> bool:
    """Return whether the target comes from a registered backend, not from AutoModel's own or its cache."""
    return backends.is_registered(args.target_model_backend) and args.cached_target_path is None


def flat_obstacle(config: Config, llama_draft: bool) -> str | None:
    """Return why this package's trainer cannot train the configured draft; ``None`` where it can.

    Args:
        config: The validated YAML.
        llama_draft: Whether the draft is AutoModel's ``LlamaEagle3DraftModel`` itself, whose layer the trainer runs.
    """
    args = config.recipe_args
    if not is_ours(args):
        return "the supervision comes from AutoModel, in its own layout"
    if not llama_draft:
        return "the draft is not AutoModel's Llama draft"
    if args.lk_loss_type is not None:
        return f"recipe_args.lk_loss_type: {args.lk_loss_type} is AutoModel's loss"
    for name in ("peft", "fp8", "compile"):
        section = getattr(config, name)
        if section is not None and section.get("enabled", True):
            return f"`{name}` rebuilds the draft's layers"
    return None


def choose_trainer(config: Config, llama_draft: bool) -> str:
    """Return ``flat`` or ``automodel``: what ``recipe_args.trainer`` asks for; ``auto`` is flat where it can be."""
    wanted, obstacle = config.recipe_args.trainer, flat_obstacle(config, llama_draft)
    if wanted == "auto" and obstacle and is_ours(config.recipe_args):
        logger.warning("Training with AutoModel's trainer, the slower one: %s", obstacle)
    return "automodel" if obstacle or wanted == "automodel" else "flat"
