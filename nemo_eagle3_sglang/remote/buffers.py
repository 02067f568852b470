"""Memory in which a worker leaves rows for the server's front: anonymous files that both have mapped.

They have no name: whatever is killed, nothing stays behind.
"""

from __future__ import annotations

import mmap
import os
import threading
from dataclasses import dataclass, field

import torch

# Buffers come in powers of two, so that a few are used over and over; memory is faulted in (and pinned) once.
SMALLEST = 2**22


class Full(RuntimeError):
    """No buffer is free and no more may be made; who asks later may get one."""


@dataclass
class Buffer:
    """One anonymous file.

    Attributes:
        number: Its name between the two processes.
        fd: Its descriptor.
        memory: ``[size]`` uint8.
        shared: Whether the other process has it.
    """

    number: int
    fd: int
    memory: torch.Tensor
    shared: bool = False


@dataclass
class Pool:
    """Buffers of a worker.

    Attributes:
        limit: Bytes of all of them.
        pinned: Whether a GPU copies into them.
    """

    limit: int
    pinned: bool = False
    _free: list[Buffer] = field(default_factory=list)
    _used: dict[int, Buffer] = field(default_factory=dict)
    _total: int = 0
    _made: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, size: int) -> Buffer:
        """Return a buffer of at least ``size`` bytes.

        Raises:
            Full: See :class:`Full`.
        """
        with self._lock:
            fitting = [buffer for buffer in self._free if len(buffer.memory) >= size]
            if fitting:
                buffer = min(fitting, key=lambda b: len(b.memory))
                self._free.remove(buffer)
            else:
                buffer = self._make(max(SMALLEST, 1 << (max(size, 1) - 1).bit_length()))
            self._used[buffer.number] = buffer
            return buffer

    def _make(self, size: int) -> Buffer:
        if self._total + size > self.limit:
            raise Full(f"{self._total / 2**30:.1f} GiB of rows wait to be fetched, {self.limit / 2**30:.1f} at most")
        fd = os.memfd_create("eagle3-rows")
        os.ftruncate(fd, size)
        memory = torch.frombuffer(mmap.mmap(fd, size), dtype=torch.uint8)
        if self.pinned:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), size, 0))
        self._total += size
        self._made += 1
        return Buffer(self._made, fd, memory)

    def release(self, number: int) -> None:
        """Take a buffer back; one that is not in use is none of ours."""
        with self._lock:
            buffer = self._used.pop(number, None)
            if buffer is not None:
                self._free.append(buffer)


def view_of(fd: int, size: int) -> torch.Tensor:
    """Return the memory behind a descriptor that came from the other process, and close it."""
    memory = torch.frombuffer(mmap.mmap(fd, size), dtype=torch.uint8)
    os.close(fd)
    return memory
