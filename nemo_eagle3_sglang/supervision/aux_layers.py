"""Which decoder layers EAGLE-3 reads: one default and one check for every backend."""

from __future__ import annotations

from collections.abc import Sequence

from nemo_eagle3_sglang.contracts import NUM_AUX_LAYERS
from nemo_eagle3_sglang.errors import ConfigError


def default_aux_layer_ids(num_layers: int) -> list[int]:
    """Return ``[1, N//2 - 1, N - 4]``, the low, middle and high layer of an N-layer text decoder.

    The choice of SGLang, vLLM, SpecForge and AutoModel, so that a draft trained with the default is served with it.

    Raises:
        ConfigError: The target is too shallow for the three to be distinct and in range.
    """
    ids = [1, num_layers // 2 - 1, num_layers - 4]
    if len(set(ids)) != NUM_AUX_LAYERS or min(ids) < 0:
        raise ConfigError(
            f"the target has {num_layers} layers, too few for the default aux layers {ids}: "
            "give three distinct ids in recipe_args.aux_layer_ids"
        )
    return ids


def resolve_aux_layer_ids(aux_layer_ids: Sequence[int] | None, num_layers: int) -> list[int]:
    """Return the given ids as a checked list, or the default ones for ``None``. The order given is kept.

    Args:
        aux_layer_ids: Three distinct ids; id i is the output of decoder layer i.
        num_layers: N, decoder layers of the target's text model.

    Raises:
        ConfigError: Not three, repeated, not integers, outside ``[0, N)``, or the last layer N-1, which SGLang's
            own capture drops without a word when it serves the draft.
    """
    if aux_layer_ids is None:
        return default_aux_layer_ids(num_layers)
    ids = list(aux_layer_ids)
    where = f"recipe_args.aux_layer_ids: {ids}"
    if len(ids) != NUM_AUX_LAYERS:
        raise ConfigError(f"{where} has {len(ids)} ids; EAGLE-3 reads exactly {NUM_AUX_LAYERS}")
    if any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        raise ConfigError(f"{where} must hold whole numbers")
    if len(set(ids)) != len(ids):
        raise ConfigError(f"{where} repeats an id; the three must be distinct")
    for i in ids:
        if not 0 <= i < num_layers:
            raise ConfigError(f"{where}: {i} is out of range, the target has layers 0..{num_layers - 1}")
        if i == num_layers - 1:
            raise ConfigError(
                f"{where}: {i} is the target's last layer, which SGLang does not capture when it serves the draft; "
                f"use at most {num_layers - 2}"
            )
    return ids
