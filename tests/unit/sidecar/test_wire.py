"""Frames between two ends of a real socket pair."""

from __future__ import annotations

import json
import os
import socket
import struct

import numpy as np
import pytest

from nemo_eagle3_sglang.sidecar import wire


@pytest.fixture
def ends():
    a, b = socket.socketpair()
    with a, b:
        yield a, b


def test_header_body_and_descriptor_arrive(ends):
    a, b = ends
    fd = os.memfd_create("test")
    os.write(fd, b"shared")
    wire.send(a, {"op": "x", "ids": [1, 2]}, b"\0raw", fd)
    wire.send(a, {"op": "y"})
    first, second = wire.receive(b), wire.receive(b)
    assert (first.header, first.body) == ({"op": "x", "ids": [1, 2]}, b"\0raw")
    assert os.pread(first.fd, 6, 0) == b"shared"
    assert (second.header, second.body, second.fd) == ({"op": "y"}, b"", None)
    for each in (fd, first.fd):
        os.close(each)


def test_a_closed_end_is_told_apart_from_an_answer(ends):
    a, b = ends
    text = json.dumps({"fd": False}).encode()
    a.sendall(struct.pack("!IQ", len(text), 100) + text + b"half")
    a.close()
    with pytest.raises(wire.PeerGone):
        wire.receive(b)
    with pytest.raises(wire.PeerGone):
        wire.send(b, {}, b"x" * 2**20)


@pytest.mark.parametrize("lengths", [(wire.MAX_HEADER + 1, 0), (2, wire.MAX_BODY + 1)])
def test_lengths_out_of_bounds_are_refused_before_anything_is_allocated(ends, lengths):
    a, b = ends
    a.sendall(struct.pack("!IQ", *lengths))
    with pytest.raises(ValueError, match="a frame of"):
        wire.receive(b)


def test_arrays_come_back(ends):
    arrays = [np.array([5, 6, 7]), np.array([], dtype=np.int64), np.array([True, False])]
    back = wire.unpack(wire.pack(*arrays), [3, 0, 2])
    assert [x.tolist() for x in back] == [[5, 6, 7], [], [1, 0]]
    assert all(x.flags.writeable for x in back)
    with pytest.raises(ValueError, match="5 numbers came, 6 were announced"):
        wire.unpack(wire.pack(*arrays), [3, 1, 2])
