import contextlib
import io
import json
import struct

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_eagle3_sglang.remote import frames

LIMIT = 2**20
TENSORS = {
    "aux": torch.arange(24, dtype=torch.float32).view(4, 6),
    "half": torch.ones(3, dtype=torch.bfloat16),
    "none": torch.empty((0, 6)),
    "ids": torch.tensor([1, -2, 3], dtype=torch.int32),
    "fp8": torch.tensor([0.5, 448.0]).to(torch.float8_e4m3fn),
}


def read(body: bytes, limit: int = LIMIT) -> frames.Frame:
    return frames.read(io.BytesIO(body).readinto, limit)


def framed(header: object) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text


def test_the_library_reads_what_is_written_and_the_other_way_round():
    ours = b"".join(frames.encode(TENSORS, {"a": "b"}))
    theirs = safetensors.torch.save(TENSORS, {"a": "b"})
    for found in (safetensors.torch.load(ours), read(ours).tensors, read(theirs).tensors):
        assert found.keys() == TENSORS.keys()
        for name, tensor in TENSORS.items():
            assert found[name].dtype == tensor.dtype
            assert torch.equal(found[name].float(), tensor.float())
    assert read(ours).metadata == read(theirs).metadata == {"a": "b"}


def test_a_frame_cut_anywhere_is_an_error():
    body = b"".join(frames.encode(TENSORS, {}))
    for length in range(len(body)):
        with pytest.raises(frames.FrameError):
            read(body[:length])


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_rubbish_is_a_frame_error(body: bytes):
    for text in (body, framed(body)):
        try:
            read(text)
        except frames.FrameError:
            continue


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_frame_with_bytes_changed_is_read_or_refused(data: st.DataObject):
    body = bytearray(b"".join(frames.encode(TENSORS, {"k": "v"})))
    for at in data.draw(st.lists(st.integers(0, len(body) - 1), min_size=1, max_size=8)):
        body[at] = data.draw(st.integers(0, 255))
    try:
        found = read(bytes(body))
    except frames.FrameError:
        return
    assert sum(t.numel() * t.element_size() for t in found.tensors.values()) <= LIMIT


SIZES = st.one_of(
    st.integers(-5, 40), st.integers(2**31, 2**70), st.booleans(), st.floats(), st.none(), st.text(max_size=2)
)
FIELDS = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "I32", "F64", "BOOL", "", None, 3]),
        "shape": st.one_of(st.lists(SIZES, max_size=6), SIZES),
        "data_offsets": st.one_of(st.lists(SIZES, max_size=3), SIZES),
    }
)


@settings(max_examples=400, deadline=None)
@given(st.dictionaries(st.text(max_size=3), FIELDS, max_size=3))
def test_any_header_takes_no_more_memory_than_the_limit(fields: dict):
    taken: list[int] = []
    real = torch.empty

    def empty(size: int, **kwargs: object) -> torch.Tensor:
        taken.append(size)
        return real(size, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frames.torch, "empty", empty)
        with contextlib.suppress(frames.FrameError):
            read(framed(fields) + bytes(64), limit=1000)
    assert all(size <= 1000 for size in taken)


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, "does not follow"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, "has 4 bytes"),
        ({"a": {"dtype": "F32", "shape": [1] * 5, "data_offsets": [0, 4]}}, "no shape"),
        ({"a": {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}}, "no shape"),
        ({"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}, "dtype that is not taken"),
        ({"a": {"dtype": "F32", "shape": [500], "data_offsets": [0, 2000]}}, "2000 bytes of tensors, 1000 at most"),
        ({"__metadata__": {"a": 1}}, "no table of texts"),
        ([], "no JSON object"),
        (b"[" * 100_000, "no JSON"),
    ],
)
def test_what_is_wrong_is_said(header: object, reason: str):
    with pytest.raises(frames.FrameError, match=reason):
        read(framed(header) + bytes(3000), limit=1000)


def test_a_long_header_is_not_read():
    with pytest.raises(frames.FrameError, match="a header of"):
        read(struct.pack("<Q", 2**40) + bytes(100))
