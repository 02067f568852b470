"""The target's process: builds a runner, answers until its trainer closes the socket or is gone."""

from __future__ import annotations

import ctypes
import dataclasses
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from nemo_eagle3_sglang import backends
from nemo_eagle3_sglang.contracts import Sequences
from nemo_eagle3_sglang.errors import CaptureError, ConfigError
from nemo_eagle3_sglang.sidecar import wire
from nemo_eagle3_sglang.sidecar.arena import Arena, size_of
from nemo_eagle3_sglang.sidecar.request import Group, from_json
from nemo_eagle3_sglang.supervision.group import GroupSource
from nemo_eagle3_sglang.supervision.source import RunnerSource

logger = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1


def main(fd: int, parent: int) -> int:
    """Serve one trainer.

    Args:
        fd: This process's end of the socket pair.
        parent: Process id of the trainer.

    Returns:
        The exit status.
    """
    die_with(parent)
    sock = socket.socket(fileno=fd)
    try:
        backend, request, group = from_json(wire.receive(sock).header)
        logging.basicConfig(level=logging.INFO if group.rank == 0 else logging.WARNING, stream=sys.stderr)
        logging.getLogger("nemo_eagle3_sglang").setLevel(logging.INFO)
        try:
            join(group, request.device)
            runner = backends.load(backend)(request)
            source = GroupSource(runner, timedelta(seconds=group.timeout_s)) if group.size > 1 else RunnerSource(runner)
        except Exception as error:
            wire.send(sock, failure(error))
            return 1
        return Server(sock, source).serve()
    except wire.PeerGone:
        # The trainer ended; its own error is the one to read.
        return 1


def die_with(parent: int) -> None:
    """Let the kernel end this process with its trainer, also when that is killed with signal 9.

    Ctrl-C reaches both; what it means is the trainer's to decide.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        # It ended before the line above.
        raise SystemExit(1)


def join(group: Group, device: torch.device) -> None:
    """Make the default process group: of the processes that share the target, and no others."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=group.timeout_s)
    # One process needs neither port nor file, so that there is nothing to collide with another rank's.
    store = dist.TCPStore(group.host, group.port, group.size, False, timeout) if group.size > 1 else dist.HashStore()
    dist.init_process_group(backend, store=store, rank=group.rank, world_size=group.size, timeout=timeout)


def failure(error: Exception) -> dict[str, Any]:
    """Return an error as the trainer raises it again."""
    kind = next((kind.__name__ for kind in (ConfigError, CaptureError) if isinstance(error, kind)), "RuntimeError")
    words = str(error) if kind != "RuntimeError" else f"{type(error).__name__}: {error}"
    if kind == "RuntimeError":
        logger.error("the target's process failed", exc_info=error)
    return {"error": kind, "message": words}


class Server:
    """Answers frames, one after another.

    Args:
        sock: The trainer.
        source: What it asks.
    """

    def __init__(self, sock: socket.socket, source: RunnerSource) -> None:
        self._sock = sock
        self._source = source
        self._arenas: dict[int, Arena] = {}
        self._handlers: dict[str, Callable[[wire.Frame], None]] = {
            "aux": self._aux,
            "plan": self._plan,
            "vocab": self._vocab,
            "embeddings": self._embeddings,
            "supervise": self._supervise,
        }

    def serve(self) -> int:
        """Answer until ``close``; return the exit status."""
        info = dataclasses.asdict(self._source.info)
        dtype = str(self._source.dtype).removeprefix("torch.")
        wire.send(self._sock, {"info": info, "dtype": dtype, "pid": os.getpid()})
        while True:
            frame = wire.receive(self._sock)
            if frame.header["op"] == "close":
                self._source.close()
                wire.send(self._sock, {})
                return 0
            try:
                self._handlers[frame.header["op"]](frame)
            except wire.PeerGone:
                raise
            except Exception as error:
                wire.send(self._sock, failure(error))

    def _aux(self, frame: wire.Frame) -> None:
        self._source.set_aux_layers(frame.header["ids"])
        wire.send(self._sock, {})

    def _plan(self, frame: wire.Frame) -> None:
        plan = self._source.plan_aux_layers(frame.header["ids"])
        wire.send(self._sock, {"plan": None if plan is None else dataclasses.asdict(plan)})

    def _vocab(self, frame: wire.Frame) -> None:
        ids, mask = wire.unpack(frame.body, frame.header["sizes"])
        self._source.set_vocab_mapping(torch.from_numpy(ids), torch.from_numpy(mask).bool())
        wire.send(self._sock, {})

    def _embeddings(self, frame: wire.Frame) -> None:
        # Read once, at the start: an arena of its own, which is gone with the answer to `release`.
        weight = self._source.input_embeddings()
        arena = Arena(size_of({"weight": weight}), weight.device)
        places = arena.write({"weight": weight})
        wire.send(self._sock, {"places": places, "arena": arena.describe()}, fd=arena.fd)
        del weight
        wire.receive(self._sock)
        arena.close()

    def _supervise(self, frame: wire.Frame) -> None:
        tokens, lengths, supervised = wire.unpack(frame.body, frame.header["sizes"])
        slot = frame.header["slot"]
        arena = self._arenas.get(slot)
        if arena is not None and frame.header.get("free"):
            arena.readers_event(frame.header["free"])
        found = self._source.supervise(Sequences(tokens, lengths.tolist(), supervised))
        tensors = {"aux": found.aux, **vars(found.targets)}
        answer: dict[str, Any] = {}
        fd = None
        if arena is None or size_of(tensors) > arena.size:
            if arena is not None:
                arena.retire()
            # Some room, so that it is not made anew for every longer batch.
            arena = self._arenas[slot] = Arena(size_of(tensors) * 5 // 4, self._source.device)
            answer["arena"], fd = arena.describe(), arena.fd
        answer["places"] = arena.write(tensors)
        wire.send(self._sock, answer, fd=fd)
