"""Configuration: :mod:`.schema` says what the YAML may hold, :mod:`.load` reads it, with overrides, and checks it."""

from __future__ import annotations

from nemo_eagle3_sglang.config.load import load_config, parse_overrides, validate
from nemo_eagle3_sglang.config.schema import Checkpoint, Config, DistEnv, Optimizer, RecipeArgs

__all__ = [
    "Checkpoint",
    "Config",
    "DistEnv",
    "Optimizer",
    "RecipeArgs",
    "load_config",
    "parse_overrides",
    "validate",
]
