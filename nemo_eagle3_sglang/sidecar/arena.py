"""Memory that the target's process writes and the trainer reads: on a GPU by CUDA IPC, on a CPU an anonymous file.

The process that owns an arena sends its description once; after that a tensor is a name, a dtype, a shape and an
offset. On a GPU two events, shared in the same way, take the place of waiting: ``ready`` is recorded after the target's
kernels, and the reader's stream waits for it; ``free`` is recorded by the reader, and the writer's stream waits for
that before it writes again. Neither host waits for the device.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from typing import Any

import torch

ALIGNMENT = 256
# A GPU allocation can be shared from its first byte only, and small tensors share one; so none is small.
MINIMUM = 2 * 2**20


def size_of(tensors: Mapping[str, torch.Tensor]) -> int:
    """Return the bytes that the tensors take in an arena."""
    return sum(_padded(tensor) for tensor in tensors.values())


def _padded(tensor: torch.Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT


class Arena:
    """An arena of this process.

    Args:
        size: Bytes at least.
        device: Where.

    Attributes:
        fd: File descriptor of the memory on a CPU, which goes with the description; ``None`` on a GPU.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.size = max(MINIMUM, size)
        self.fd: int | None = None
        if device.type == "cuda":
            self._memory = torch.empty(self.size, dtype=torch.uint8, device=device)
            self._ready = torch.cuda.Event(interprocess=True)
            # An event that was never recorded has no handle to share.
            self._ready.record()
        else:
            self.fd = os.memfd_create("eagle3-target")
            os.ftruncate(self.fd, self.size)
            self._memory = torch.frombuffer(mmap.mmap(self.fd, self.size), dtype=torch.uint8)
        self._free: torch.cuda.Event | None = None

    def describe(self) -> dict[str, Any]:
        """Return what :class:`View` needs, as JSON can hold it."""
        if self.fd is not None:
            return {"size": self.size}
        share = self._memory.untyped_storage()._share_cuda_()
        values = [value.hex() if isinstance(value, bytes) else value for value in share]
        return {"size": self.size, "storage": values, "ready": self._ready.ipc_handle().hex()}

    def readers_event(self, handle: str) -> None:
        """Take the event that the reader records when it is done with what was written."""
        self._free = torch.cuda.Event.from_ipc_handle(self._memory.device, bytes.fromhex(handle))

    def write(self, tensors: Mapping[str, torch.Tensor]) -> list[dict[str, Any]]:
        """Copy tensors in; on a GPU ``ready`` follows them in the current stream, nothing is waited for.

        Raises:
            ValueError: They do not fit.
        """
        if size_of(tensors) > self.size:
            raise ValueError(f"{size_of(tensors)} bytes into an arena of {self.size}")
        if self._free is not None:
            torch.cuda.current_stream().wait_event(self._free)
        places, offset = [], 0
        for name, tensor in tensors.items():
            place = {"name": name, "dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
            places.append({**place, "offset": offset})
            _view(self._memory, places[-1]).copy_(tensor)
            offset += _padded(tensor)
        if self.fd is None:
            self._ready.record()
        return places

    def retire(self) -> None:
        """Close an arena that has become too small, on a GPU when its reader is done with it."""
        if self._free is not None:
            self._free.synchronize()
        self.close()

    def close(self) -> None:
        """Free the memory of this process; a reader keeps its own mapping."""
        if self.fd is not None:
            # The mapping goes with its last tensor.
            os.close(self.fd)
            self.fd = None
        del self._memory


class View:
    """An arena of the other process.

    Args:
        description: :meth:`Arena.describe`.
        fd: The descriptor that came with it; closed here.
        device: Where.
    """

    def __init__(self, description: Mapping[str, Any], fd: int | None, device: torch.device) -> None:
        self.size = int(description["size"])
        self._free: torch.cuda.Event | None = None
        if fd is not None:
            self._memory = torch.frombuffer(mmap.mmap(fd, self.size), dtype=torch.uint8)
            os.close(fd)
            return
        with torch.cuda.device(device):
            torch.cuda.init()
            values = [bytes.fromhex(v) if isinstance(v, str) else v for v in description["storage"]]
            # The device's number may differ between the two processes, its identity is checked by the first read.
            storage = torch.UntypedStorage._new_shared_cuda(device.index, *values[1:])
            self._memory = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
            self._ready = torch.cuda.Event.from_ipc_handle(device, bytes.fromhex(description["ready"]))
            self._free = torch.cuda.Event(interprocess=True)
            self._free.record()

    @property
    def free_handle(self) -> str | None:
        """Handle of the event by which this reader says that it is done; ``None`` on a CPU."""
        return self._free.ipc_handle().hex() if self._free is not None else None

    def read(self, places: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """Return the tensors by name; they are the other process's memory, valid until it writes again."""
        if self._free is not None:
            torch.cuda.current_stream().wait_event(self._ready)
        return {place["name"]: _view(self._memory, place) for place in places}

    def release(self) -> None:
        """Say that all work enqueued so far is the last that reads what was written."""
        if self._free is not None:
            self._free.record()


def _view(memory: torch.Tensor, place: Mapping[str, Any]) -> torch.Tensor:
    dtype, shape, offset = getattr(torch, place["dtype"]), place["shape"], place["offset"]
    count = 1
    for n in shape:
        count *= n
    return memory[offset : offset + count * dtype.itemsize].view(dtype).view(shape)
