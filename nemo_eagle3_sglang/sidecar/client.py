"""The trainer's side of the target's process."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from nemo_eagle3_sglang.contracts import (
    AuxPlan,
    BackendRequest,
    DraftTargets,
    Sequences,
    Supervision,
    TargetInfo,
)
from nemo_eagle3_sglang.errors import CaptureError, ConfigError
from nemo_eagle3_sglang.sidecar import wire
from nemo_eagle3_sglang.sidecar.arena import View
from nemo_eagle3_sglang.sidecar.request import Group, to_json

logger = logging.getLogger(__name__)

# What torchrun tells a worker about the trainer's group, which is not the target's.
TRAINERS_GROUP = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
# A target that has answered `close` is gone within this; one that hangs is ended.
CLOSE_SECONDS = 30.0
LOADING = "loading the target"
LOOPBACK = "127.0.0.1"
# An address of no host (RFC 5737): the route to it tells which of this host's addresses faces the network.
SOMEWHERE = "192.0.2.1"
# Micro-batches that are under way or in use: one is trained on, the next is computed.
SLOTS = 2
ERRORS: dict[str, type[Exception]] = {"ConfigError": ConfigError, "CaptureError": CaptureError}


class TargetDied(RuntimeError):
    """The target's process ended without an answer."""


class SidecarSource:
    """A :class:`~nemo_eagle3_sglang.contracts.SupervisionSource` whose target runs in a process of its own.

    What :meth:`supervise` returns lies in the other process's memory and is valid until the next call, by when
    everything that reads it must be enqueued on the current stream. A process that dies while it works on a micro-batch
    (a crash of the engine, the out-of-memory killer) is started again and asked again, once for that micro-batch; not
    where several ranks share the target, whose processes only live together.

    Args:
        backend: Registered name of the backend that the process builds.
        request: What it is given.
        group: The processes that share one target; by default this one alone.
        python: Interpreter of another environment, which needs this package and the engine.
        store: Where the group meets, kept as long as this: NCCL and gloo come back to it whenever they connect.

    Raises:
        ConfigError: ``python`` cannot be run, lacks this package, or the backend refuses the request.
        CaptureError: The target's states cannot be captured with certainty.
        RuntimeError: The process failed or ended.
    """

    def __init__(
        self,
        backend: str,
        request: BackendRequest,
        group: Group | None = None,
        python: str | None = None,
        store: Any = None,
    ) -> None:
        self.device = request.device
        self._group, self._python, self._store = group or Group(), python, store
        self._start_frame = to_json(backend, request, self._group)
        # What a process that replaces this one must be told, in order.
        self._settings: dict[str, tuple[str, dict[str, Any], bytes]] = {}
        # Slot and content of what is not collected, and the slot of the next.
        self._submitted: deque[tuple[int, Sequences]] = deque()
        self._next_slot = 0
        self._start()

    def _start(self) -> None:
        """Start the process and wait until its target is loaded."""
        python = self._python or sys.executable
        self._views: dict[int, View] = {}
        # Slots whose event the process knows.
        self._announced: set[int] = set()
        self._asked = LOADING
        self._sock, theirs = socket.socketpair()
        try:
            self._process = spawn(theirs, self._python, self.device)
        except OSError as error:
            self._sock.close()
            raise ConfigError(f"recipe_args.sglang_python: {python!r} cannot be run: {error}") from error
        finally:
            theirs.close()
        try:
            wire.send(self._sock, self._start_frame)
            ready = self._answer().header
        except wire.PeerGone as error:
            raise ConfigError(
                f"recipe_args.sglang_python: {python} ended with status {self._process.wait()} before it began; does "
                f"`{python} -m nemo_eagle3_sglang.sidecar` find this package and the engine?"
            ) from error
        except BaseException:
            _end(self._process)
            raise
        self.info = TargetInfo(**ready["info"])
        self.dtype: torch.dtype = getattr(torch, ready["dtype"])

    def _again(self, error: Exception) -> None:
        """Replace a process that has died, tell the new one what the old one knew, and submit again."""
        if self._group.size > 1:
            raise error
        logger.warning("%s; starting it again", error)
        self._sock.close()
        self._start()
        for what, header, body in self._settings.values():
            self._tell(what, header, body)
            self._answer()
        for slot, sequences in self._submitted:
            self._send(slot, sequences)

    def set_aux_layers(self, aux_layer_ids: Sequence[int]) -> None:
        """See :meth:`TargetRunner.set_aux_layers`."""
        self._set("aux", "choosing the aux layers", {"ids": list(aux_layer_ids)})

    def plan_aux_layers(self, aux_layer_ids: Sequence[int]) -> AuxPlan | None:
        """Return the engine's own plan, or None where it makes none; see :class:`TargetRunner`."""
        answer = self._ask("planning the aux layers", {"op": "plan", "ids": list(aux_layer_ids)})
        return AuxPlan(**answer.header["plan"]) if answer.header["plan"] else None

    def set_vocab_mapping(self, selected_token_ids: torch.Tensor, selected_token_mask: torch.Tensor) -> None:
        """See :meth:`SupervisionSource.set_vocab_mapping`."""
        arrays = [selected_token_ids.cpu().numpy(), selected_token_mask.cpu().numpy()]
        self._set("vocab", "setting the draft vocabulary", {"sizes": [len(a) for a in arrays]}, wire.pack(*arrays))

    def _set(self, op: str, what: str, header: dict[str, Any], body: bytes = b"") -> None:
        self._ask(what, {"op": op, **header}, body)
        self._settings[op] = what, {"op": op, **header}, body

    def supervise(self, sequences: Sequences) -> Supervision:
        """See :meth:`SupervisionSource.supervise`. No host waits for a device; the streams wait for each other."""
        self._drop_submitted()
        # Always the same memory: the second slot is only made where the target works ahead.
        self._submit(0, sequences)
        return self.collect()

    def submit(self, sequences: Sequences) -> None:
        """Have the target begin with a micro-batch, the second at most that is not collected.

        What was collected two calls ago is written over: all that reads it must be enqueued by now.
        """
        if len(self._submitted) == SLOTS:
            raise RuntimeError(f"{SLOTS} micro-batches are submitted; collect one first")
        slot = self._next_slot
        self._next_slot = (slot + 1) % SLOTS
        self._submit(slot, sequences)

    def _submit(self, slot: int, sequences: Sequences) -> None:
        self._submitted.append((slot, sequences))
        try:
            self._send(slot, sequences)
        except TargetDied as error:
            self._again(error)

    def collect(self) -> Supervision:
        """Return the supervision of the micro-batch that was submitted first of those that are not collected."""
        slot, sequences = self._submitted[0]
        self._asked = f"a micro-batch of {len(sequences.tokens)} tokens"
        try:
            answer = self._answer()
        except TargetDied as error:
            self._again(error)
            answer = self._answer()
        finally:
            # Answered, if only by an error: nobody may wait for it again.
            self._submitted.popleft()
        if "arena" in answer.header:
            self._views[slot] = View(answer.header["arena"], answer.fd, self.device)
            self._announced.discard(slot)
        tensors = self._views[slot].read(answer.header["places"])
        return Supervision(aux=tensors.pop("aux"), targets=DraftTargets(**tensors))

    def _send(self, slot: int, sequences: Sequences) -> None:
        arrays = (sequences.tokens, sequences.lengths, sequences.supervised)
        header: dict[str, Any] = {"op": "supervise", "slot": slot, "sizes": [len(a) for a in arrays]}
        if (view := self._views.get(slot)) is not None:
            view.release()
            if slot not in self._announced:
                header["free"] = view.free_handle
                self._announced.add(slot)
        self._tell(f"a micro-batch of {len(sequences.tokens)} tokens", header, wire.pack(*arrays))

    def _drop_submitted(self) -> None:
        """Collect what nobody will use: a data loader was left with a micro-batch under way."""
        while self._submitted:
            self.collect()

    def input_embeddings(self) -> torch.Tensor:
        """Return the input embedding ``[V, H]``, a copy in this process."""
        answer = self._ask("reading the embeddings", {"op": "embeddings"})
        view = View(answer.header["arena"], answer.fd, self.device)
        weight = view.read(answer.header["places"])["weight"].clone()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        wire.send(self._sock, {"op": "release"})
        return weight

    def close(self) -> None:
        """End the process.

        Ranks that share a target leave it together: the process goes on taking part until all have come here. Not where
        an error is on its way up: the others may never come, so that the process is ended at once.
        """
        if self._process.poll() is None and sys.exc_info()[0] is None:
            self._sock.settimeout(CLOSE_SECONDS)
            with contextlib.suppress(wire.PeerGone, RuntimeError, TimeoutError):
                self._ask("closing", {"op": "close"})
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(CLOSE_SECONDS)
        self._sock.close()
        _end(self._process)

    def _ask(self, what: str, header: dict[str, Any], body: bytes = b"") -> wire.Frame:
        self._drop_submitted()
        self._tell(what, header, body)
        return self._answer()

    def _tell(self, what: str, header: dict[str, Any], body: bytes = b"") -> None:
        self._asked = what
        try:
            wire.send(self._sock, header, body)
        except wire.PeerGone as error:
            self._gone(error)

    def _answer(self) -> wire.Frame:
        try:
            frame = wire.receive(self._sock)
        except wire.PeerGone as error:
            if self._asked == LOADING and self._process.wait() in (1, 2):
                # Python's own status where there is no such module, or no such interpreter's library.
                raise
            self._gone(error)
        if kind := frame.header.get("error"):
            raise ERRORS.get(kind, RuntimeError)(frame.header["message"])
        return frame

    def _gone(self, error: Exception) -> NoReturn:
        status = self._process.wait()
        how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        raise TargetDied(f"the target's process {how} during {self._asked}; see its own error above") from error


def spawn(theirs: socket.socket, python: str | None, device: torch.device) -> subprocess.Popen[bytes]:
    """Start the target's process at the other end of ``theirs``.

    Raises:
        OSError: ``python`` cannot be run.
    """
    os.set_inheritable(theirs.fileno(), True)
    return subprocess.Popen(
        [python or sys.executable, "-m", "nemo_eagle3_sglang.sidecar", str(theirs.fileno()), str(os.getpid())],
        pass_fds=[theirs.fileno()],
        env=_environment(python, device),
        stdin=subprocess.DEVNULL,
        # Standard output is for what a command is asked for; whatever the engine prints is a log.
        stdout=sys.stderr.fileno() if _has_descriptor(sys.stderr) else None,
    )


def _environment(python: str | None, device: torch.device) -> dict[str, str]:
    """Return the child's environment: without the trainer's group; with this package where it is the same Python."""
    kept = {k: v for k, v in os.environ.items() if k not in TRAINERS_GROUP and not k.startswith("TORCHELASTIC_")}
    if device.type == "cpu":
        # SGLang compiles the embedding of a sharded target, on a CPU a minute for nothing.
        kept.setdefault("TORCHDYNAMO_DISABLE", "1")
    if python:
        # The search path of one environment is the wrong libraries for another.
        kept.pop("PYTHONPATH", None)
        return kept
    root = str(Path(__file__).resolve().parents[2])
    kept["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    return kept


def _has_descriptor(stream: Any) -> bool:
    try:
        stream.fileno()
    except (AttributeError, OSError, ValueError):
        return False
    return True


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process that did not end by itself."""
    if process.poll() is None:
        process.kill()
    process.wait()


def target_group(tp: int, device: torch.device, timeout_s: float) -> tuple[Group, Any]:
    """Return this rank's place among the ``tp`` ranks that share a target, and what must be kept alive for them.

    Neighbouring ranks share one, so that a group lies within a host where it can. Its first rank opens a store on a
    free port, and all ranks are told where; a group on one host meets on loopback.

    Args:
        tp: Processes of a group; divides the world.
        device: Where the trainer's group exchanges tensors.
        timeout_s: How long a rank may keep the others of its group waiting.

    Raises:
        ConfigError: The trainer's processes cannot be divided into groups of ``tp``.
    """
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if world % tp:
        raise ConfigError(
            f"recipe_args.sglang_args.tp_size: {tp} GPUs share a target, this job has {world} processes; start it "
            f"with --nproc-per-node {tp} or a multiple"
        )
    if tp == 1:
        return Group(timeout_s=timeout_s), None
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world)) % tp == 0
    host = LOOPBACK if local else own_address(os.environ.get("MASTER_ADDR", LOOPBACK))
    store = dist.TCPStore(host, 0, None, True, wait_for_workers=False) if rank % tp == 0 else None
    mine = torch.tensor([int(ipaddress.IPv4Address(host)), store.port if store else 0], device=device)
    places = torch.empty((world, 2), dtype=torch.int64, device=device)
    dist.all_gather_into_tensor(places.view(-1), mine)
    address, port = places[rank - rank % tp].tolist()
    return Group(rank % tp, tp, str(ipaddress.IPv4Address(address)), port, timeout_s), store


def own_address(master: str) -> str:
    """Return the address by which other hosts of the job reach this one; nothing is sent to find it.

    Args:
        master: The host where the job meets. Its own name often stands for loopback there, so that the route to
            anywhere decides then.

    Raises:
        ConfigError: This host has no address but loopback.
    """
    for other in (master, SOMEWHERE):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
            probe.connect((other, 9))
            address = str(probe.getsockname()[0])
            if not ipaddress.IPv4Address(address).is_loopback:
                return address
    raise ConfigError(
        "recipe_args.sglang_args.tp_size: the target's ranks lie on several hosts, and this one has no address that "
        f"the others could reach (MASTER_ADDR={master})"
    )
