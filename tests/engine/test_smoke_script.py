"""scripts/smoke_sglang_target.py: one real run, and every way in which it must not say PASS."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import tiny_models
import torch

from nemo_eagle3_sglang.contracts import BackendRequest
from nemo_eagle3_sglang.errors import CaptureError
from nemo_eagle3_sglang.hf_runner import HFRunner

SCRIPT = Path(__file__).parents[2] / "scripts" / "smoke_sglang_target.py"


@pytest.fixture(scope="module")
def smoke() -> ModuleType:
    spec = importlib.util.spec_from_file_location("smoke_sglang_target", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save_target(tmp_path_factory.mktemp("smoke") / "target")


class NotSGLang(HFRunner):
    """A transformers runner in SGLang's place, which a test can spoil."""

    capacity = SimpleNamespace(tokens=100)
    free = 100

    def free_slots(self) -> int:
        return self.free


@pytest.fixture
def fake_engine(smoke: ModuleType, monkeypatch: pytest.MonkeyPatch) -> NotSGLang:
    runner = NotSGLang(tiny_models.make_model("llama"))
    monkeypatch.setattr(smoke.engine, "build_runner", lambda _request: runner)
    monkeypatch.setattr(smoke.engine, "check_request", lambda _request: None)
    return runner


def failing(report: dict) -> set[str]:
    return {check["name"] for check in report["checks"] if check["passed"] is False}


def test_real_text_through_sglang_passes(target, tmp_path):
    chats, out = tiny_models.write_chat(tmp_path / "chats.jsonl", 5), tmp_path / "out.json"
    arguments = ["--target", target, "--text", chats, "--batch", "3", "--seq", "24", "--aux-layer-ids", "5", "0", "3"]
    done = subprocess.run(
        [sys.executable, SCRIPT, *arguments, "--compare-hf", "--init-dist", "--device", "cpu", "--json", out],
        capture_output=True,
        text=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.rstrip().endswith("PASS")
    report = json.loads(out.read_text())
    assert report["passed"] is True
    assert report["versions"]["sglang"].startswith("0.5.")
    assert len(report["row_lengths"]) == 3
    assert max(report["row_lengths"]) == 24
    assert len(set(report["row_lengths"])) > 1, "the case must pad"
    checks = {(check["stage"], check["name"]): check for check in report["checks"]}
    assert checks["sglang", "default process group as before"]["passed"] is True
    assert checks["sglang", "KV slots free afterwards"]["passed"] is True
    for name in ("aux layer 5", "aux layer 0", "aux layer 3", "final hidden", "target_probs"):
        check = checks["compare_hf", f"{name}: max abs diff"]
        assert check["passed"] is True
        assert check["limit"] == "<= 0.001 + 8 ulp"
        assert 0 <= check["value"] < 1e-3
    agreement = checks["compare_hf", "argmax match"]
    assert (agreement["value"], agreement["limit"], agreement["passed"]) == (1.0, ">= 0.999", True)
    assert {path.name for path in tmp_path.iterdir()} == {"chats.jsonl", "out.json"}


def states(smoke: ModuleType, count: int = 40, draft: int = 30):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn((count, 50), generator=generator) * 3
    hidden = torch.randn((count, 4, 16), generator=generator)
    argmax, top5 = smoke.rank(logits)
    return smoke.States(hidden, argmax, top5, torch.softmax(logits[1:, :draft], -1), argmax[1:] < draft)


def spoil_layer(s):
    hidden = s.hidden.clone()
    hidden[:, 1] = hidden[:, 1].roll(1, dims=0)
    return s._replace(hidden=hidden)


SPOILT = {
    "a layer off by one token": (spoil_layer, {"aux layer 3: cosine mean"}),
    "NaN": (
        lambda s: s._replace(hidden=s.hidden * torch.nan),
        {f"{n}: cosine mean" for n in ("aux layer 1", "aux layer 3", "aux layer 4", "final hidden")},
    ),
    "logits on another scale": (
        lambda s: s._replace(probs=torch.softmax(s.probs.log() * 0.5, -1)),
        {"KL(HF || SGLang) mean, nats"},
    ),
    "another token": (
        lambda s: s._replace(argmax=(s.argmax + 1) % 50),
        {"argmax match", "SGLang top-1 in HF top-5"},
    ),
    "another mask": (lambda s: s._replace(position_mask=~s.position_mask), {"position_mask agreement"}),
}


@pytest.mark.parametrize("name", SPOILT)
def test_verdict_fails_on(smoke, name):
    spoil, expected = SPOILT[name]
    good = states(smoke)
    failed = {c.name for c in smoke.compare(spoil(good), good, [1, 3, 4], smoke.ROUNDED, True) if c.passed is False}
    assert failed == expected


def test_verdict_passes_and_where_it_only_reports(smoke):
    good = states(smoke)
    assert all(c.passed is not False for c in smoke.compare(good, good, [1, 3, 4], smoke.EXACT, True))
    # 2e-3 is rounding in bfloat16 and a mistake in float32.
    near = good._replace(hidden=good.hidden + 2e-3)
    failed = {c.name for c in smoke.compare(near, good, [1, 3, 4], smoke.EXACT, True) if c.passed is False}
    assert failed == {f"{n}: max abs diff" for n in ("aux layer 1", "aux layer 3", "aux layer 4", "final hidden")}
    assert all(c.passed is not False for c in smoke.compare(near, good, [1, 3, 4], smoke.ROUNDED, True))
    # Where activations are huge, one ulp exceeds the bound; many do not pass.
    huge = good._replace(hidden=good.hidden * 25_000)
    for off, passed in ((1 + 2**-22, True), (1 + 2**-18, False)):
        other = huge._replace(hidden=huge.hidden * off)
        checks = smoke.compare(other, huge, [1, 3, 4], smoke.EXACT, True)
        assert all(c.passed is not False for c in checks) is passed
    # On random tokens agreement of the argmax is informational.
    other = SPOILT["another token"][0](good)
    checks = {c.name: c for c in smoke.compare(other, good, [1, 3, 4], smoke.EXACT, False)}
    assert checks["argmax match"].passed is None
    assert checks["argmax match"].limit == "informational"
    assert checks["argmax match"].value == 0


def test_a_target_that_computes_something_else_exits_1(smoke, fake_engine, target, tmp_path, capsys):
    out, arguments = tmp_path / "out.json", ["--target", str(target), "--seq", "16", "--device", "cpu", "--compare-hf"]
    assert smoke.main(arguments) == 0
    assert "informational" in capsys.readouterr().out

    fake_engine.model = tiny_models.make_model("llama")
    fake_engine.model.model.layers[2].mlp.down_proj.weight.data.mul_(1.5)
    fake_engine.free = 99
    assert smoke.main([*arguments, "--json", str(out)]) == 1
    report = json.loads(out.read_text())
    assert report["passed"] is False
    assert {"KV slots free afterwards", "aux layer 3: max abs diff", "final hidden: max abs diff"} <= failing(report)
    assert "aux layer 1: max abs diff" not in failing(report)
    assert "FAIL: do not train" in capsys.readouterr().out


def test_a_capture_that_is_not_understood_exits_1(smoke, fake_engine, target, monkeypatch, tmp_path):
    def build(_request: BackendRequest):
        raise CaptureError("no final norm fits")

    monkeypatch.setattr(smoke.engine, "build_runner", build)
    out = tmp_path / "out.json"
    assert smoke.main(["--target", str(target), "--device", "cpu", "--compare-hf", "--json", str(out)]) == 1
    assert json.loads(out.read_text())["checks"][0]["value"] == "no final norm fits"


BAD = {
    "no such target": (["--target", "/no/such/folder"], "--target /no/such/folder does not exist"),
    "no such text": (["--text", "no.txt"], "--text no.txt does not exist"),
    "empty text": (["--text", "{tmp}/empty.txt"], "empty.txt is empty"),
    "one token": (["--text", "{tmp}/short.txt"], "shorter than two tokens"),
    "not JSON": (["--text", "{tmp}/bad.jsonl"], "line 2 is not JSON"),
    "no messages": (["--text", "{tmp}/other.jsonl"], "line 1 has no list of messages"),
    "seq": (["--seq", "513"], "write at most 512"),
    "short seq": (["--seq", "1"], "--seq 1: write at least 2"),
    "aux id": (["--aux-layer-ids", "1", "3", "8"], "--aux-layer-ids: [1, 3, 8]: 8 is out of range"),
    "two aux ids": (["--aux-layer-ids", "1", "3"], "exactly 3"),
    "draft vocabulary": (["--draft-vocab-size", "501"], "write at most 500"),
    "output folder": (["--json", "{tmp}/none/out.json"], "none does not exist; make it first"),
    "cuda": (["--device", "cuda"], "no usable GPU"),
    "not key=value": (["--sglang-arg", "mem_fraction_static"], "write key=value"),
    "sglang argument": (["--sglang-arg", "mem_fracton_static=0.4"], "did you mean 'mem_fraction_static'?"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_exits_2_before_any_weights(smoke, target, tmp_path, monkeypatch, capsys, name):
    monkeypatch.setattr(smoke.engine, "build_runner", lambda _request: pytest.fail("weights were loaded"))
    (tmp_path / "empty.txt").write_text("\n \n")
    (tmp_path / "short.txt").write_text("w9\n")
    (tmp_path / "bad.jsonl").write_text('{"messages": [{"role": "user", "content": "w9"}]}\n{"messages": \n')
    (tmp_path / "other.jsonl").write_text('{"prompt": "w9"}\n')
    before = sorted(os.listdir(tmp_path))
    arguments, message = BAD[name]
    arguments = ["--target", str(target), *(a.replace("{tmp}", str(tmp_path)) for a in arguments)]
    assert smoke.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert "recipe_args" not in error
    assert sorted(os.listdir(tmp_path)) == before


def test_plain_text_is_cut_and_kept_unequal(smoke, fake_engine, target, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("w9 w10 w11 w12\nw13 w14\n\nw20 w21 w22\n\nw30 w31\n")
    args = smoke.parse_args(["--target", str(target), "--text", str(text), "--seq", "5", "--batch", "2"])
    job = smoke.prepare(args)
    assert job.lengths == [5, 3]
    assert job.input_ids.tolist() == [[9, 10, 11, 12, 13], [20, 21, 22, 0, 0]]
    assert job.attention_mask.tolist() == [[1] * 5, [1, 1, 1, 0, 0]]
    assert job.member[[9, 10, 11, 12, 13, 20, 21, 22]].all()
