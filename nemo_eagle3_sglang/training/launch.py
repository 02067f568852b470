"""Decides whether an ``automodel`` command is ours, and where it runs: in this process, or in workers started here.

AutoModel's launcher counts CUDA devices and raises when there are none, and with several it re-executes the recipe's
file, which an editable install does not have where it looks. So what is ours never reaches it:

| started by | runs |
|---|---|
| torchrun (``TORCHELASTIC_RUN_ID`` and ``LOCAL_RANK`` are set) | in this process |
| a scheduler that sets all of ``JOB_VARIABLES`` | in this process |
| a user, ``--nproc-per-node N`` | N workers on this host; 1: in this process |
| a user, without it | a worker on each visible GPU; in this process when there is one or none |

An error that every rank has is printed once: rank 0 prints at once, any other waits ``RANK_0_FIRST`` seconds, in which
the job is ended when rank 0 has failed too, and then prints ``[rank r] error: …``.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from packaging.specifiers import SpecifierSet

from nemo_eagle3_sglang.errors import CaptureError, ConfigError
from nemo_eagle3_sglang.training import elastic

if TYPE_CHECKING:
    from nemo_eagle3_sglang.config.schema import Config

RECIPE = "nemo_eagle3_sglang.training.recipe.TrainEagle3SGLangRecipe"
AUTOMODEL_RECIPE = "nemo_automodel.recipes.llm.train_eagle3.TrainEagle3Recipe"
BACKEND_KEY = "recipe_args.target_model_backend"
# Sections by which AutoModel sends the job to another machine, where the same command starts again.
REMOTE_LAUNCHERS = ("skypilot", "nemo_run")

CONFIG_ERROR_STATUS = 2
CAPTURE_ERROR_STATUS = 1
# Seconds. A rank that has failed needs a few to end, with all that is loaded, and torchrun another 0.1 to see it.
RANK_0_FIRST = 5.0

# What torch.distributed and AutoModel read of the job that a process belongs to.
JOB_VARIABLES = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")

AUTOMODEL_SUPPORTED = SpecifierSet(">=0.6.0,<0.7")


@dataclass(frozen=True)
class Command:
    """The arguments of ``automodel``.

    Attributes:
        config: Path of the YAML file.
        nproc_per_node: ``--nproc-per-node``, or None when not given.
        overrides: All other arguments, as they were written.
    """

    config: Path
    nproc_per_node: int | None
    overrides: list[str]


def main(automodel_main: Callable[[], int | None]) -> int | None:
    """Run the command in ``sys.argv`` when it is ours; anything else goes to AutoModel untouched.

    Args:
        automodel_main: AutoModel's own ``main``, which reads ``sys.argv`` itself.

    Returns:
        The exit status.
    """
    command = parse_command(sys.argv[1:])
    if command is None or not is_ours(command):
        return automodel_main()
    return exit_status(lambda: run(command.config, command.overrides, nproc_per_node=command.nproc_per_node))


def run(config_path: str | Path, overrides: Sequence[str], nproc_per_node: int | None = None) -> int:
    """Train as ``config_path`` says, in this process or in workers that are started here.

    Args:
        config_path: YAML file.
        overrides: Command-line arguments or ``key.sub=value`` each, as ``load_config`` takes them.
        nproc_per_node: Processes asked for; None when the user did not say.

    Returns:
        The exit status.

    Raises:
        ConfigError: The user can mend it; nothing has been loaded or written yet.
    """
    elastic.end_with_launcher()
    in_job = is_in_job(nproc_per_node)

    from nemo_eagle3_sglang.config.load import load_config

    config, merged = load_config(config_path, overrides)
    check_automodel_installed()
    workers = 1 if in_job else count_workers(nproc_per_node)
    if (workers if workers > 1 else _world_size()) > 1:
        choose_collectives(config, merged)
    if workers > 1:
        arguments = ["train", str(config_path), *overrides]
        return elastic.start_workers(workers, arguments, CONFIG_ERROR_STATUS)

    if _rank() == 0:
        print("Loading NeMo AutoModel and its libraries, about 20 seconds ...", file=sys.stderr, flush=True)
    _hush_import_attempts()
    from nemo_eagle3_sglang.training.recipe import run_recipe

    run_recipe(merged)
    return 0


def exit_status(action: Callable[[], int | None]) -> int:
    """Run ``action``; errors of ours become one line on stderr, anything else propagates.

    Returns:
        What ``action`` returns, 0 for None; 2 for a ``ConfigError`` (the user can mend it), 1 for a ``CaptureError``
        (the target cannot be trained on).
    """
    try:
        return action() or 0
    except (ConfigError, CaptureError) as error:
        _print_error(f"error: {error}")
        return CONFIG_ERROR_STATUS if isinstance(error, ConfigError) else CAPTURE_ERROR_STATUS
    except KeyboardInterrupt:
        if _world_size() == 1:
            raise
        return 128 + signal.SIGINT  # the launcher says it once; a traceback of each worker says no more


def is_in_job(nproc_per_node: int | None) -> bool:
    """Return whether torchrun or a scheduler has started this process as one of a job, so that it starts none.

    Raises:
        ConfigError: ``--nproc-per-node`` cannot be, or the environment names a job and not this process's place in it.
    """
    if nproc_per_node is not None and nproc_per_node < 1:
        raise ConfigError(f"--nproc-per-node {nproc_per_node}: write how many processes to start, 1 or more")
    # Both, as AutoModel does: SLURM and others may set LOCAL_RANK alone.
    if os.environ.get("LOCAL_RANK") and os.environ.get("TORCHELASTIC_RUN_ID"):
        return True
    world = _world_size()
    missing = [name for name in JOB_VARIABLES if not os.environ.get(name)]
    several = nproc_per_node is not None and nproc_per_node > 1
    if world == 1:
        return not missing and not several
    if missing:
        raise ConfigError(
            f"WORLD_SIZE={world} in the environment makes this one of {world} processes, but {', '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not set. A scheduler sets all of {', '.join(JOB_VARIABLES)}; "
            "to start the processes here, unset WORLD_SIZE and write --nproc-per-node"
        )
    if several:
        raise ConfigError(
            f"--nproc-per-node {nproc_per_node} in a process that is already one of WORLD_SIZE={world}: leave it out, "
            "or unset WORLD_SIZE to start a job of its own"
        )
    return True


def count_workers(nproc_per_node: int | None) -> int:
    """Return how many workers to start on this host; 1: none, this process trains.

    Raises:
        ConfigError: More processes than GPUs.
    """
    if nproc_per_node == 1:
        return 1
    import torch

    gpus = torch.cuda.device_count()
    if nproc_per_node is None:
        if gpus > 1:
            print(
                f"{gpus} GPUs are visible: starting a process on each, the batches are spread over them. "
                "--nproc-per-node N takes the first N, CUDA_VISIBLE_DEVICES chooses others.",
                file=sys.stderr,
                flush=True,
            )
        return max(gpus, 1)
    if 0 < gpus < nproc_per_node:
        raise ConfigError(
            f"--nproc-per-node {nproc_per_node}: each process needs a GPU of its own, and {gpus} "
            f"{'is' if gpus == 1 else 'are'} visible (CUDA_VISIBLE_DEVICES)"
        )
    return nproc_per_node


def choose_collectives(config: Config, merged: dict[str, Any]) -> None:
    """Set gloo in ``merged`` where several processes train on a CPU; AutoModel's default, nccl, needs GPUs.

    Raises:
        ConfigError: The YAML names nccl on a host without a usable GPU.
    """
    import torch

    # With `device: cuda` the recipe says why there is no GPU, which helps more than what is said here.
    if torch.cuda.is_available() or config.recipe_args.device == "cuda":
        return
    named = "backend" in merged.get("dist_env", {})
    if named and "nccl" in config.dist_env.backend:
        raise ConfigError(
            f"dist_env.backend: {config.dist_env.backend!r} needs GPUs, and torch can use none here; several processes "
            "on a CPU take gloo: leave the key out or write --dist_env.backend=gloo"
        )
    if not named:
        merged["dist_env"] = {**merged.get("dist_env", {}), "backend": "gloo"}


def parse_command(argv: Sequence[str]) -> Command | None:
    """Read ``argv`` as AutoModel's parser does; None for ``--help`` and for what that parser would refuse."""
    parser = _QuietParser(add_help=False)
    parser.add_argument("config", type=Path, nargs="?")
    parser.add_argument("--nproc-per-node", "--nproc_per_node", type=int)
    parser.add_argument("-h", "--help", action="store_true")
    try:
        args, overrides = parser.parse_known_args(argv)
    except _Refused:
        return None
    if args.help or args.config is None:
        return None
    return Command(args.config, args.nproc_per_node, overrides)


def is_ours(command: Command) -> bool:
    """Return whether the command names our recipe, or AutoModel's with a backend that is registered with us."""
    config = _peek(command.config)
    if any(config.get(section) for section in REMOTE_LAUNCHERS):
        return False
    recipe = _recipe_name(config)
    if _names(recipe, RECIPE):
        return True
    if not _names(recipe, AUTOMODEL_RECIPE):
        return False

    from nemo_eagle3_sglang.backends import AUTOMODEL_BACKENDS, is_registered

    backend = _backend_name(config, command.overrides)
    # Under AutoModel's recipe `remote` means AutoModel's own servers, which ours cannot talk to.
    return backend is not None and is_registered(backend) and backend not in AUTOMODEL_BACKENDS


def check_automodel_installed() -> None:
    """Raise ``ConfigError`` that names the extra when NeMo AutoModel is missing; nothing of it is imported."""
    if find_spec("nemo_automodel") is None:
        raise ConfigError(
            "training needs NeMo AutoModel, which is not installed here (package nemo_automodel not found). "
            "Install it with: pip install 'nemo-eagle3-sglang[all]'"
        )
    version = metadata.version("nemo-automodel")
    if not AUTOMODEL_SUPPORTED.contains(version, prereleases=True):
        raise ConfigError(
            f"nemo-automodel {version} is installed; this version of nemo-eagle3-sglang works with "
            f"{AUTOMODEL_SUPPORTED} only (0.6.0 with sglang 0.5.17): pip install 'nemo-eagle3-sglang[all]'"
        )


def _hush_import_attempts() -> None:
    """Keep AutoModel from printing a traceback at INFO for every optional library that it tries and does not find.

    Beside SGLang, whose flash-attn-4 installs a package ``flash_attn`` without the functions of version 2, that is
    forty lines of tracebacks at every start of a run that is in order.
    """
    logging.getLogger("nemo_automodel.shared.import_utils").addFilter(lambda record: record.levelno > logging.INFO)


def _world_size() -> int:
    value = os.environ.get("WORLD_SIZE") or "1"
    if not value.isdecimal() or int(value) < 1:
        raise ConfigError(f"WORLD_SIZE={value} in the environment is not a number of processes; unset it")
    return int(value)


def _rank() -> int:
    """Return this process's rank; 0 without a job, since a ``RANK`` alone is left over from something else."""
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isdecimal() and os.environ.get("WORLD_SIZE", "1") not in ("", "1") else 0


def _print_error(text: str) -> None:
    """Print ``text`` on stderr, once for a job in which every rank has it (see the top of this file)."""
    if rank := _rank():
        time.sleep(RANK_0_FIRST)
        text = f"[rank {rank}] {text}"
    print(text, file=sys.stderr, flush=True)


class _Refused(Exception):
    """The parser would have ended the process."""


class _QuietParser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _Refused(message)


def _peek(path: Path) -> Mapping[str, Any]:
    """Return the YAML as it stands, or nothing when it cannot be read: AutoModel then says so in its own words."""
    import yaml

    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    return config if isinstance(config, dict) else {}


def _recipe_name(config: Mapping[str, Any]) -> str:
    recipe = config.get("recipe")
    if isinstance(recipe, dict):
        recipe = recipe.get("_target_")
    return recipe.strip() if isinstance(recipe, str) else ""


def _names(recipe: str, dotted: str) -> bool:
    return recipe in (dotted, dotted.rsplit(".", 1)[1])


def _backend_name(config: Mapping[str, Any], overrides: Sequence[str]) -> str | None:
    """Return the backend that the file and the overrides choose; the last override wins, written with = or a space."""
    recipe_args = config.get("recipe_args")
    backend = recipe_args.get("target_model_backend") if isinstance(recipe_args, dict) else None
    for token, following in zip_longest(overrides, overrides[1:]):
        key, equals, value = token.removeprefix("--").partition("=")
        if token.startswith("--") and key == BACKEND_KEY:
            backend = value if equals else following
    return backend if isinstance(backend, str) else None
