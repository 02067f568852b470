"""The front of a target server over an engine that is not there."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
import torch
from aiohttp.test_utils import TestClient, TestServer

from nemo_eagle3_sglang.contracts import AuxPlan, Sequences, TargetInfo
from nemo_eagle3_sglang.errors import CaptureError
from nemo_eagle3_sglang.head_rows import HeadRows
from nemo_eagle3_sglang.remote import app, frames, rows
from nemo_eagle3_sglang.remote.answer import Answer, Busy, Refused, TargetCard

HIDDEN, VOCAB, LIMIT = 4, 10, 6
CARD = TargetCard(
    "m",
    "none",
    TargetInfo(8, HIDDEN, VOCAB),
    torch.float32,
    LIMIT,
    AuxPlan([1, 3, 4], [2, 4, 5]),
    "serving",
    {},
    "f" * 32,
)
META = {"fingerprint": CARD.fingerprint, "aux": "[1, 3, 4]", "rows": "native"}
SECRET = "0123456789abcdef"


class Engine:
    card = CARD

    def __init__(self, error: Exception | None = None, short: bool = False) -> None:
        self.error, self.short, self.released, self.living = error, short, 0, True

    async def states(self, sequences: Sequences, kind: str) -> Answer:
        if self.error is not None:
            raise self.error
        shapes = rows.shapes(len(sequences.tokens), len(sequences.supervised), HIDDEN, torch.float32, kind)
        parts = {name: [memoryview(bytes(int(np.prod(s)) * d.itemsize))] for name, (d, s) in shapes.items()}
        if self.short:
            parts["aux"] = [parts["aux"][0][:-4]]
        return Answer(parts, self.release)

    def release(self) -> None:
        self.released += 1

    def head_rows(self, token_ids: torch.Tensor) -> HeadRows:
        return HeadRows(torch.arange(VOCAB * HIDDEN).float().view(VOCAB, HIDDEN)[token_ids], None, None, 30.0)

    def input_embeddings(self) -> torch.Tensor:
        return torch.zeros((VOCAB, HIDDEN))

    def alive(self) -> bool:
        return self.living

    def close(self) -> None:
        self.living = False


def body(metadata: dict[str, str] = META, **changes: Any) -> bytes:
    tensors = {"tokens": [1, 2, 3, 4, 5], "lengths": [2, 3], "supervised": [1, 3, 4], **changes}
    kept = {
        k: torch.as_tensor(v, dtype=None if torch.is_tensor(v) else torch.int32)
        for k, v in tensors.items()
        if v is not None
    }
    return b"".join(frames.encode(kept, metadata))


def asked(use: Callable[[TestClient], Awaitable[Any]], engine: Engine | None = None, secret: str | None = None) -> Any:
    async def run() -> Any:
        server = TestServer(app.Front(engine or Engine(), secret).app())
        # Not the minute that it would give an idle connection.
        await server.start_server(shutdown_timeout=0.2)
        async with TestClient(server) as client:
            return await use(client)

    return asyncio.run(run())


async def post(client: TestClient, data: bytes, path: str = "/v1/states", **kwargs: Any) -> tuple[int, bytes]:
    response = await client.post(path, data=data, **kwargs)
    return response.status, await response.read()


def refused(data: bytes, engine: Engine | None = None) -> tuple[int, dict[str, str]]:
    status, text = asked(lambda client: post(client, data), engine)
    return status, json.loads(text)


def test_rows_come_as_they_were_asked_for_and_are_given_back():
    engine = Engine()
    status, text = asked(lambda client: post(client, body()), engine)
    assert status == 200
    found = frames.read(io.BytesIO(text).readinto, len(text))
    assert {k: tuple(v.shape) for k, v in found.tensors.items()} == {"aux": (5, 12), "last": (3, 4), "choices": (3,)}
    assert found.metadata["fingerprint"] == CARD.fingerprint
    assert engine.released == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": None},
        {"tokens": [1, 2, 3, 4, VOCAB]},
        {"tokens": [1, 2, 3, 4, -1]},
        {"tokens": torch.ones((5, 1), dtype=torch.int32)},
        {"tokens": torch.ones(5)},
        {"lengths": [2, 2]},
        {"lengths": [5, 0]},
        {"tokens": [1] * 8, "lengths": [LIMIT + 1, 1]},
        {"supervised": [3, 1]},
        {"supervised": [1, 1]},
        {"supervised": [5]},
        {"supervised": [0, 1, 2, 3, 4, 4]},
    ],
)
def test_what_cannot_be_asked_is_refused(changes: dict[str, Any]):
    status, problem = refused(body(**changes))
    assert (status, problem["kind"]) == (400, "request")


@pytest.mark.parametrize(
    ("metadata", "status", "kind"),
    [
        ({**META, "fingerprint": "e" * 32}, 409, "changed"),
        ({k: v for k, v in META.items() if k != "fingerprint"}, 409, "changed"),
        ({**META, "aux": "[2, 4, 5]"}, 409, "aux"),
        ({**META, "rows": "int4"}, 400, "request"),
    ],
)
def test_who_means_another_target_is_told(metadata: dict[str, str], status: int, kind: str):
    found, problem = refused(body(metadata))
    assert (found, problem["kind"]) == (status, kind)


@pytest.mark.parametrize("data", [b"", b"rubbish", body()[:-3], bytes(8)])
def test_what_is_no_frame_is_refused(data: bytes):
    status, problem = refused(data)
    assert (status, problem["kind"]) == (400, "frame")


def test_what_is_too_large_is_not_read():
    status, _ = asked(lambda client: post(client, bytes(app.MAX_BODY + 1)))
    assert status == 413


def test_a_body_that_grows_when_it_is_unpacked_is_refused():
    bomb = gzip.compress(bytes(2**28))
    status, _ = asked(lambda client: post(client, bomb, headers={"Content-Encoding": "gzip"}))
    assert status in (400, 413, 415)


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (Busy("later"), 503, "busy"),
        (Refused("no"), 422, "refused"),
        (CaptureError("odd"), 500, "capture"),
        (KeyError("/secret/path"), 500, "internal"),
    ],
)
def test_an_engines_error_is_told_without_its_insides(error: Exception, status: int, kind: str):
    found, problem = refused(body(), Engine(error))
    assert (found, problem["kind"]) == (status, kind)
    assert "secret" not in json.dumps(problem)
    assert "Traceback" not in json.dumps(problem)


def test_a_short_answer_is_an_error_and_never_filled_up():
    engine = Engine(short=True)
    status, problem = refused(body(), engine)
    assert (status, problem["kind"]) == (500, "short")
    assert engine.released == 1


@pytest.mark.parametrize("path", ["/v1/target", "/metrics", "/v1/embeddings", "/v1/none"])
def test_everything_but_health_needs_the_token(path: str):
    async def use(client: TestClient) -> list[int]:
        wrong = {"Authorization": "Bearer " + SECRET[::-1]}
        right = {"Authorization": "Bearer " + SECRET}
        return [
            (await client.get(p, headers=h)).status
            for p, h in ((path, {}), (path, wrong), (path, right), ("/health", {}))
        ]

    statuses = asked(use, secret=SECRET)
    assert statuses == [401, 401, 404 if path == "/v1/none" else 200, 200]


def test_health_follows_the_engine():
    engine = Engine()
    engine.living = False
    assert asked(lambda client: client.get("/health"), engine).status == 503


def test_head_and_embedding():
    async def use(client: TestClient) -> list[frames.Frame]:
        ids = b"".join(frames.encode({"ids": torch.tensor([7, 0])}, {}))
        _, head = await post(client, ids, "/v1/head")
        embedding = await (await client.get("/v1/embeddings")).read()
        return [frames.read(io.BytesIO(text).readinto, len(text)) for text in (head, embedding)]

    head, embedding = asked(use)
    assert head.tensors["weight"].tolist() == [[28, 29, 30, 31], [0, 1, 2, 3]]
    assert head.metadata == {"softcap": "30.0", "fingerprint": CARD.fingerprint}
    assert embedding.tensors["weight"].shape == (VOCAB, HIDDEN)


def test_metrics_count_and_their_labels_are_ours():
    async def use(client: TestClient) -> str:
        await post(client, body())
        for i in range(5):
            await client.get(f"/wp-admin/{i}")
        return await (await client.get("/metrics")).text()

    text = asked(use)
    assert 'eagle3_target_requests_total{path="/v1/states",status="200"} 1.0' in text
    assert 'eagle3_target_requests_total{path="other",status="404"} 5.0' in text
    assert "eagle3_target_tokens_total 5.0" in text
    assert "wp-admin" not in text
