"""The front of a target server: HTTP, one kept-alive connection a trainer, safetensors frames in both directions.

    GET  /health         200 while the engine runs; no token needed
    GET  /metrics        Prometheus
    GET  /v1/target      what the target is, as JSON
    GET  /v1/embeddings  frame ``weight [V, H]``
    POST /v1/head        frame ``ids [n]`` -> frame ``weight [n, H]``, ``bias [n]``
    POST /v1/states      frame ``tokens [T]``, ``lengths [n]``, ``supervised [P]`` -> frame of ``rows.shapes``

A request carries the fingerprint of the target and the aux ids that its sender believes in, so that a server that was
replaced by another one in the middle of a run cannot answer in its place.
"""

from __future__ import annotations

import asyncio
import dataclasses
import io
import json
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import torch
from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

import nemo_eagle3_sglang
from nemo_eagle3_sglang.contracts import Sequences
from nemo_eagle3_sglang.errors import CaptureError, ConfigError
from nemo_eagle3_sglang.remote import frames, rows, token
from nemo_eagle3_sglang.remote.answer import Answer, Busy, Refused, TargetCard, TargetEngine
from nemo_eagle3_sglang.remote.ask import ROWS

logger = logging.getLogger(__name__)

PROTOCOL = 1
MAX_TOKENS = 2**20
# Of a request: three integers of eight bytes a token, and a header.
MAX_BODY = 3 * 8 * MAX_TOKENS + frames.MAX_HEADER + 8
OPEN_PATHS = ("/health",)
# What is written at once, and how long a client may take to read it before it is taken to be gone: rows that nobody
# reads hold memory that others wait for.
PIECE = 2**20
SEND_SECONDS = 120.0

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Problem(Exception):
    """What the client is told.

    Args:
        status: HTTP status.
        kind: A word that the client acts on.
        message: For a person.
    """

    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.status, self.kind = status, kind


class Front:
    """The application.

    Args:
        engine: What runs the target.
        secret: The token, where one is needed.
    """

    def __init__(self, engine: TargetEngine, secret: str | None) -> None:
        self._engine, self._secret = engine, secret
        self.registry = CollectorRegistry()
        prefix = "eagle3_target_"
        self._requests = Counter(
            prefix + "requests", "Requests by outcome.", ["path", "status"], registry=self.registry
        )
        self._tokens = Counter(prefix + "tokens", "Tokens run through the target.", registry=self.registry)
        self._bytes = Counter(prefix + "sent_bytes", "Bytes of states sent.", registry=self.registry)
        self._seconds = Histogram(prefix + "states_seconds", "From request to last byte.", registry=self.registry)
        self._active = Gauge(prefix + "active_requests", "Micro-batches under way.", registry=self.registry)

    @property
    def _signed(self) -> dict[str, str]:
        """Every answer says whose it is."""
        return {"fingerprint": self._engine.card.fingerprint}

    def app(self) -> web.Application:
        """Return the aiohttp application."""

        @web.middleware
        async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
            return await self._guard(request, handler)

        app = web.Application(client_max_size=MAX_BODY, middlewares=[guard])
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/v1/target", self._target)
        app.router.add_get("/v1/embeddings", self._embeddings)
        app.router.add_post("/v1/head", self._head)
        app.router.add_post("/v1/states", self._states)
        return app

    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Check the token, and turn every failure into JSON that carries neither a path nor a traceback."""
        try:
            secret = self._secret if request.path not in OPEN_PATHS else None
            if secret and not token.fits(request.headers.get("Authorization"), secret):
                raise Problem(401, "token", "this server needs its token, in Authorization: Bearer TOKEN")
            if "Content-Encoding" in request.headers:
                # A few bytes could be made to fill memory.
                raise Problem(415, "encoding", "this server takes bodies as they are, without Content-Encoding")
            response = await handler(request)
        except Problem as problem:
            response = _told(problem.status, problem.kind, str(problem))
        except web.HTTPException as problem:
            response = _told(problem.status, "http", problem.reason)
        except ConnectionError:
            self._count(request, "gone")
            raise
        except Exception:
            logger.exception("%s %s failed", request.method, request.path)
            response = _told(500, "internal", "an internal error; the server's log has it")
        self._count(request, str(response.status))
        return response

    def _count(self, request: web.Request, status: str) -> None:
        # A client's own words must not become labels without end.
        known = request.match_info.route.resource
        self._requests.labels(known.canonical if known is not None else "other", status).inc()

    async def _health(self, request: web.Request) -> web.Response:
        alive = self._engine.alive()
        return web.json_response({"status": "ok" if alive else "the engine has ended"}, status=200 if alive else 503)

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self.registry), headers={"Content-Type": "text/plain; version=0.0.4"})

    async def _target(self, request: web.Request) -> web.Response:
        return web.json_response(describe(self._engine.card))

    async def _embeddings(self, request: web.Request) -> web.StreamResponse:
        return await _send(request, frames.encode({"weight": self._engine.input_embeddings()}, self._signed))

    async def _head(self, request: web.Request) -> web.StreamResponse:
        frame = await _frame(request)
        vocab = self._engine.card.info.vocab_size
        ids = _integers(frame, "ids", vocab, low=0, high=vocab - 1)
        found = self._engine.head_rows(torch.from_numpy(ids))
        tensors = {"weight": found.weight, **({} if found.bias is None else {"bias": found.bias})}
        numbers = {name: repr(v) for name in ("scale", "softcap") if (v := getattr(found, name)) is not None}
        return await _send(request, frames.encode(tensors, {**self._signed, **numbers}))

    async def _states(self, request: web.Request) -> web.StreamResponse:
        began, card = time.monotonic(), self._engine.card
        frame = await _frame(request)
        _check_same(frame.metadata, card)
        kind = frame.metadata.get("rows", "native")
        if kind not in ROWS:
            raise Problem(400, "request", f"rows {kind!r}: one of {', '.join(ROWS)}")
        sequences = _sequences(frame, card)
        with self._active.track_inprogress():
            answer = await self._run(sequences, kind)
            try:
                pieces = _pieces(answer, sequences, card, kind)
                response = await _send(request, pieces)
            finally:
                answer.release()
        self._tokens.inc(len(sequences.tokens))
        self._bytes.inc(sum(map(len, pieces)))
        self._seconds.observe(time.monotonic() - began)
        return response

    async def _run(self, sequences: Sequences, kind: str) -> Answer:
        try:
            return await self._engine.states(sequences, kind)
        except Busy as error:
            raise Problem(503, "busy", str(error)) from error
        except Refused as error:
            raise Problem(422, "refused", str(error)) from error
        except (CaptureError, ConfigError) as error:
            raise Problem(500, "capture", str(error)) from error


def describe(card: TargetCard) -> dict[str, Any]:
    """Return a target's card as JSON can hold it."""
    return {
        **dataclasses.asdict(card),
        "dtype": str(card.dtype).removeprefix("torch."),
        "protocol": PROTOCOL,
        "package": nemo_eagle3_sglang.__version__,
        "rows": list(ROWS),
        "max_tokens": MAX_TOKENS,
    }


def _check_same(metadata: dict[str, str], card: TargetCard) -> None:
    if metadata.get("fingerprint") != card.fingerprint:
        raise Problem(
            409, "changed", f"this server's target, {card.name}, is not the one that the request is meant for"
        )
    if metadata.get("aux") != json.dumps(card.plan.trained):
        raise Problem(409, "aux", f"this server captures layers {card.plan.trained}, not {metadata.get('aux')}")


def _sequences(frame: frames.Frame, card: TargetCard) -> Sequences:
    tokens = _integers(frame, "tokens", MAX_TOKENS, low=0, high=card.info.vocab_size - 1)
    lengths = _integers(frame, "lengths", MAX_TOKENS, low=1, high=card.limit)
    supervised = _integers(frame, "supervised", len(tokens), low=0, high=max(len(tokens) - 1, 0))
    if lengths.sum() != len(tokens):
        raise Problem(400, "request", f"lengths of {lengths.sum()} tokens, {len(tokens)} came")
    if len(supervised) > 1 and np.diff(supervised).min() < 1:
        raise Problem(400, "request", "supervised tokens must ascend")
    return Sequences(tokens, lengths.tolist(), supervised)


def _integers(frame: frames.Frame, name: str, most: int, low: int, high: int) -> np.ndarray:
    tensor = frame.tensors.get(name)
    if tensor is None or tensor.dim() != 1 or tensor.dtype not in (torch.int32, torch.int64) or len(tensor) > most:
        raise Problem(400, "request", f"{name} must be a list of at most {most} integers")
    values = tensor.long().numpy()
    if len(values) and (values.min() < low or values.max() > high):
        raise Problem(400, "request", f"{name} must lie between {low} and {high}")
    return values


async def _frame(request: web.Request) -> frames.Frame:
    body = await request.read()
    stream = io.BytesIO(body)
    try:
        frame = frames.read(stream.readinto, limit=len(body))
    except frames.FrameError as error:
        raise Problem(400, "frame", str(error)) from error
    if stream.tell() != len(body):
        raise Problem(400, "frame", "bytes follow the frame")
    return frame


def _pieces(answer: Answer, sequences: Sequences, card: TargetCard, kind: str) -> list[bytes | memoryview]:
    """Return a response's frame, once the rows are as many as were asked for.

    Raises:
        Problem: They are not; a short answer is never filled up.
    """
    counts = len(sequences.tokens), len(sequences.supervised)
    shapes = rows.shapes(*counts, card.info.hidden_size, card.dtype, kind)
    pieces: list[bytes | memoryview] = [frames.header(shapes, {"fingerprint": card.fingerprint})]
    for name, (dtype, shape) in shapes.items():
        parts = answer.parts.get(name, [])
        size = int(np.prod(shape)) * dtype.itemsize
        if sum(map(len, parts)) != size:
            raise Problem(
                500, "short", f"the engine gave {sum(map(len, parts))} bytes of {name}, {size} were asked for"
            )
        pieces += parts
    return pieces


async def _send(request: web.Request, pieces: list[bytes | memoryview]) -> web.StreamResponse:
    """Send a frame.

    When this returns, no part of ``pieces`` is in use: what is not with the kernel yet is a copy (asyncio may keep a
    view of what it is given beyond the call, and the engine writes over rows that are released).

    Raises:
        ConnectionError: The client is gone, or reads no more; or the rows could not be read. A response that has begun
            is never completed with anything else.
    """
    response = web.StreamResponse(headers={"Content-Type": "application/octet-stream"})
    response.content_length = sum(map(len, pieces))
    await response.prepare(request)
    try:
        for piece in pieces:
            for start in range(0, len(piece), PIECE):
                part = bytes(piece[start : start + PIECE])
                await asyncio.wait_for(response.write(part), SEND_SECONDS)
        await response.write_eof()
    except BaseException as error:
        if request.transport is not None:
            request.transport.abort()
        if isinstance(error, ConnectionError) or not isinstance(error, Exception):
            raise
        if not isinstance(error, TimeoutError):
            logger.exception("%s %s failed in its answer", request.method, request.path)
        raise ConnectionResetError("the answer ends early") from error
    return response


def _told(status: int, kind: str, message: str) -> web.Response:
    return web.json_response({"kind": kind, "error": message}, status=status)
