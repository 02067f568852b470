"""Frames between trainer and target process: a JSON header, raw bytes, and sometimes a file descriptor."""

from __future__ import annotations

import json
import socket
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

_LENGTHS = struct.Struct("!IQ")
# Of one header and one body: far above any micro-batch, far below what would hurt.
MAX_HEADER, MAX_BODY = 2**24, 2**32


class PeerGone(ConnectionError):
    """The other process has closed its end, most likely by ending."""


@dataclass(frozen=True)
class Frame:
    """What arrived.

    Attributes:
        header: The JSON object.
        body: Raw bytes.
        fd: A file descriptor, now this process's to close; ``None`` where none was sent.
    """

    header: dict[str, Any]
    body: bytes
    fd: int | None = None


def send(sock: socket.socket, header: dict[str, Any], body: bytes = b"", fd: int | None = None) -> None:
    """Send one frame.

    Raises:
        PeerGone: Nobody is there to read it.
    """
    text = json.dumps({**header, "fd": fd is not None}).encode()
    try:
        sock.sendall(_LENGTHS.pack(len(text), len(body)) + text + body)
        if fd is not None:
            socket.send_fds(sock, [b"\0"], [fd])
    except (BrokenPipeError, ConnectionResetError) as error:
        raise PeerGone(str(error)) from error


def receive(sock: socket.socket) -> Frame:
    """Wait for one frame.

    Raises:
        PeerGone: The peer closed its end before a whole frame had come.
        ValueError: The frame's lengths are out of bounds.
    """
    header_size, body_size = _LENGTHS.unpack(_exactly(sock, _LENGTHS.size))
    if header_size > MAX_HEADER or body_size > MAX_BODY:
        raise ValueError(f"a frame of {header_size} + {body_size} bytes")
    header = json.loads(_exactly(sock, header_size))
    body = bytes(_exactly(sock, body_size))
    fd = None
    if header.pop("fd"):
        _, fds, _, _ = socket.recv_fds(sock, 1, 1)
        if not fds:
            raise PeerGone("no file descriptor came")
        fd = fds[0]
    return Frame(header, body, fd)


def _exactly(sock: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view, got = memoryview(data), 0
    while got < size:
        try:
            count = sock.recv_into(view[got:])
        except ConnectionResetError as error:
            raise PeerGone(str(error)) from error
        if not count:
            raise PeerGone("the other end is closed")
        got += count
    return data


def pack(*arrays: np.ndarray) -> bytes:
    """Return integer arrays as int64, one after another."""
    return b"".join(np.ascontiguousarray(array, dtype=np.int64).tobytes() for array in arrays)


def unpack(body: bytes, sizes: list[int]) -> list[np.ndarray]:
    """Return the arrays of :func:`pack` by their sizes."""
    flat = np.frombuffer(body, dtype=np.int64)
    if len(flat) != sum(sizes):
        raise ValueError(f"{len(flat)} numbers came, {sum(sizes)} were announced")
    # Copies, since a tensor made of a read-only buffer is a warning at every step.
    return [part.copy() for part in np.split(flat, np.cumsum(sizes)[:-1])]
