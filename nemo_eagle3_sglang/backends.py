"""Registry of target backends: the entry-point group ``nemo_automodel.target_model_backends``.

A distribution adds an engine by naming a factory in its own metadata::

    [project.entry-points."nemo_automodel.target_model_backends"]
    myengine = "my_package:build_runner"

``build_runner(request: BackendRequest) -> TargetRunner`` is called once per training process, after the
configuration has been checked. ``recipe_args.target_model_backend: myengine`` selects it and
``recipe_args.myengine_args`` arrives as ``request.options``. Supervision, configuration and the recipe stay the same
for every engine.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points

from nemo_eagle3_sglang.contracts import BackendRequest, SupervisionSource, TargetRunner
from nemo_eagle3_sglang.errors import ConfigError, did_you_mean

GROUP = "nemo_automodel.target_model_backends"

# Backends that AutoModel's own recipe builds; a name registered under GROUP comes before these.
AUTOMODEL_BACKENDS = ("colocated", "remote", "vllm")

BackendFactory = Callable[[BackendRequest], TargetRunner | SupervisionSource]


def registered() -> dict[str, EntryPoint]:
    """Return the registered backends by name, from the metadata alone (nothing of theirs is imported)."""
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def is_registered(name: str) -> bool:
    """Return whether ``name`` is a backend of some installed distribution."""
    return name in registered()


def check_name(name: str) -> None:
    """Raise ``ConfigError`` that lists the known backends unless ``name`` is registered or AutoModel's own."""
    known = sorted({*registered(), *AUTOMODEL_BACKENDS})
    if name not in known:
        raise ConfigError(
            f"recipe_args.target_model_backend: {name!r} is not a target backend{did_you_mean(name, known)}. "
            f"Known here: {', '.join(known)}."
        )


def load(name: str) -> BackendFactory:
    """Import and return the factory registered as ``name``.

    Raises:
        ConfigError: No installed distribution registers ``name``, or what it names cannot be imported.
    """
    check_name(name)
    entries = registered()
    if name not in entries:
        raise ConfigError(f"recipe_args.target_model_backend: {name!r} is built by AutoModel itself, not by a factory.")
    entry = entries[name]
    try:
        return entry.load()
    except (ImportError, AttributeError) as error:
        owner = entry.dist.name if entry.dist is not None else "an unknown distribution"
        raise ConfigError(
            f"target backend {name!r} ({entry.value}, registered by {owner}) cannot be loaded: {error}"
        ) from error
