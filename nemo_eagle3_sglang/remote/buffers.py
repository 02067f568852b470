"""Memory in which a worker leaves rows for the server's front: anonymous files that both have mapped.

They have no name: whatever is killed, nothing stays behind.
"""

from __future__ import annotations

import mmap
import os
import threading
from dataclasses import dataclass, field

import torch

from nemo_eagle3_sglang.errors import ConfigError

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
    _dropped: list[int] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, size: int) -> Buffer:
        """Return a buffer of at least ``size`` bytes.

        Raises:
            Full: See :class:`Full`.
            ConfigError: It would never fit.
        """
        with self._lock:
            fitting = [buffer for buffer in self._free if len(buffer.memory) >= size]
            if fitting:
                buffer = min(fitting, key=lambda b: len(b.memory))
                self._free.remove(buffer)
            else:
                buffer = self._make(self._rounded(size))
            self._used[buffer.number] = buffer
            return buffer

    def _rounded(self, size: int) -> int:
        if size > self.limit:
            raise ConfigError(
                f"the rows of one forward, {size / 2**30:.2f} GiB, are more than {self.limit / 2**30:.2f} GiB hold; "
                "start the server with a larger --buffer-gib"
            )
        return min(max(SMALLEST, 1 << (max(size, 1) - 1).bit_length()), self.limit)

    def _make(self, size: int) -> Buffer:
        if self._total + size - sum(len(buffer.memory) for buffer in self._free) > self.limit:
            raise Full(f"{self._total / 2**30:.1f} GiB of rows wait to be fetched, {self.limit / 2**30:.1f} at most")
        while self._total + size > self.limit:
            self._drop(self._free.pop(0))
        fd = os.memfd_create("eagle3-rows")
        try:
            os.ftruncate(fd, size)
            memory = torch.frombuffer(mmap.mmap(fd, size), dtype=torch.uint8)
        except BaseException:
            os.close(fd)
            raise
        if self.pinned:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), size, 0))
        self._total += size
        self._made += 1
        return Buffer(self._made, fd, memory)

    def _drop(self, buffer: Buffer) -> None:
        """Give up a free buffer that is too small for what is asked now."""
        if self.pinned:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(buffer.memory.data_ptr()))
        os.close(buffer.fd)
        self._total -= len(buffer.memory)
        self._dropped.append(buffer.number)

    def dropped(self) -> list[int]:
        """Return the buffers given up since the last call: their memory is free once the other process knows."""
        with self._lock:
            numbers, self._dropped = self._dropped, []
            return numbers

    def release(self, number: int) -> None:
        """Take a buffer back; one that is not in use is none of ours."""
        with self._lock:
            buffer = self._used.pop(number, None)
            if buffer is not None:
                self._free.append(buffer)


def view_of(fd: int, size: int) -> torch.Tensor:
    """Return the memory behind a descriptor that came from the other process, and close it."""
    try:
        return torch.frombuffer(mmap.mmap(fd, size), dtype=torch.uint8)
    finally:
        os.close(fd)
