"""The target's process as it is really started, with a toy engine: SGLang would take 20 s a start."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import toy_engine_dist

from nemo_eagle3_sglang import backends
from nemo_eagle3_sglang.contracts import BackendRequest, Sequences
from nemo_eagle3_sglang.errors import ConfigError
from nemo_eagle3_sglang.sidecar.client import SidecarSource, TargetDied
from nemo_eagle3_sglang.supervision.source import RunnerSource

VOCAB = 500
IDS = torch.arange(0, VOCAB, 3)
MASK = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, IDS, True)
NOTHING = np.empty(0, dtype=np.int64)


def sequences(count: int, seed: int = 0) -> Sequences:
    generator = np.random.default_rng(seed)
    lengths = generator.integers(2, 30, count).tolist()
    total = sum(lengths)
    return Sequences(generator.integers(0, VOCAB, total), lengths, np.flatnonzero(generator.random(total) < 0.6))


def prepare(source):
    source.set_aux_layers([1, 3, 4])
    source.set_vocab_mapping(IDS, MASK)
    return source


def gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"


def wait_until(condition, seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    return toy_engine_dist.install(tmp_path_factory.mktemp("sidecar") / "site")


@pytest.fixture(scope="module")
def request_(site) -> Iterator[BackendRequest]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(site))
        # The child finds the engine where this process does.
        patch.setenv("PYTHONPATH", str(site))
        importlib.invalidate_caches()
        patch.delitem(sys.modules, "toy_engine", raising=False)
        yield BackendRequest("none", torch.device("cpu"), torch.float32, options={"scale": 0.5})


@pytest.fixture(scope="module")
def inline(request_):
    return prepare(RunnerSource(backends.load("toy")(request_)))


@pytest.fixture
def source(request_):
    opened = prepare(SidecarSource("toy", request_))
    yield opened
    opened.close()


def same(ours, theirs) -> bool:
    pairs = [(ours.aux, theirs.aux), *zip(vars(ours.targets).values(), vars(theirs.targets).values(), strict=True)]
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


def test_supervision_is_that_of_the_same_runner_in_this_process(source, inline):
    """Bit for bit: small, none, larger than the memory that was shared for the first, and small again."""
    for batch in (sequences(2), Sequences(NOTHING, [], NOTHING), sequences(300, 1), sequences(3, 2)):
        assert same(source.supervise(batch), inline.supervise(batch))
    assert torch.equal(source.input_embeddings(), inline.input_embeddings())
    assert source.plan_aux_layers([1, 3, 4]) is None, "the toy says nothing about serving"
    assert (source.info, source.dtype) == (inline.info, inline.dtype)


def test_errors_come_through_as_they_are_and_the_process_goes_on(source, inline):
    with pytest.raises(ValueError, match="mapping for 499 tokens") as caught:
        inline.set_vocab_mapping(IDS, MASK[:499])
    with pytest.raises(RuntimeError, match="ValueError: vocabulary mapping for 499 tokens"):
        source.set_vocab_mapping(IDS, MASK[:499])
    assert caught
    batch = sequences(2)
    assert same(source.supervise(batch), inline.supervise(batch))


def test_a_micro_batch_that_fails_is_answered_once(source, inline):
    """The one behind it still comes, and the next is not taken for it."""
    bad, good = sequences(2), sequences(4, 9)
    source.submit(replace(bad, lengths=[1]))
    source.submit(good)
    with pytest.raises(RuntimeError):
        source.collect()
    assert same(source.collect(), inline.supervise(good))
    assert same(source.supervise(bad), inline.supervise(bad))


def test_a_process_that_is_killed_is_replaced_and_asked_again(source, inline, caplog):
    first = source._process.pid
    os.kill(first, signal.SIGKILL)
    batch = sequences(4, 3)
    assert same(source.supervise(batch), inline.supervise(batch))
    assert source._process.pid != first
    assert "was ended by SIGKILL" in caplog.text


def test_two_micro_batches_can_be_under_way(source, inline):
    batches = [sequences(n, seed=n) for n in (3, 40, 7)]
    wanted = [inline.supervise(batch) for batch in batches]
    source.submit(batches[0])
    source.submit(batches[1])
    with pytest.raises(RuntimeError, match="collect one first"):
        source.submit(batches[2])
    first = source.collect()
    source.submit(batches[2])
    source._process.kill()
    assert same(first, wanted[0]), "in use while the process works, and dies, on the next"
    assert same(source.collect(), wanted[1])
    # Of the one that is left nobody asks any more.
    assert same(source.supervise(batches[0]), wanted[0])


def test_one_that_dies_of_the_same_micro_batch_twice_ends_the_run(source, monkeypatch):
    tell = source._tell

    def deadly(what, header, body=b""):
        if header["op"] == "supervise":
            # It must not have answered before it dies.
            os.kill(source._process.pid, signal.SIGSTOP)
        tell(what, header, body)
        if header["op"] == "supervise":
            source._process.kill()

    monkeypatch.setattr(source, "_tell", deadly)
    with pytest.raises(TargetDied, match="was ended by SIGKILL during a micro-batch of"):
        source.supervise(sequences(2))


def test_a_target_that_cannot_be_loaded(request_):
    with pytest.raises(RuntimeError, match=r"TypeError: .*unexpected keyword argument 'nonsense'"):
        SidecarSource("toy", replace(request_, options={"nonsense": 1}))
    with pytest.raises(ConfigError, match="'nosuch' is not a target backend"):
        SidecarSource("nosuch", request_)


@pytest.mark.parametrize(
    ("python", "words"),
    [
        ("/nowhere/python", r"sglang_python: '/nowhere/python' cannot be run: .*No such file"),
        ("/bin/false", "sglang_python: /bin/false ended with status 1 before it began"),
    ],
)
def test_a_python_that_is_none(request_, python, words):
    with pytest.raises(ConfigError, match=words):
        SidecarSource("toy", request_, python=python)


@pytest.mark.usefixtures("request_")
def test_nothing_is_left_when_the_trainer_is_killed():
    """With signal 9, which no handler sees."""
    code = """
        import time, torch
        from nemo_eagle3_sglang.contracts import BackendRequest
        from nemo_eagle3_sglang.sidecar.client import SidecarSource
        request = BackendRequest("none", torch.device("cpu"), torch.float32, options={"scale": 0.5})
        source = SidecarSource("toy", request)
        print("target", source._process.pid, flush=True)
        time.sleep(120)
    """
    trainer = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True)
    line = next(line for line in trainer.stdout if line.startswith("target"))
    target = int(line.split()[1])
    assert not gone(target)
    trainer.kill()
    trainer.wait()
    assert wait_until(lambda: gone(target)), "the target's process outlived its trainer"


def test_close_ends_the_process(request_):
    source = SidecarSource("toy", request_)
    source.close()
    assert source._process.returncode == 0
    source.close()
