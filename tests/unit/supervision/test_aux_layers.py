"""Which aux layers are taken, and in which words the others are refused."""

from __future__ import annotations

import pytest

from nemo_eagle3_sglang.errors import ConfigError
from nemo_eagle3_sglang.supervision.aux_layers import default_aux_layer_ids, resolve_aux_layer_ids


@pytest.mark.parametrize(
    ("layers", "ids"), [(32, [1, 15, 28]), (30, [1, 14, 26]), (36, [1, 17, 32]), (80, [1, 39, 76]), (7, [1, 2, 3])]
)
def test_default_is_low_middle_high(layers, ids):
    assert default_aux_layer_ids(layers) == ids
    assert resolve_aux_layer_ids(None, layers) == ids


@pytest.mark.parametrize("layers", [1, 2, 3, 4, 5, 6])
def test_default_is_refused_for_a_shallow_target(layers):
    with pytest.raises(ConfigError, match=rf"the target has {layers} layers.*three distinct ids in recipe_args.aux_"):
        resolve_aux_layer_ids(None, layers)


@pytest.mark.parametrize("layers", range(7, 97))
def test_default_passes_its_own_check(layers):
    ids = default_aux_layer_ids(layers)
    assert resolve_aux_layer_ids(ids, layers) == ids == sorted(ids)


@pytest.mark.parametrize("ids", [[0, 1, 2], [6, 0, 3], (4, 5, 6)])
def test_explicit_ids_are_kept_in_their_order(ids):
    resolved = resolve_aux_layer_ids(ids, 8)
    assert resolved == list(ids)
    assert isinstance(resolved, list)
    assert resolved is not ids


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([], "has 0 ids; EAGLE-3 reads exactly 3"),
        ([1, 2], "has 2 ids"),
        ([1, 2, 3, 4], "has 4 ids"),
        ([1, 3, 3], "repeats an id"),
        ([1, 3, 8], "8 is out of range, the target has layers 0..7"),
        ([-1, 3, 5], "-1 is out of range"),
        ([1, 3, 7], "7 is the target's last layer.*use at most 6"),
        ([1, 2.0, 3], "must hold whole numbers"),
        ([True, 2, 3], "must hold whole numbers"),
        (["1", 2, 3], "must hold whole numbers"),
    ],
)
def test_other_ids_are_refused_with_key_value_and_remedy(ids, words):
    with pytest.raises(ConfigError, match=words) as caught:
        resolve_aux_layer_ids(ids, 8)
    assert str(caught.value).startswith(f"recipe_args.aux_layer_ids: {ids}")
