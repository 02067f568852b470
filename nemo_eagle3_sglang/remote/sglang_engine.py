"""A real SGLang engine behind a target server: its own scheduler and workers, with this package's plugin in them."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import struct
import threading
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

import numpy as np
import torch

from nemo_eagle3_sglang.contracts import AuxPlan, BackendRequest, Sequences, TargetInfo
from nemo_eagle3_sglang.engine import versions
from nemo_eagle3_sglang.errors import CaptureError, ConfigError
from nemo_eagle3_sglang.head_rows import HeadRows
from nemo_eagle3_sglang.remote.answer import Answer, Busy, Refused, TargetCard, joined
from nemo_eagle3_sglang.remote.ask import Ask
from nemo_eagle3_sglang.remote.buffers import view_of
from nemo_eagle3_sglang.remote.card import fingerprint, read_config
from nemo_eagle3_sglang.remote.plugin import VARIABLE, Settings
from nemo_eagle3_sglang.sidecar import wire
from nemo_eagle3_sglang.supervision.aux_layers import resolve_aux_layer_ids

logger = logging.getLogger(__name__)

PROBE_TOKENS = 16
# From a worker's forward to its rows at the front is a message on this host.
ROWS_SECONDS = 60.0
# A first forward compiles kernels.
PROBE_SECONDS = 1800.0
_CREDENTIALS = struct.Struct("3i")

# What would lose rows, or has no use in a server that only runs prefills; set whatever the command line says.
FORCED: dict[str, Any] = {
    "disable_radix_cache": True,
    "chunked_prefill_size": -1,
    "enable_mixed_chunk": False,
    "disable_overlap_schedule": True,
    "disable_cuda_graph": True,
    "disable_piecewise_cuda_graph": True,
    "skip_tokenizer_init": True,
    "enforce_disable_flashinfer_allreduce_fusion": True,
}
SWITCHED_OFF = "prefix cache, chunked prefill, overlap schedule and CUDA graphs are off: rows would be lost in them"
# Layouts in which one worker does not hold all rows of a sequence, or not on this host.
REFUSED: dict[str, str] = {
    "pp_size": "the aux layers would lie on other workers than the head",
    "enable_dp_attention": "the rows of a forward are spread over workers between its layers",
    "speculative_algorithm": "the draft is what is being trained",
    "enable_lora": "the target is served as it is",
    "enable_two_batch_overlap": "a forward would be run in two halves",
    "attn_cp_size": "a sequence would be spread over workers",
}


def parse_flags(target: str, flags: Sequence[str]) -> Namespace:
    """Return SGLang's own arguments for the flags that are not ``serve-target``'s.

    Raises:
        ConfigError: A layout that this server cannot capture in.
    """
    from sglang.srt.server_args import ServerArgs

    parser = ArgumentParser(prog="nemo-eagle3-sglang serve-target: SGLang's flags", allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    default = parser.parse_args(["--model-path", target])
    given = parser.parse_args(["--model-path", target, *flags])
    for name, reason in REFUSED.items():
        if getattr(given, name, None) != getattr(default, name, None):
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"serve-target {flag} {getattr(given, name)}: not possible, {reason}; leave it out")
    if given.nnodes > 1 and given.dp_size > 1:
        raise ConfigError(
            "serve-target --dp-size on several hosts: the rows of another host's replica do not reach this server; "
            "start a server on each host and give all of them in recipe_args.remote_urls"
        )
    for name, value in FORCED.items():
        if name in versions.server_arg_names():
            setattr(given, name, value)
    if given.log_level == default.log_level:
        given.log_level = "warning"
    if not torch.cuda.is_available():
        _on_cpu(given, default)
    return given


def _on_cpu(given: Namespace, default: Namespace) -> None:
    """Let SGLang run where there is no GPU: its torch kernels, and a pool that is no share of the host's memory."""
    wanted = {
        "device": "cpu",
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "max_total_tokens": 16384,
        "mem_fraction_static": 0.2,
        # The scheduler would spin on a core that the trainer needs.
        "sleep_on_idle": True,
        "max_running_requests": 64,
    }
    for name, value in wanted.items():
        if getattr(given, name) == getattr(default, name):
            setattr(given, name, value)


@dataclass
class _Worker:
    """One connection from a worker: its socket, the buffers it has shown, and how many requests each still holds."""

    sock: socket.socket
    buffers: dict[int, torch.Tensor] = field(default_factory=dict)
    held: dict[int, int] = field(default_factory=dict)
    sending: threading.Lock = field(default_factory=threading.Lock)


class SGLangEngine:
    """A :class:`~nemo_eagle3_sglang.remote.answer.TargetEngine` over ``sglang.Engine``.

    Args:
        request: Target, capture, self-check.
        aux_layer_ids: The layers asked for; ``None`` for the default ones.
        flags: SGLang's own command line.
        buffer_bytes: Of rows that wait to be fetched, at most, for each worker.
        loop: Where :meth:`states` will be called.

    Raises:
        ConfigError: See :func:`parse_flags`, and where SGLang cannot serve a draft with these layers' states.
        CaptureError: The states cannot be captured with certainty.
    """

    def __init__(
        self,
        request: BackendRequest,
        aux_layer_ids: list[int] | None,
        flags: Sequence[str],
        buffer_bytes: int,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        import sglang
        from sglang.srt.configs.model_config import ModelConfig
        from sglang.srt.server_args import ServerArgs

        versions.check_installed()
        arguments = parse_flags(request.target, flags)
        self._loop, self._waiting = loop, dict[str, asyncio.Future[Any]]()
        self._lock = threading.Lock()
        self._weights: dict[str, torch.Tensor] = {}
        self._ready: asyncio.Future[dict[str, Any]] = loop.create_future()
        self._closed = False
        address = f"nemo-eagle3-sglang-{secrets.token_hex(16)}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind("\0" + address)
        self._listener.listen()
        threading.Thread(target=self._accept, name="eagle3-workers", daemon=True).start()
        server_args = ServerArgs.from_cli_args(arguments)
        layers = ModelConfig.from_server_args(server_args).hf_text_config.num_hidden_layers
        ids = resolve_aux_layer_ids(aux_layer_ids, layers)
        os.environ[VARIABLE] = Settings(address, ids, request.capture, request.self_check, buffer_bytes).text()
        versions.prepare_server_process(server_args.tp_size)
        logger.info(SWITCHED_OFF)
        asyncio.set_event_loop(loop)
        self._engine = sglang.Engine(server_args=server_args)
        try:
            info = loop.run_until_complete(self._probe(server_args.dp_size))
        except BaseException:
            self.close()
            raise
        self._scale, self._softcap = info["scale"], info["softcap"]
        dimensions = TargetInfo(info["num_hidden_layers"], info["hidden_size"], info["vocab_size"])
        plan, config = AuxPlan(**info["plan"]), read_config(request.target)
        self.card = TargetCard(
            name=PurePath(request.target).name,
            engine=f"sglang {sglang.__version__}",
            info=dimensions,
            dtype=getattr(torch, info["dtype"]),
            limit=info["limit"] - 1,
            plan=plan,
            capture=request.capture,
            config=config,
            fingerprint=fingerprint(dimensions, plan, config, self._weights["embedding"], self._weights["weight"]),
        )

    async def _probe(self, replicas: int) -> dict[str, Any]:
        """Run a few tokens on each replica, whereupon its workers calibrate; return what the target is."""
        tokens = np.arange(PROBE_TOKENS, dtype=np.int64)
        for replica in range(replicas):
            sequences = Sequences(tokens, [PROBE_TOKENS], tokens[1:])
            answer = await self._run(sequences, "native", PROBE_SECONDS, replica if replicas > 1 else None)
            answer.release()
        return await asyncio.wait_for(self._ready, ROWS_SECONDS)

    async def states(self, sequences: Sequences, rows: str) -> Answer:
        """See :meth:`TargetEngine.states`. One request of SGLang's for each sequence; it batches them as it likes."""
        return await self._run(sequences, rows, ROWS_SECONDS, None)

    async def _run(self, sequences: Sequences, rows: str, seconds: float, replica: int | None) -> Answer:
        asks = self._asks(sequences, rows)
        if not asks:
            return joined([], lambda: None)
        futures = [self._expect(ask.name) for ask in asks]
        parts = np.split(sequences.tokens, np.cumsum(sequences.lengths)[:-1])
        try:
            await self._engine.async_generate(
                input_ids=[part.tolist() for part in parts],
                sampling_params={"max_new_tokens": 1, "temperature": 0.0},
                rid=[ask.rid() for ask in asks],
                **versions.replica_argument(replica),
            )
            found = await asyncio.wait_for(asyncio.gather(*futures), seconds)
        except ValueError as error:
            # SGLang's own refusal of a request: too long for its context or pool.
            raise Refused(f"SGLang refuses the request: {error}") from error
        except TimeoutError as error:
            raise Refused(
                f"SGLang ran the request, but no rows came within {seconds:.0f} s: is this package's plugin loaded?"
            ) from error
        finally:
            self._forget(asks)
        return joined([rows for rows, _ in found], lambda: [give() for _, give in found])

    def _asks(self, sequences: Sequences, rows: str) -> list[Ask]:
        ends = np.cumsum(sequences.lengths, dtype=np.int64)
        bounds = np.searchsorted(sequences.supervised, ends)
        asks, before = [], 0
        for length, end, bound in zip(sequences.lengths, ends, bounds, strict=True):
            own = sequences.supervised[before:bound] - (end - length)
            asks.append(Ask(secrets.token_hex(8), int(length), own, rows))
            before = bound
        return asks

    def _expect(self, name: str) -> asyncio.Future[Any]:
        future = self._loop.create_future()
        # Looked at or not, an error that nobody awaits any more is no news.
        future.add_done_callback(lambda f: f.cancelled() or f.exception())
        with self._lock:
            self._waiting[name] = future
        return future

    def _forget(self, asks: list[Ask]) -> None:
        """Expect nothing more; rows that came for a request that failed as a whole are given back."""
        with self._lock:
            futures = [self._waiting.pop(ask.name, None) for ask in asks]
        complete = all(f is not None and f.done() and not f.cancelled() and f.exception() is None for f in futures)
        if complete:
            return
        for future in futures:
            if future is None or not future.done():
                if future is not None:
                    future.add_done_callback(_give_back)
                    future.cancel()
            else:
                _give_back(future)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            _, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
            if uid != os.getuid():
                # An abstract socket has no permissions of its own.
                sock.close()
                continue
            threading.Thread(target=self._read, args=(_Worker(sock),), name="eagle3-rows", daemon=True).start()

    def _read(self, worker: _Worker) -> None:
        try:
            while True:
                frame = wire.receive(worker.sock)
                self._take(worker, frame.header, frame.fd)
        except wire.PeerGone:
            self._closed = True

    def _take(self, worker: _Worker, header: dict[str, Any], fd: int | None) -> None:
        if "weight" in header:
            assert fd is not None
            memory = view_of(fd, header["size"])
            dtype, shape = getattr(torch, header["dtype"]), header["shape"]
            count = int(np.prod(shape))
            self._weights[header["weight"]] = memory[: count * dtype.itemsize].view(dtype).view(shape)
        elif "ready" in header:
            self._call(_set_result, self._ready, header["ready"])
        elif "failed" in header:
            kinds: dict[str, type[Exception]] = {"Full": Busy, "ConfigError": ConfigError, "CaptureError": CaptureError}
            error = kinds.get(header["kind"], Refused)(header["message"])
            for name in header["failed"]:
                with self._lock:
                    future = self._waiting.get(name)
                if future is not None:
                    self._call(_set_error, future, error)
        else:
            self._rows(worker, header, fd)

    def _rows(self, worker: _Worker, header: dict[str, Any], fd: int | None) -> None:
        number = header["buffer"]
        for dropped in header["dropped"]:
            worker.buffers.pop(dropped, None)
        if fd is not None:
            worker.buffers[number] = view_of(fd, header["size"])
        memory = memoryview(worker.buffers[number].numpy())
        requests = header["requests"]
        with self._lock:
            worker.held[number] = len(requests)
            futures = [self._waiting.get(request["name"]) for request in requests]
        for request, future in zip(requests, futures, strict=True):
            rows = {name: memory[at : at + size] for name, (at, size) in request["tensors"].items()}
            give = _Once(lambda: self._release(worker, number))
            if future is None:
                # Whoever asked has given up.
                give()
            else:
                self._call(_set_result, future, (rows, give))

    def _release(self, worker: _Worker, number: int) -> None:
        with self._lock:
            worker.held[number] -= 1
            if worker.held[number]:
                return
        try:
            # The event loop and the worker's own reader both give back; their frames must not mix.
            with worker.sending:
                wire.send(worker.sock, {"release": number})
        except wire.PeerGone:
            self._closed = True

    def _call(self, function: Any, *arguments: Any) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)

    def head_rows(self, token_ids: torch.Tensor) -> HeadRows:
        """See :meth:`TargetEngine.head_rows`."""
        bias = self._weights["bias"][token_ids]
        return HeadRows(
            self._weights["weight"][token_ids], bias if bool(bias.any()) else None, self._scale, self._softcap
        )

    def input_embeddings(self) -> torch.Tensor:
        """See :meth:`TargetEngine.input_embeddings`."""
        return self._weights["embedding"]

    def alive(self) -> bool:
        """See :meth:`TargetEngine.alive`."""
        return not self._closed

    def close(self) -> None:
        """See :meth:`TargetEngine.close`."""
        self._listener.close()
        self._engine.shutdown()


class _Once:
    """Calls a function once, whoever calls it how often."""

    def __init__(self, function: Any) -> None:
        self._function = function
        self._lock = threading.Lock()

    def __call__(self) -> None:
        with self._lock:
            function, self._function = self._function, None
        if function is not None:
            function()


def _set_result(future: asyncio.Future[Any], value: Any) -> None:
    if not future.done():
        future.set_result(value)
    elif isinstance(value, tuple):
        value[1]()


def _set_error(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)


def _give_back(future: asyncio.Future[Any]) -> None:
    if not future.cancelled() and future.exception() is None:
        future.result()[1]()
