"""The trainer's side of a target server: needs neither sglang nor a GPU of its own for the target."""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NoReturn
from urllib.parse import urlsplit

import torch

from nemo_eagle3_sglang.contracts import AuxPlan, Sequences, TargetInfo, TargetStates
from nemo_eagle3_sglang.errors import ConfigError
from nemo_eagle3_sglang.head_rows import HeadRows
from nemo_eagle3_sglang.remote import frames, rows
from nemo_eagle3_sglang.remote.ask import ROWS
from nemo_eagle3_sglang.remote.card import differences

logger = logging.getLogger(__name__)

PROTOCOL = 1
MAX_JSON = 2**20
READ_BYTES = 2**22
FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0
RETRIED_STATUS = (502, 503, 504)


class ServerError(RuntimeError):
    """No server gave the states of a micro-batch; the step that needs them is not taken."""


@dataclass(frozen=True)
class Remote:
    """How target servers are reached.

    Attributes:
        urls: Of equal servers, asked in turn.
        token: Sent to them; ``None`` for none.
        timeout_s: Of one request, and of each wait for bytes in it.
        retries: Attempts after the first, at the next server each.
        rows: ``native``, or ``fp8`` to halve what travels.
        ahead: Micro-batches that may be under way at once.
    """

    urls: tuple[str, ...]
    token: str | None = None
    timeout_s: float = 120.0
    retries: int = 3
    rows: str = "native"
    ahead: int = 1


class RemoteProvider:
    """A :class:`~nemo_eagle3_sglang.contracts.StatesProvider` over target servers.

    Args:
        remote: See :class:`Remote`.
        config: The target's config.json as the trainer has it (see ``card.read_config``); empty for unknown.
        device: Where the states are wanted.

    Raises:
        ConfigError: A server cannot be reached, is not one, has another target than the trainer's recipe names, or the
            servers differ.
    """

    def __init__(self, remote: Remote, config: dict[str, object], device: torch.device) -> None:
        self._remote, self._device = remote, device
        self._local = threading.local()
        self._turn = 0
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._pending: deque[Future[dict[str, torch.Tensor]]] = deque()
        self._head: dict[bytes, HeadRows] = {}
        cards = [self._card(url) for url in remote.urls]
        for url, card in zip(remote.urls, cards, strict=True):
            _check_card(url, card, cards[0], remote, config)
        card = self.card = cards[0]
        self.info = TargetInfo(**card["info"])
        self.dtype: torch.dtype = getattr(torch, card["dtype"])
        self.plan = AuxPlan(**card["plan"])
        self.max_sequence_length = int(card["limit"])
        self._threads = ThreadPoolExecutor(max(1, remote.ahead), "eagle3-remote")
        logger.info(
            "Target %s on %s at %s, aux layers %s", card["name"], card["engine"], ", ".join(remote.urls), card["plan"]
        )

    def _card(self, url: str) -> dict[str, Any]:
        try:
            status, body = self._plain(url, "GET", "/v1/target")
            card = json.loads(body)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ConfigError(
                f"recipe_args.remote_urls: {url} does not answer as a target server: {_words(error)}; start one with "
                "nemo-eagle3-sglang serve-target"
            ) from error
        if status == 401:
            raise ConfigError(
                f"recipe_args.remote_token_file: {url} does not take this token; give the file that the server has"
            )
        if status != 200 or not isinstance(card, dict) or "fingerprint" not in card:
            raise ConfigError(
                f"recipe_args.remote_urls: {url} is no target server of this package (HTTP {status}); AutoModel's own "
                "is used with `recipe: TrainEagle3Recipe` and `automodel`"
            )
        return card

    def set_aux_layers(self, aux_layer_ids: Sequence[int]) -> None:
        """See :class:`StatesProvider`."""
        if list(aux_layer_ids) != self.plan.trained:
            raise ConfigError(
                f"recipe_args.aux_layer_ids: {list(aux_layer_ids)}, but the target server captures "
                f"{self.plan.trained}; leave the key out, or start the server with --aux-layer-ids"
            )

    def plan_aux_layers(self, aux_layer_ids: Sequence[int]) -> AuxPlan:
        """Return the server's plan; :meth:`set_aux_layers` refuses other layers."""
        if sorted(aux_layer_ids) != sorted(self.plan.trained):
            self.set_aux_layers(aux_layer_ids)
        return self.plan

    def head_rows(self, token_ids: torch.Tensor) -> HeadRows:
        """Return the head at ``token_ids``, fetched once."""
        ids = token_ids.to(torch.int64).contiguous()
        key = ids.numpy().tobytes()
        if key not in self._head:
            frame = self._retry("/v1/head", {"ids": ids}, {}, self._limit(len(ids) * (self.info.hidden_size + 1)))
            weight, bias = frame.tensors.get("weight"), frame.tensors.get("bias")
            if weight is None or tuple(weight.shape) != (len(ids), self.info.hidden_size):
                raise ServerError("the target server gave another head than was asked for")
            numbers = {name: float(frame.metadata[name]) for name in ("scale", "softcap") if name in frame.metadata}
            self._head = {key: HeadRows(weight, bias, numbers.get("scale"), numbers.get("softcap"))}
        return self._head[key]

    def input_embeddings(self) -> torch.Tensor:
        """Return the input embedding ``[V, H]``."""
        wanted = (self.info.vocab_size, self.info.hidden_size)
        frame = self._retry("/v1/embeddings", None, {}, self._limit(wanted[0] * wanted[1]))
        weight = frame.tensors.get("weight")
        if weight is None or tuple(weight.shape) != wanted:
            raise ServerError(f"the target server gave no embedding of {wanted}")
        return weight

    def submit(self, sequences: Sequences) -> None:
        """See :class:`StatesProvider`; a thread does the asking."""
        self._pending.append(self._threads.submit(self._states, sequences))

    def collect(self) -> TargetStates:
        """See :class:`StatesProvider`.

        Raises:
            ServerError: No server gave them, or what came is not what was asked for.
        """
        tensors = self._pending.popleft().result()
        # From pinned memory, behind what the device has still to do.
        on_device = {name: tensor.to(self._device, non_blocking=True) for name, tensor in tensors.items()}
        return rows.unpack(on_device, self.dtype)

    def _states(self, sequences: Sequences) -> dict[str, torch.Tensor]:
        tokens, positions = len(sequences.tokens), len(sequences.supervised)
        wanted = rows.shapes(tokens, positions, self.info.hidden_size, self.dtype, self._remote.rows)
        ask = {
            "tokens": torch.from_numpy(sequences.tokens).to(torch.int32),
            "lengths": torch.tensor(sequences.lengths, dtype=torch.int32),
            "supervised": torch.from_numpy(sequences.supervised).to(torch.int32),
        }
        metadata = {
            "fingerprint": self.card["fingerprint"],
            "aux": json.dumps(self.plan.trained),
            "rows": self._remote.rows,
        }
        limit = sum(dtype.itemsize * torch.Size(shape).numel() for dtype, shape in wanted.values())
        frame = self._retry("/v1/states", ask, metadata, limit)
        found = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in frame.tensors.items()}
        if found != wanted:
            raise ServerError(f"the target server gave {found} where {wanted} was asked for")
        choices = frame.tensors["choices"]
        if positions and not 0 <= int(choices.min()) <= int(choices.max()) < self.info.vocab_size:
            raise ServerError("the target server gave tokens that are not in its vocabulary")
        return frame.tensors

    def _limit(self, elements: int) -> int:
        return 8 * elements

    def _retry(
        self, path: str, tensors: dict[str, torch.Tensor] | None, metadata: dict[str, str], limit: int
    ) -> frames.Frame:
        """Ask one server after another until one answers.

        Raises:
            ServerError: None did, or one says that the request is wrong.
        """
        wait, problem = FIRST_WAIT, "it was never asked"
        for attempt in range(self._remote.retries + 1):
            url = self._next()
            try:
                status, answer = self._exchange(url, path, tensors, metadata, limit)
            except (OSError, http.client.HTTPException, frames.FrameError) as error:
                self._drop(url)
                problem = f"{url}: {_words(error)}"
            else:
                if status == 200:
                    if answer.metadata.get("fingerprint") != self.card["fingerprint"]:
                        raise ServerError(f"{url} has another target than when this run began: {self.card['name']}")
                    return answer
                problem = f"{url}: HTTP {status}, {answer.get('error', 'no reason given')}"
                if status not in RETRIED_STATUS:
                    raise ServerError(f"the target server refuses: {problem}")
            if attempt < self._remote.retries:
                logger.warning("The target server failed (%s); trying again in %.1f s", problem, wait)
                if self._closed.wait(wait):
                    break
                wait = min(2 * wait, LONGEST_WAIT)
        raise ServerError(
            f"no target server answered in {self._remote.retries + 1} attempts (recipe_args.remote_max_retries, "
            f"remote_timeout): {problem}. Nothing was trained on what is missing; start the server again and resume"
        )

    def _next(self) -> str:
        with self._lock:
            self._turn += 1
            return self._remote.urls[self._turn % len(self._remote.urls)]

    def _exchange(
        self, url: str, path: str, tensors: dict[str, torch.Tensor] | None, metadata: dict[str, str], limit: int
    ) -> tuple[int, Any]:
        body = None if tensors is None else b"".join(frames.encode(tensors, metadata))
        end = time.monotonic() + self._remote.timeout_s
        response = self._response(url, "GET" if body is None else "POST", path, body)
        if response.status != 200:
            return response.status, _json(response.read(MAX_JSON + 1))

        def readinto(view: memoryview) -> int:
            if time.monotonic() > end:
                raise TimeoutError(f"no whole answer within {self._remote.timeout_s:.0f} s")
            # One read of the socket at most: `readinto` would wait for all of the view, whatever the clock says.
            part = response.read1(min(len(view), READ_BYTES))
            view[: len(part)] = part
            return len(part)

        frame = frames.read(readinto, limit, pin=self._device.type == "cuda")
        # To the end, so that the connection can be used again; more than the frame is not an answer to this.
        if response.read(1):
            self._drop(url)
            raise frames.FrameError("bytes follow the frame")
        return response.status, frame

    def _plain(self, url: str, method: str, path: str) -> tuple[int, bytes]:
        response = self._response(url, method, path, None)
        return response.status, response.read(MAX_JSON)

    def _response(self, url: str, method: str, path: str, body: bytes | None) -> http.client.HTTPResponse:
        """Send a request over this thread's kept-alive connection to a server."""
        connections: dict[str, http.client.HTTPConnection] = self._local.__dict__.setdefault("connections", {})
        if url not in connections:
            connections[url] = _connection(url, self._remote.timeout_s)
        headers = {"Content-Type": "application/octet-stream"}
        if self._remote.token:
            headers["Authorization"] = f"Bearer {self._remote.token}"
        connection = connections[url]
        prefix = urlsplit(url).path.rstrip("/")
        fresh = connection.sock is None
        try:
            connection.request(method, prefix + path, body=body, headers=headers)
            return connection.getresponse()
        except (BrokenPipeError, ConnectionResetError, http.client.RemoteDisconnected):
            connection.close()
            if fresh:
                raise
            # The server closes what has been idle for long; once, over a new connection.
            connection.request(method, prefix + path, body=body, headers=headers)
            return connection.getresponse()

    def _drop(self, url: str) -> None:
        connection = self._local.__dict__.get("connections", {}).pop(url, None)
        if connection is not None:
            connection.close()

    def close(self) -> None:
        """Give up what is under way; the server goes on for others."""
        self._closed.set()
        self._threads.shutdown(wait=False, cancel_futures=True)


def _connection(url: str, timeout: float) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    kind: Callable[..., http.client.HTTPConnection] = {
        "http": http.client.HTTPConnection,
        "https": http.client.HTTPSConnection,
    }[parts.scheme]
    return kind(parts.hostname, parts.port, timeout=timeout)


def check_url(url: str) -> None:
    """Refuse what is no ``http://HOST:PORT``.

    Raises:
        ConfigError: See above.
    """
    with contextlib.suppress(ValueError):
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and (parts.port or parts.scheme == "https"):
            return
    raise ConfigError(f"recipe_args.remote_urls: {url!r} is no address; write e.g. http://127.0.0.1:8765")


def _check_card(
    url: str, card: dict[str, Any], first: dict[str, Any], remote: Remote, config: dict[str, object]
) -> None:
    if card.get("protocol") != PROTOCOL:
        raise ConfigError(
            f"recipe_args.remote_urls: {url} speaks protocol {card.get('protocol')} of nemo-eagle3-sglang "
            f"{card.get('package')}, this side {PROTOCOL}; install the same release on both"
        )
    if card["fingerprint"] != first["fingerprint"]:
        raise ConfigError(
            f"recipe_args.remote_urls: {url} has another target ({card['name']}, aux layers "
            f"{card['plan']['trained']}) than {remote.urls[0]} ({first['name']}, {first['plan']['trained']})"
        )
    if config and card["config"] and (keys := differences(config, card["config"])):
        _differs(url, card, keys, config)
    if remote.rows not in ROWS:
        raise ConfigError(f"recipe_args.remote_rows: {remote.rows!r}; write one of {', '.join(ROWS)}")


def _differs(url: str, card: dict[str, Any], keys: list[str], config: dict[str, object]) -> NoReturn:
    shown = ", ".join(f"{k}: {config.get(k)!r} here, {card['config'].get(k)!r} there" for k in keys[:4])
    raise ConfigError(
        f"recipe_args.target_model_name_or_path: its config.json is not that of the target at {url}, {card['name']} "
        f"({shown}); name the same model on both sides"
    )


def _json(body: bytes) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        found = json.load(io.BytesIO(body))
        if isinstance(found, dict):
            return found
    return {}


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__
