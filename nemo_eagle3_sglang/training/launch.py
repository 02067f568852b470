"""Decides whether an ``automodel`` command is ours, and runs it in this process.

AutoModel's launcher counts CUDA devices and raises when there are none, and with several it re-executes the recipe's
file under torchrun. A co-located engine is one process, on a GPU or on a CPU, so what is ours never reaches it.
"""

from __future__ import annotations

import logging
import os
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path
from typing import Any, NoReturn

from packaging.specifiers import SpecifierSet

from nemo_eagle3_sglang.errors import CaptureError, ConfigError

logger = logging.getLogger(__name__)

RECIPE = "nemo_eagle3_sglang.training.recipe.TrainEagle3SGLangRecipe"
AUTOMODEL_RECIPE = "nemo_automodel.recipes.llm.train_eagle3.TrainEagle3Recipe"
BACKEND_KEY = "recipe_args.target_model_backend"
# Sections by which AutoModel sends the job to another machine, where the same command starts again.
REMOTE_LAUNCHERS = ("skypilot", "nemo_run")

CONFIG_ERROR_STATUS = 2
CAPTURE_ERROR_STATUS = 1

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


def run(config_path: str | Path, overrides: Sequence[str], nproc_per_node: int | None = None) -> None:
    """Train as ``config_path`` says, in this process.

    Args:
        config_path: YAML file.
        overrides: Command-line arguments or ``key.sub=value`` each, as ``load_config`` takes them.
        nproc_per_node: Processes asked for; None when the user did not say.

    Raises:
        ConfigError: The user can mend it; nothing has been loaded or written yet.
    """
    check_one_process(nproc_per_node)

    from nemo_eagle3_sglang.config.load import load_config

    _, merged = load_config(config_path, overrides)
    check_automodel_installed()
    if nproc_per_node is None:
        _say_that_other_gpus_rest()

    print("Loading NeMo AutoModel and its libraries, about 20 seconds ...", file=sys.stderr, flush=True)
    _hush_import_attempts()
    from nemo_eagle3_sglang.training.recipe import run_recipe

    run_recipe(merged)


def exit_status(action: Callable[[], None]) -> int:
    """Run ``action``; errors of ours become one line on stderr, anything else propagates.

    Returns:
        0, 2 for a ``ConfigError`` (the user can mend it), 1 for a ``CaptureError`` (the target cannot be trained on).
    """
    try:
        action()
    except (ConfigError, CaptureError) as error:
        print(f"error: {error}", file=sys.stderr)
        return CONFIG_ERROR_STATUS if isinstance(error, ConfigError) else CAPTURE_ERROR_STATUS
    return 0


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

    from nemo_eagle3_sglang.backends import is_registered

    backend = _backend_name(config, command.overrides)
    return backend is not None and is_registered(backend)


def check_one_process(nproc_per_node: int | None) -> None:
    """Raise ``ConfigError`` when several processes are asked for, by the option or by torchrun's environment."""
    if nproc_per_node is not None and nproc_per_node != 1:
        raise ConfigError(
            f"--nproc-per-node {nproc_per_node}: several processes are not supported yet, since the co-located SGLang "
            "engine is one process. Write --nproc-per-node 1 or leave it out; CUDA_VISIBLE_DEVICES chooses the GPU."
        )
    world_size = os.environ.get("WORLD_SIZE", "1")
    if world_size != "1":
        raise ConfigError(
            f"WORLD_SIZE={world_size} in the environment (set by torchrun or a job scheduler): several processes are "
            "not supported yet, since the co-located SGLang engine is one process. Start one process: without "
            "torchrun, or with torchrun --nproc-per-node 1."
        )


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


def _say_that_other_gpus_rest() -> None:
    import torch

    gpus = torch.cuda.device_count()
    if gpus > 1:
        # A warning, because no handler shows lower levels before the recipe has set up logging.
        logger.warning(
            "%d GPUs are visible; training is one process on the first. CUDA_VISIBLE_DEVICES chooses another.", gpus
        )


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
