"""Tensors on the wire: the safetensors format, read from a stream, with every size checked before memory is taken.

Nothing in it can run code. ``safetensors`` itself reads whole files; a frame here is read as it arrives, into one
buffer, and only once its header has been held against what the reader is willing to take.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

_LENGTH = struct.Struct("<Q")
MAX_HEADER = 2**20
MAX_DIMENSIONS = 4
_LARGEST = 2**48
DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64,
    "I32": torch.int32,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class FrameError(ValueError):
    """What came is no frame, or not one that the reader takes."""


@dataclass(frozen=True)
class Frame:
    """What a frame holds.

    Attributes:
        tensors: By name, on the CPU, views of one buffer.
        metadata: Text by name.
    """

    tensors: dict[str, torch.Tensor]
    metadata: dict[str, str]


@dataclass(frozen=True)
class Entry:
    """One tensor of a header: its place in the data, in bytes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


def header(shapes: Mapping[str, tuple[torch.dtype, Sequence[int]]], metadata: Mapping[str, str]) -> bytes:
    """Return what stands before the data of tensors that follow one another in this order."""
    fields: dict[str, object] = {"__metadata__": dict(metadata)}
    at = 0
    for name, (dtype, shape) in shapes.items():
        size = math.prod(shape) * dtype.itemsize
        fields[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return _LENGTH.pack(len(text)) + text


def encode(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> list[bytes | memoryview]:
    """Return a frame in pieces, the data without a copy where a tensor is contiguous on the CPU."""
    first = header({name: (t.dtype, t.shape) for name, t in tensors.items()}, metadata)
    return [first, *(data(tensor) for tensor in tensors.values())]


def data(tensor: torch.Tensor) -> memoryview:
    """Return a tensor's bytes."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    return memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else memoryview(b"")


def read(readinto: Callable[[memoryview], int], limit: int, pin: bool = False) -> Frame:
    """Read one frame.

    Args:
        readinto: Fills a buffer, or less of it, and returns how much; 0 at the end of the stream.
        limit: Bytes of data that are taken at most.
        pin: Whether a GPU will copy from the tensors.

    Raises:
        FrameError: It is none, is too large, or ends early.
    """
    (size,) = _LENGTH.unpack(_exactly(readinto, bytearray(_LENGTH.size)))
    if size > MAX_HEADER:
        raise FrameError(f"a header of {size} bytes")
    entries, metadata = parse(bytes(_exactly(readinto, bytearray(size))))
    total = entries[-1].end if entries else 0
    if total > limit:
        raise FrameError(f"{total} bytes of tensors, {limit} at most")
    buffer = torch.empty(total, dtype=torch.uint8, pin_memory=pin)
    if total:
        _exactly(readinto, memoryview(buffer.numpy()))
    tensors = {e.name: _tensor(buffer, e) for e in entries}
    return Frame(tensors, metadata)


def _tensor(buffer: torch.Tensor, entry: Entry) -> torch.Tensor:
    part = buffer[entry.begin : entry.end]
    if entry.begin % entry.dtype.itemsize:
        # A view must start at a multiple of its item.
        part = part.clone()
    return part.view(entry.dtype).view(entry.shape)


def _exactly(readinto: Callable[[memoryview], int], buffer: bytearray | memoryview) -> bytearray | memoryview:
    view, got = memoryview(buffer), 0
    while got < len(view):
        count = readinto(view[got:])
        if not count:
            raise FrameError(f"the frame ends after {got} of {len(view)} bytes")
        got += count
    return buffer


def parse(text: bytes) -> tuple[list[Entry], dict[str, str]]:
    """Return the tensors of a header, in the order of their data, and its metadata.

    Raises:
        FrameError: It is no header, names something twice, or the tensors leave gaps or overlap.
    """
    try:
        fields = json.loads(text.decode(), object_pairs_hook=_table)
    except FrameError:
        raise
    except (ValueError, RecursionError) as error:
        raise FrameError("the header is no JSON") from error
    if not isinstance(fields, dict):
        raise FrameError("the header is no JSON object")
    metadata = fields.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise FrameError("__metadata__ is no table of texts")
    entries = sorted((_entry(name, field) for name, field in fields.items()), key=lambda e: (e.begin, e.end))
    at = 0
    for entry in entries:
        if entry.begin != at:
            raise FrameError(f"{entry.name!r} does not follow the tensor before it")
        at = entry.end
    return entries, metadata


def _table(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        # Which of the two is meant, every reader would answer in its own way.
        raise FrameError("the header names something twice")
    return found


def _entry(name: str, field: object) -> Entry:
    if not isinstance(field, dict) or set(field) != {"dtype", "shape", "data_offsets"}:
        raise FrameError(f"{name!r} has not dtype, shape and data_offsets")
    dtype = DTYPES.get(field["dtype"]) if isinstance(field["dtype"], str) else None
    shape, offsets = field["shape"], field["data_offsets"]
    if dtype is None:
        raise FrameError(f"{name!r} has a dtype that is not taken")
    if not _sizes(shape, MAX_DIMENSIONS) or not _sizes(offsets, 2) or len(offsets) != 2:
        raise FrameError(f"{name!r} has no shape or no offsets")
    if math.prod(max(size, 1) for size in shape) >= _LARGEST:
        # Of an empty tensor too: torch multiplies the sizes beside the 0.
        raise FrameError(f"{name!r} is too large")
    if offsets[1] - offsets[0] != math.prod(shape) * dtype.itemsize:
        raise FrameError(f"{name!r} has {offsets[1] - offsets[0]} bytes for {shape}")
    return Entry(name, dtype, tuple(shape), offsets[0], offsets[1])


def _sizes(values: object, most: int) -> bool:
    """Return whether these are at most ``most`` sizes."""
    if not isinstance(values, list) or len(values) > most:
        return False
    return all(type(value) is int and 0 <= value < _LARGEST for value in values)
