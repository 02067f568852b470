"""The trainer's side against a server that misbehaves."""

from __future__ import annotations

import io
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest
import torch

from nemo_eagle3_sglang.contracts import AuxPlan, Sequences, TargetInfo
from nemo_eagle3_sglang.errors import ConfigError
from nemo_eagle3_sglang.remote import app, client, frames, rows
from nemo_eagle3_sglang.remote.answer import TargetCard

HIDDEN, VOCAB = 4, 10
CARD = TargetCard(
    "m",
    "none",
    TargetInfo(8, HIDDEN, VOCAB),
    torch.float32,
    6,
    AuxPlan([1, 3, 4], [2, 4, 5]),
    "serving",
    {"a": 1},
    "f" * 32,
)
SIGNED = {"fingerprint": CARD.fingerprint}
ASKED = Sequences(np.array([1, 2, 3]), [3], np.array([1, 2]))


def answer(tokens: int = 3, positions: int = 2, value: float = 1.0, **changes: Any) -> bytes:
    shapes = rows.shapes(tokens, positions, HIDDEN, torch.float32, "native")
    tensors = {name: torch.full(shape, value).to(dtype) for name, (dtype, shape) in shapes.items()}
    return b"".join(frames.encode(tensors, {**SIGNED, **changes}))


class Fake:
    """A server whose answers to ``/v1/states`` are a list: (status, body), bytes to send raw, or a function."""

    def __init__(self) -> None:
        self.answers: list[Any] = []
        self.asked: list[frames.Frame] = []
        self.connections = 0
        self.card: Any = app.describe(CARD)
        self.headers: list[str | None] = []
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                fake.connections += 1
                super().setup()

            def log_message(self, *_: Any) -> None:
                pass

            def do_GET(self) -> None:
                fake.headers.append(self.headers.get("Authorization"))
                self.reply(200, json.dumps(fake.card).encode())

            def do_POST(self) -> None:
                text = self.rfile.read(int(self.headers["Content-Length"]))
                fake.asked.append(frames.read(io.BytesIO(text).readinto, len(text)))
                following = fake.answers.pop(0)
                if callable(following):
                    following(self)
                else:
                    self.reply(*following)

            def reply(self, status: int, text: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    monkeypatch.setattr(client, "FIRST_WAIT", 0.01)
    server = Fake()
    yield server
    server.close()


def connect(*urls: str, config: dict[str, Any] | None = None, **changes: Any) -> client.RemoteProvider:
    remote = client.Remote(urls, **{"timeout_s": 5.0, "retries": 2, "ahead": 3, **changes})
    return client.RemoteProvider(remote, {"a": 1} if config is None else config, torch.device("cpu"))


def states(provider: client.RemoteProvider) -> torch.Tensor:
    provider.submit(ASKED)
    return provider.collect().aux


def half(handler: Any) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(answer())))
    handler.end_headers()
    handler.wfile.write(answer()[:-30])
    handler.close_connection = True


def slow(handler: Any) -> None:
    """Send a byte now and then: no single wait is long."""
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(answer())))
    handler.end_headers()
    for byte in answer():
        try:
            handler.wfile.write(bytes([byte]))
            handler.wfile.flush()
        except OSError:
            return
        time.sleep(0.05)


def hang_up(handler: Any) -> None:
    handler.connection.shutdown(socket.SHUT_RDWR)
    handler.close_connection = True


@pytest.mark.parametrize(
    "fault",
    [(503, b'{"error": "busy"}'), (502, b"<html>"), half, hang_up],
    ids=["busy", "a proxy's page", "cut in the middle", "hung up"],
)
def test_what_passes_is_tried_again(fake: Fake, fault: Any):
    fake.answers = [fault, (200, answer(value=7.0))]
    assert bool((states(connect(fake.url)) == 7.0).all())
    assert len(fake.asked) >= 2


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        ((400, b'{"error": "wrong"}'), "refuses: .*HTTP 400, wrong"),
        ((409, b'{"error": "another target"}'), "refuses: .*another target"),
        ((500, b"<html>"), "HTTP 500, no reason given"),
        ((302, b""), "HTTP 302"),
        ((200, answer(tokens=2)), "where .* was asked for"),
        ((200, answer(positions=1)), "where .* was asked for"),
        ((200, answer(value=99.0)), "not in its vocabulary"),
        ((200, answer(value=-1.0)), "not in its vocabulary"),
        ((200, answer(fingerprint="e" * 32)), "another target than when this run began"),
    ],
)
def test_what_does_not_pass_ends_it_at_once(fake: Fake, reply: Any, reason: str):
    fake.answers = [reply, (200, answer())]
    with pytest.raises(client.ServerError, match=reason):
        states(connect(fake.url))
    assert len(fake.asked) == 1


@pytest.mark.parametrize(
    "reply",
    [(200, answer() + b"x"), (200, b"rubbish"), (200, answer(tokens=4000)), (503, b"{}")],
    ids=["more than a frame", "no frame", "more than was asked for", "busy"],
)
def test_what_stays_wrong_ends_it_after_the_retries(fake: Fake, reply: Any):
    fake.answers = [reply] * 3
    with pytest.raises(client.ServerError, match="in 3 attempts"):
        states(connect(fake.url))
    assert len(fake.asked) == 3


def test_the_timeout_is_of_the_whole_answer(fake: Fake):
    fake.answers = [slow]
    provider = connect(fake.url, timeout_s=0.5, retries=0)
    began = time.monotonic()
    with pytest.raises(client.ServerError, match=r"no whole answer within"):
        states(provider)
    assert time.monotonic() - began < 5


def test_one_connection_serves_many_requests(fake: Fake):
    fake.answers = [(200, answer())] * 20
    provider = connect(fake.url, ahead=1)
    for _ in range(20):
        states(provider)
    # The main thread's, which read the card, and the asking thread's.
    assert fake.connections == 2


def test_an_idle_connection_that_the_server_closed_is_opened_again(fake: Fake):
    def once(handler: Any) -> None:
        handler.reply(200, answer())
        handler.close_connection = True

    fake.answers = [once, (200, answer())]
    provider = connect(fake.url, ahead=1, retries=0)
    states(provider)
    time.sleep(0.1)
    states(provider)
    assert len(fake.asked) == 2


def test_answers_come_in_the_order_of_the_questions(fake: Fake):
    def late(handler: Any) -> None:
        time.sleep(0.3)
        handler.reply(200, answer(value=1.0))

    fake.answers = [late, (200, answer(value=2.0)), (200, answer(value=3.0))]
    provider = connect(fake.url)
    for wait in (0.1, 0.05, 0.0):
        provider.submit(ASKED)
        time.sleep(wait)
    assert [float(provider.collect().aux[0, 0]) for _ in range(3)] == [1.0, 2.0, 3.0]


def test_the_next_server_is_asked_when_one_is_gone(fake: Fake):
    other = Fake()
    provider = connect(fake.url, other.url)
    other.close()
    fake.answers = [(200, answer())] * 4
    for _ in range(4):
        states(provider)
    assert len(fake.asked) == 4


def test_closing_does_not_wait_for_a_retry(fake: Fake, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(client, "FIRST_WAIT", 30.0)
    fake.answers = [(503, b"{}")] * 9
    provider = connect(fake.url, retries=8)
    provider.submit(ASKED)
    time.sleep(0.2)
    began = time.monotonic()
    provider.close()
    with pytest.raises(client.ServerError):
        provider.collect()
    assert time.monotonic() - began < 5


def test_the_token_goes_with_every_request(fake: Fake):
    connect(fake.url, token="0123456789abcdef")
    assert fake.headers == ["Bearer 0123456789abcdef"]


@pytest.mark.parametrize(
    ("card", "config", "reason"),
    [
        ({"hello": 1}, None, "is no target server of this package"),
        ([], None, "is no target server of this package"),
        ({**app.describe(CARD), "protocol": 2}, None, "speaks protocol 2"),
        (app.describe(CARD), {"a": 2}, "a: 2 here, 1 there"),
    ],
)
def test_who_is_not_meant_is_refused_at_the_start(fake: Fake, card: Any, config: Any, reason: str):
    fake.card = card
    with pytest.raises(ConfigError, match=reason):
        connect(fake.url, config=config)


def test_servers_of_different_targets_are_refused(fake: Fake):
    other = Fake()
    other.card = {**app.describe(CARD), "fingerprint": "e" * 32}
    with pytest.raises(ConfigError, match="has another target"):
        connect(fake.url, other.url)
    other.close()


def test_nobody_there():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(ConfigError, match="does not answer as a target server"):
            connect(f"http://127.0.0.1:{taken.getsockname()[1]}")


@pytest.mark.parametrize("url", ["", "127.0.0.1:8765", "ftp://h:1", "http://", "http://h", "http://h:x"])
def test_what_is_no_address(url: str):
    with pytest.raises(ConfigError, match="is no address"):
        client.check_url(url)


def test_other_layers_are_refused(fake: Fake):
    provider = connect(fake.url)
    assert provider.plan_aux_layers([4, 1, 3]) == CARD.plan
    refuse: Callable[[list[int]], Any] = provider.plan_aux_layers
    with pytest.raises(ConfigError, match=r"\[0, 1, 2\], but the target server captures"):
        refuse([0, 1, 2])
