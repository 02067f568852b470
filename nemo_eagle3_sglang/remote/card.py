"""What identifies a target, so that two sides that speak of different ones find out before the first step."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from nemo_eagle3_sglang.contracts import AuxPlan, TargetInfo

# Keys of config.json that differ between two copies of the same model.
VOLATILE = {
    "_name_or_path",
    "transformers_version",
    "torch_dtype",
    "dtype",
    "use_cache",
    "quantization_config",
    "compression_config",
    "architectures",
}
PIECE = 2**26


def read_config(target: str) -> dict[str, object]:
    """Return the target's config.json without what differs between copies of a model; empty where there is none."""
    from transformers.utils import cached_file

    path = Path(target, "config.json") if Path(target).is_dir() else cached_file(target, "config.json")
    if path is None or not Path(path).is_file():
        return {}
    return described(json.loads(Path(path).read_text(encoding="utf-8")))


def described(config: Mapping[str, Any]) -> dict[str, object]:
    """Return a configuration without the keys that differ between copies of a model, at any depth."""
    return {
        key: described(value) if isinstance(value, Mapping) else value
        for key, value in config.items()
        if key not in VOLATILE
    }


def differences(ours: Mapping[str, object], theirs: Mapping[str, object]) -> list[str]:
    """Return the keys in which two configurations differ."""
    return sorted(key for key in {*ours, *theirs} if ours.get(key) != theirs.get(key))


def fingerprint(info: TargetInfo, plan: AuxPlan, config: Mapping[str, object], *weights: torch.Tensor) -> str:
    """Return a hash of what a client relies on; layers between embedding and head are only in it by their config."""
    text = json.dumps([vars(info), vars(plan), config], sort_keys=True, default=str)
    digest = hashlib.blake2b(text.encode(), digest_size=16)
    for weight in weights:
        flat = weight.contiguous().view(-1).view(torch.uint8).numpy()
        for start in range(0, len(flat), PIECE):
            digest.update(memoryview(flat[start : start + PIECE]))
    return digest.hexdigest()
