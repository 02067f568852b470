import os

import pytest
import torch

from nemo_eagle3_sglang.remote.buffers import SMALLEST, Full, Pool, view_of


def test_what_one_side_writes_the_other_reads():
    buffer = Pool(limit=2 * SMALLEST).take(100)
    buffer.memory[:4] = torch.tensor([1, 2, 3, 4], dtype=torch.uint8)
    seen = view_of(os.dup(buffer.fd), len(buffer.memory))
    assert seen[:4].tolist() == [1, 2, 3, 4]


def test_a_buffer_is_used_again_and_the_limit_holds():
    pool = Pool(limit=2 * SMALLEST)
    first, second = pool.take(1), pool.take(SMALLEST)
    with pytest.raises(Full, match="wait to be fetched"):
        pool.take(1)
    pool.release(first.number)
    assert pool.take(10) is first
    pool.release(second.number)
    # Too small for this, and a larger one may not be made.
    with pytest.raises(Full):
        pool.take(SMALLEST + 1)


def test_releasing_twice_or_what_is_unknown_does_nothing():
    pool = Pool(limit=SMALLEST)
    buffer = pool.take(1)
    for number in (buffer.number, buffer.number, 77):
        pool.release(number)
    assert pool.take(1) is buffer
    with pytest.raises(Full):
        pool.take(1)


def test_no_descriptor_is_lost():
    pool = Pool(limit=4 * SMALLEST)
    pool.release(pool.take(1).number)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(1000):
        pool.release(pool.take(100).number)
    assert len(os.listdir("/proc/self/fd")) == before
