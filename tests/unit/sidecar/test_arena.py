"""One arena and its view, in one process: the memory is shared, nothing is copied on the reader's side."""

from __future__ import annotations

import os

import pytest
import torch

from nemo_eagle3_sglang.sidecar.arena import MINIMUM, Arena, View, size_of

CPU = torch.device("cpu")


def test_what_is_written_is_read_in_place():
    arena = Arena(10, CPU)
    tensors = {
        "aux": torch.arange(6, dtype=torch.bfloat16).view(2, 3),
        "none": torch.empty(0, 5),
        "choices": torch.tensor([7, -1]),
        "mask": torch.tensor([True, False, True]),
        "one": torch.tensor(2.5),
    }
    places = arena.write(tensors)
    view = View(arena.describe(), os.dup(arena.fd), CPU)
    read = view.read(places)
    for name, tensor in tensors.items():
        assert torch.equal(read[name], tensor)
        assert read[name].dtype == tensor.dtype
    arena.write({"aux": torch.ones(2, 3, dtype=torch.bfloat16)})
    assert read["aux"].eq(1).all(), "the same memory"
    arena.close()
    assert read["aux"].eq(1).all(), "a reader keeps its mapping"
    assert view.free_handle is None


def test_what_does_not_fit_is_refused():
    arena = Arena(10, CPU)
    assert arena.size == MINIMUM
    large = {"x": torch.zeros(MINIMUM // 4), "y": torch.zeros(1)}
    assert size_of(large) == MINIMUM + 256
    with pytest.raises(ValueError, match="into an arena of"):
        arena.write(large)
    arena.close()
