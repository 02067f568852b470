"""Quantised checkpoints in SGLang on a CPU: loading, capture, head and start-up checks are real, the products are not.

SGLang's kernels for quantised weights need a GPU (``tests/gpu/test_quantised.py``); here torch takes their place, in
float32, so that the states and logits must be those of transformers with the dequantised weights.
"""

from __future__ import annotations

import pytest
import torch
import zoo
from quantised import QUANTISED, Quantised, int4, packed, unpacked

EXACT = 1 - 1e-6


@pytest.mark.parametrize("case", [q for q in QUANTISED if q.substitute], ids=lambda q: q.name)
def test_against_the_dequantised_weights(case: Quantised):
    result = zoo.measure_quantised(case.name, lambda _: None)
    assert not result["problems"], "\n".join(result["problems"])
    for name in ("aux", "last", "logits"):
        assert result[name]["min"] >= EXACT, name
    assert result["served"] <= 1e-4
    assert result["processor"] <= 1e-4


def test_a_group_of_four_bits_is_packed_low_bits_first():
    words = packed(torch.arange(16)[None] % 16)
    assert words.dtype == torch.int32
    assert [hex(w & 0xFFFFFFFF) for w in words[0].tolist()] == ["0x76543210", "0xfedcba98"]
    assert torch.equal(unpacked(words)[0], torch.arange(16))


def test_packing_is_that_of_compressed_tensors():
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    integers, _, _ = int4(torch.randn(6, 64, generator=torch.Generator().manual_seed(0)), 32)
    assert torch.equal(packed(integers + 8), helpers.pack_to_int32(integers, 4))
