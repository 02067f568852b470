"""A real SGLang server on a CPU, trainers in other processes: the same states and losses, and what faults lead to."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import forked
import numpy as np
import pytest
import serving
import tiny_models
import torch

from nemo_eagle3_sglang.contracts import Sequences, TargetStates
from nemo_eagle3_sglang.errors import ConfigError
from nemo_eagle3_sglang.hf_runner import HFRunner
from nemo_eagle3_sglang.remote.card import read_config
from nemo_eagle3_sglang.remote.client import Remote, RemoteProvider, ServerError
from nemo_eagle3_sglang.supervision.source import RunnerSource

# A server is four processes that import SGLang, and whatever else the cores have to do comes on top.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
pytest.importorskip("nemo_automodel", reason="the recipe is AutoModel's")
pytest.importorskip("sglang", reason="the target runs in SGLang")

CPU = torch.device("cpu")
VOCAB, ROWS, MICRO_BATCH, EPOCHS = 500, 24, 4, 2
STEPS = ROWS // MICRO_BATCH * EPOCHS
CLOSE = {"atol": 2e-4, "rtol": 1e-4}


@dataclass
class World:
    """A target on disk, its server, and a place for runs."""

    folder: Path
    target: Path
    server: serving.Server
    nursery: forked.Nursery


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("remote")
    target = tiny_models.save_target(folder / "target", "llama")
    tiny_models.write_chat(folder / "train.jsonl", ROWS)
    tiny_models.write_chat(folder / "val.jsonl", 4, seed=5)
    nursery = forked.Nursery(folder / "nursery.log")
    try:
        with serving.serving(folder / "sglang.log", target, "--port", "0", "--dtype", "float32") as server:
            yield World(folder, target, server, nursery)
    finally:
        nursery.close()


@pytest.fixture(scope="module")
def reference(world: World) -> RunnerSource:
    source = RunnerSource(HFRunner(tiny_models.make_model("llama")))
    source.set_aux_layers([1, 3, 4])
    return source


def connect(world: World, *urls: str, **changes: Any) -> RemoteProvider:
    remote = Remote(urls or (world.server.url,), **{"timeout_s": 60.0, "retries": 1, "ahead": 2, **changes})
    return RemoteProvider(remote, read_config(str(world.target)), CPU)


def sequences(*lengths: int, supervised: list[int] | None = None, seed: int = 0) -> Sequences:
    generator = np.random.default_rng(seed)
    tokens = generator.integers(0, VOCAB, sum(lengths))
    chosen = np.flatnonzero(generator.random(len(tokens)) < 0.6) if supervised is None else np.array(supervised)
    return Sequences(tokens, list(lengths), chosen.astype(np.int64))


def states(provider: RemoteProvider, asked: Sequences) -> TargetStates:
    provider.submit(asked)
    return provider.collect()


def assert_equal(found: TargetStates, wanted: TargetStates) -> None:
    torch.testing.assert_close(found.aux, wanted.aux, **CLOSE)
    torch.testing.assert_close(found.last, wanted.last, **CLOSE)
    assert torch.equal(found.choices, wanted.choices)


@pytest.mark.parametrize(
    "asked",
    [
        sequences(5, 1, 7, 30),
        sequences(1, supervised=[0]),
        sequences(9, supervised=[]),
        sequences(4, 4, supervised=[3, 4, 7]),
        sequences(500, 2),
        # More than SGLang runs at once: it takes several forwards.
        sequences(*[3 + i % 5 for i in range(150)]),
    ],
    ids=["chat", "one token", "nothing learnt", "edges", "long", "many"],
)
def test_a_real_server_gives_the_states_of_transformers(world: World, reference: RunnerSource, asked: Sequences):
    assert_equal(states(connect(world), asked), reference.states(asked))


def test_a_target_sharded_over_two_ranks_gives_them_too(world: World, reference: RunnerSource):
    log = world.folder / "tp.log"
    # Beside the other server, which is idle; a vocabulary whose last shard is shorter than its padding.
    with serving.serving(log, world.target, "--port", "0", "--dtype", "float32", "--tp-size", "2") as server:
        provider = connect(world, server.url)
        for asked in (sequences(5, 1, 7, 30), sequences(9, supervised=[]), sequences(*[3 + i % 5 for i in range(70)])):
            assert_equal(states(provider, asked), reference.states(asked))
        ids = torch.tensor([499, 3, 250, 0, 256])
        model = tiny_models.make_model("llama")
        assert torch.equal(provider.head_rows(ids).weight, model.lm_head.weight[ids])
        assert torch.equal(provider.input_embeddings(), model.model.embed_tokens.weight)


def test_prefixes_that_sglang_has_seen_are_run_again(world: World, reference: RunnerSource):
    asked = sequences(40, 40, 40)
    same = Sequences(np.tile(asked.tokens[:40], 3), asked.lengths, asked.supervised)
    provider = connect(world)
    for _ in range(3):
        assert_equal(states(provider, same), reference.states(same))


def test_head_and_embedding_are_the_targets(world: World):
    model, provider = tiny_models.make_model("llama"), connect(world)
    ids = torch.tensor([499, 3, 77, 0])
    assert torch.equal(provider.head_rows(ids).weight, model.lm_head.weight[ids])
    assert torch.equal(provider.input_embeddings(), model.model.embed_tokens.weight)


def test_fp8_rows_are_within_the_format(world: World, reference: RunnerSource):
    asked = sequences(20, 30)
    found, wanted = states(connect(world, rows="fp8"), asked), reference.states(asked)
    for a, b in ((found.aux.view(-1, 3, 64), wanted.aux.view(-1, 3, 64)), (found.last, wanted.last)):
        # Half a unit in the last of three places, or half the smallest subnormal, of a row scaled to 448.
        bound = torch.maximum(b.abs() * 2**-4, b.abs().amax(dim=-1, keepdim=True) / 448 * 2**-10) + 1e-3
        assert bool(((a - b).abs() <= bound).all())
    assert torch.equal(found.choices, wanted.choices)


def train(world: World, out: str, pause_at: int | None = None, **changes: Any) -> forked.Fork:
    recipe_args = {
        "target_model_name_or_path": str(world.target),
        "target_model_backend": "remote",
        "train_data_path": str(world.folder / "train.jsonl"),
        "val_data_path": str(world.folder / "val.jsonl"),
        "output_dir": str(world.folder / out),
        "device": "cpu",
        "seq_length": 48,
        "micro_batch_size": MICRO_BATCH,
        "num_epochs": EPOCHS,
        "ttt_steps": 2,
        "draft_vocab_size": 100,
        "log_every_steps": 1,
        **changes,
    }
    recipe = "nemo_eagle3_sglang.training.recipe.TrainEagle3SGLangRecipe"
    config = {"recipe": recipe, "dist_env": {"backend": "gloo"}, "recipe_args": recipe_args}
    config |= {"optimizer": {"lr": 1e-2}, "checkpoint": {"enabled": False}}
    return world.nursery.fork(world.folder / f"{out}.log", kind="train", config=config, pause_at=pause_at)


def losses(run: forked.Fork) -> list[float]:
    """Wait for the end and return the loss of each step."""
    assert run.wait() == 0, run.text[-4000:]
    lines = [json.loads(line) for line in (run.log.with_suffix("") / "metrics.jsonl").read_text().splitlines()]
    return [line["train/loss"] for line in lines if "train/loss" in line]


def serve(world: World, name: str, *flags: str, target: Path | None = None) -> tuple[forked.Fork, str]:
    """Start a server over transformers and return it with its address."""
    arguments = ["serve-target", "--target", str(target or world.target), "--engine", "hf", *flags]
    server = world.nursery.fork(world.folder / f"{name}.log", kind="cli", arguments=arguments)
    server.until("Ready.")
    return server, re.findall(r"remote_urls: \[(\S+)\]", server.text)[0]


@pytest.fixture(scope="module")
def inline(world: World) -> list[float]:
    found = losses(train(world, "inline", target_model_backend="sglang"))
    assert len(found) == STEPS
    return found


def test_losses_are_those_of_the_target_in_the_training_process(world: World, inline: list[float]):
    url = world.server.url
    plain = train(world, "plain", remote_urls=[url])
    # Two trainers on one server, the second several batches ahead.
    ahead = train(world, "ahead", remote_urls=[url], target_prefetch_depth=3)
    np.testing.assert_allclose(losses(plain), inline, rtol=1e-5)
    np.testing.assert_allclose(losses(ahead), inline, rtol=1e-5)


def test_a_trainer_that_is_killed_leaves_the_server_to_the_others(world: World, inline: list[float]):
    url = world.server.url
    killed = train(world, "killed", pause_at=3, remote_urls=[url], target_prefetch_depth=3)
    other = train(world, "other", pause_at=3, remote_urls=[url], target_prefetch_depth=1)
    killed.until("PAUSED")
    other.until("PAUSED")
    killed.kill()
    other.go_on()
    np.testing.assert_allclose(losses(other), inline, rtol=1e-5)


def test_a_server_that_is_killed_and_started_again_costs_no_step(world: World, inline: list[float]):
    server, url = serve(world, "first", "--port", "0")
    run = train(world, "restarted", pause_at=4, remote_urls=[url], remote_max_retries=8, target_prefetch_depth=2)
    run.until("PAUSED")
    server.kill()
    run.go_on()
    run.until("trying again")
    serve(world, "second", "--port", url.rpartition(":")[2])
    # Two engines have worked on it, so that the tolerance is that between them.
    np.testing.assert_allclose(losses(run), inline, rtol=1e-4)


def test_a_server_that_stays_away_ends_the_run(world: World):
    server, url = serve(world, "leaving", "--port", "0")
    run = train(world, "gone", pause_at=4, remote_urls=[url], remote_max_retries=1)
    run.until("PAUSED")
    server.kill()
    run.go_on()
    assert run.wait() != 0
    assert "no target server answered in 2 attempts" in run.text
    steps = [json.loads(line).get("step") for line in (world.folder / "gone" / "metrics.jsonl").open()]
    assert max(step for step in steps if step is not None) <= 4


def test_another_target_in_the_servers_place_is_refused(world: World, tmp_path: Path):
    other = tiny_models.save_target(tmp_path / "other", "llama", rms_norm_eps=1e-5)
    _, url = serve(world, "foreign", "--port", "0", target=other)
    with pytest.raises(ConfigError, match="rms_norm_eps: 1e-06 here, 1e-05 there"):
        connect(world, url)
    with pytest.raises(ConfigError, match="has another target"):
        RemoteProvider(Remote((world.server.url, url)), {}, CPU)
    provider = RemoteProvider(Remote((url,), retries=0), {}, CPU)
    provider.card["fingerprint"] = "0" * 32
    with pytest.raises(ServerError, match="is not the one that the request is meant for"):
        states(provider, sequences(5))


def test_another_choice_of_layers_is_refused(world: World):
    with pytest.raises(ConfigError, match=r"aux_layer_ids: \[0, 2, 5\], but the target server captures \[1, 3, 4\]"):
        connect(world).plan_aux_layers([0, 2, 5])


def test_what_is_too_long_is_refused_and_nothing_else_suffers(world: World, reference: RunnerSource):
    provider = connect(world, retries=0)
    with pytest.raises(ServerError, match="lengths must lie between 1 and 51"):
        states(provider, sequences(600))
    asked = sequences(12, 3)
    assert_equal(states(provider, asked), reference.states(asked))


def test_the_token_is_needed_where_the_server_has_one(world: World, tmp_path: Path):
    secret = tmp_path / "token"
    secret.write_text("0123456789abcdef0123\n")
    server, url = serve(world, "token", "--port", "0", "--token-file", str(secret))
    with pytest.raises(ConfigError, match="does not take this token"):
        connect(world, url)
    asked = sequences(6)
    assert len(states(connect(world, url, token="0123456789abcdef0123"), asked).aux) == 6
    server.kill(signal.SIGTERM)
    assert server.wait() == 0


def test_a_server_for_others_without_a_token_does_not_start(world: World):
    arguments = ["serve-target", "--target", str(world.target), "--host", "0.0.0.0"]
    server = world.nursery.fork(world.folder / "open.log", kind="cli", arguments=arguments)
    assert server.wait() == 2
    assert "needs a token" in server.text


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--pp-size", "2"), "the aux layers would lie on other workers"),
        (("--enable-dp-attention", "--dp-size", "2", "--tp-size", "2"), "the rows of a forward are spread"),
        (("--speculative-algorithm", "EAGLE3"), "the draft is what is being trained"),
    ],
)
def test_layouts_that_lose_rows_are_refused_by_name(world: World, flags: tuple[str, ...], reason: str):
    from nemo_eagle3_sglang.remote.sglang_engine import parse_flags

    with pytest.raises(ConfigError, match=f"{flags[0]}.*{reason}"):
        parse_flags(str(world.target), flags)


# The last one: it ends the module's server.
def test_an_engine_that_dies_ends_the_server_with_an_error(world: World):
    url, server = world.server.url, world.server
    provider = connect(world, url, retries=0)
    for pid in server.workers():
        os.kill(pid, signal.SIGKILL)
    assert server.process.wait(60) != 0
    assert server.workers() == []
    with pytest.raises(ServerError, match="no target server answered"):
        states(provider, sequences(4))
