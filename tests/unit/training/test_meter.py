"""What a run says about itself, from AutoModel's log points."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from nemo_eagle3_sglang.training import meter as meter_module
from nemo_eagle3_sglang.training.meter import RunMeter


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(meter_module.time, "perf_counter", clock)
    return clock


def point(loss: float, accuracy: float = 0.25, tau: float | None = 1.5) -> dict[str, Any]:
    data = {"train/loss": loss, "train/accuracy": accuracy, "train/lr": 1e-4}
    return data if tau is None else data | {"train/tau_sim": tau}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_tokens_per_second_are_of_the_window(clock):
    meter = RunMeter(None)
    meter.count(100)
    meter.count(20)
    clock.now += 4
    assert meter.log(point(3.0), 1)["train/tokens_per_second"] == 30
    meter.count(50)
    clock.now += 5
    assert meter.log(point(2.0), 2)["train/tokens_per_second"] == 10


def test_setup_and_evaluation_are_not_training_time(clock):
    meter = RunMeter(None)
    clock.now += 1000
    meter.restart()
    meter.count(10)
    clock.now += 1
    assert meter.log(point(3.0), 1)["train/tokens_per_second"] == 10
    clock.now += 1000
    assert "train/tokens_per_second" not in meter.log({"val/loss": 2.0}, 1)
    meter.count(10)
    clock.now += 1
    assert meter.log(point(3.0), 2)["train/tokens_per_second"] == 10


def test_the_given_record_is_not_changed(clock):
    data = point(3.0)
    before = dict(data)
    assert RunMeter(None).log(data, 1).items() >= before.items()
    assert data == before


def test_every_point_is_a_line(tmp_path, clock):
    path = tmp_path / "metrics.jsonl"
    meter = RunMeter(path)
    assert not path.exists(), "nothing is written before there is something to say"
    meter.count(7)
    clock.now += 1
    meter.log(point(3.0), 5)
    meter.log({"val/loss": 2.5}, 5)
    train, val = lines(path)
    assert train.items() >= {"step": 5, "tokens": 7, "train/loss": 3.0, "train/tokens_per_second": 7.0}.items()
    assert val.items() >= {"step": 5, "tokens": 7, "val/loss": 2.5}.items()
    assert train["time"] > 1e9


def test_a_resumed_run_appends(tmp_path):
    path = tmp_path / "metrics.jsonl"
    RunMeter(path).log(point(3.0), 1)
    RunMeter(path).log(point(2.0), 2)
    assert [line["step"] for line in lines(path)] == [1, 2]


def test_a_line_is_there_as_soon_as_it_is_logged(tmp_path):
    """Whoever follows the file, or finds it after a crash, sees whole lines."""
    path = tmp_path / "metrics.jsonl"
    meter = RunMeter(path)
    for step in range(3):
        meter.log(point(1.0), step)
        assert path.read_text().endswith("}\n")
        assert len(lines(path)) == step + 1


class Bar:
    shown: dict[str, str] | None = None

    def set_postfix(self, values: dict[str, str]) -> None:
        self.shown = values


def test_the_bar_shows_loss_accuracy_accept_length_and_speed(clock):
    meter = RunMeter(None)
    meter.bar = bar = Bar()
    meter.count(1234)
    clock.now += 1
    meter.log(point(3.14159, accuracy=0.5), 1)
    quality = {"loss": "3.142", "acc": "0.500", "accept": "1.50"}
    assert bar.shown == {**quality, "tok/s": "1234", "target": "0%", "data": "0%"}
    meter.log({"val/loss": 1.0}, 1)
    assert bar.shown["loss"] == "3.142", "an evaluation leaves the bar alone"
    meter.log(point(2.0, tau=None), 2)
    assert "accept" not in bar.shown, "P-EAGLE has no simulated accept length"


def test_summary_is_from_the_first_window_to_the_last():
    meter = RunMeter(None)
    for step, loss in enumerate([4.0, 3.0, 1.5]):
        meter.count(1000)
        meter.log(point(loss, accuracy=step / 4, tau=1 + step), step)
        meter.log({"val/loss": 9.0}, step)
    assert meter.summary() == (
        "loss 4.000 -> 1.500, accuracy 0.000 -> 0.500, simulated accept length 1.00 -> 3.00, 3,000 tokens"
    )


def test_summary_without_accept_length():
    meter = RunMeter(None)
    meter.log(point(2.0, tau=None), 1)
    meter.log(point(1.0, tau=None), 2)
    assert meter.summary() == "loss 2.000 -> 1.000, accuracy 0.250 -> 0.250, 0 tokens"


@pytest.mark.parametrize("points", [0, 1])
def test_no_summary_of_less_than_two_windows(points):
    meter = RunMeter(None)
    for step in range(points):
        meter.log(point(1.0), step)
    assert meter.summary() is None


def test_a_resumed_run_goes_on_counting(tmp_path):
    path = tmp_path / "metrics.jsonl"
    first = RunMeter(path)
    first.count(100)
    first.log({"train/loss": 2.0, "train/accuracy": 0.1}, step=2)
    first.count(100)
    first.log({"train/loss": 1.0, "train/accuracy": 0.2}, step=4)
    with path.open("a") as sink:
        sink.write('{"step": 6, "tok')
    # The checkpoint is of step 2; what came after it is trained again.
    second = RunMeter(path)
    second.resume(2)
    second.count(50)
    second.log({"train/loss": 1.5, "train/accuracy": 0.2}, step=3)
    assert '"step": 3, "tokens": 150' in path.read_text()


def test_a_torn_last_line_does_not_swallow_the_next(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "tok')
    RunMeter(path).log({"train/loss": 1.0, "train/accuracy": 0.2}, step=2)
    assert json.loads(path.read_text().splitlines()[-1])["step"] == 2


def test_a_loss_that_is_no_number_ends_the_run(tmp_path):
    with pytest.raises(FloatingPointError, match=r"step 7: train/loss is nan"):
        RunMeter(tmp_path / "metrics.jsonl").log({"train/loss": float("nan"), "train/accuracy": 0.0}, step=7)


def test_time_is_split_between_target_data_and_draft(clock):
    meter = RunMeter(None, peak_flops=100.0)
    with meter.target():
        clock.now += 6
    with meter.data():
        clock.now += 1
    clock.now += 3
    meter.count(50)
    meter.add_flops(250.0)
    data = meter.log(point(3.0), 1)
    assert data["train/time_target"] == pytest.approx(0.6)
    assert data["train/time_data"] == pytest.approx(0.1)
    assert data["train/time_draft"] == pytest.approx(0.3)
    assert data["train/mfu"] == pytest.approx(0.25)
    assert "train/peak_memory_gib" not in data, "a CPU has no counter of it"
    clock.now += 1
    assert meter.log(point(3.0), 2)["train/time_target"] == 0, "each window has its own"


def test_no_mfu_without_a_peak(clock):
    meter = RunMeter(None)
    meter.add_flops(250.0)
    clock.now += 1
    assert "train/mfu" not in meter.log(point(3.0), 1)


def test_a_loader_tells_how_long_it_was_waited_for(clock):
    class Slow:
        sampler = "its own"

        def __iter__(self):
            # Worker processes start here.
            clock.now += 6
            return self.batches()

        def batches(self):
            for i in range(3):
                clock.now += 2
                yield i

        def __len__(self):
            return 3

    meter = RunMeter(None)
    loader = meter_module.TimedLoader(Slow(), meter)
    for _ in loader:
        clock.now += 4
    assert meter.log(point(3.0), 1)["train/time_data"] == pytest.approx(0.5)
    assert len(loader) == 3
    assert loader.sampler == "its own"
    assert not hasattr(loader, "state_dict")


def test_the_log_line_says_how_fast(clock, caplog):
    meter = RunMeter(None)
    meter.count(300)
    clock.now += 3
    with caplog.at_level("INFO"):
        meter.log(point(3.0), 7)
    assert "step=7 tok/s=100 target=0% data=0%" in caplog.text


class Device:
    """A GPU's clock beside the host's: work is queued at once, and runs when what came before is done."""

    def __init__(self, monkeypatch, clock: Clock) -> None:
        self.clock, self.busy_until, self.waits = clock, 0.0, 0
        device = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                self.at = 0.0

            def record(self) -> None:
                self.at = max(device.busy_until, clock.now)

            def query(self) -> bool:
                return self.at <= clock.now

            def synchronize(self) -> None:
                device.waits += 1
                clock.now = max(clock.now, self.at)

            def elapsed_time(self, end: Event) -> float:
                return (end.at - self.at) * 1e3

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3 * 2**29)

    def work(self, seconds: float) -> None:
        self.busy_until = max(self.busy_until, self.clock.now) + seconds


def test_on_a_gpu_time_is_the_devices(monkeypatch, clock):
    device, meter = Device(monkeypatch, clock), RunMeter(None, torch.device("cuda"))
    for wait in (1, 1, 11):
        with meter.data():
            clock.now += wait
        with meter.target():
            device.work(3)
        device.work(2)
    assert device.waits == 0, "the host is not made to wait between log points"
    clock.now = device.busy_until
    data = meter.log(point(3.0), 1)
    # The first wait found an idle device; 5 seconds of work hid the second; of the third, 2 seconds were left over.
    assert clock.now - 100 == 18
    assert data["train/time_data"] == pytest.approx(3 / 18)
    assert data["train/time_target"] == pytest.approx(9 / 18)
    assert data["train/time_draft"] == pytest.approx(6 / 18)
    assert data["train/peak_memory_gib"] == 1.5


def test_a_long_window_keeps_few_events(monkeypatch, clock):
    device, meter = Device(monkeypatch, clock), RunMeter(None, torch.device("cuda"))
    for _ in range(3 * meter_module.MAX_SPANS):
        with meter.target():
            device.work(0.5)
        clock.now += 1
    assert len(meter._spans) <= meter_module.MAX_SPANS
    assert device.waits == 0
    assert meter.log(point(3.0), 1)["train/time_target"] == pytest.approx(0.5)


def test_an_evaluation_of_the_target_is_in_no_window(clock):
    meter = RunMeter(None)
    with meter.target():
        clock.now += 50
    meter.log({"val/loss": 2.0}, 1)
    clock.now += 1
    assert meter.log(point(3.0), 2)["train/time_target"] == 0


def test_steps_that_come_again_are_in_the_file_once(tmp_path):
    """Killed at step 3, after a checkpoint of step 2."""
    path = tmp_path / "metrics.jsonl"
    first = RunMeter(path)
    for step in range(1, 4):
        first.count(100)
        first.log(point(4.0 - step), step)
        first.log({"val/loss": 9.0 - step}, step)
    with path.open("a") as sink:
        sink.write('{"step": 4, "tok')
    second = RunMeter(path)
    second.resume(2, tokens=210)
    second.count(100)
    second.log(point(1.5), 3)
    assert [(line["step"], line.get("train/loss", line.get("val/loss"))) for line in lines(path)] == [
        *[(1, 3.0), (1, 8.0), (2, 2.0), (2, 7.0)],
        (3, 1.5),
    ]
    assert lines(path)[-1]["tokens"] == 310, "as the checkpoint says; its own line may be missing"
    superseded = lines(tmp_path / "metrics.superseded.jsonl")
    assert [line["step"] for line in superseded] == [3, 3]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["metrics.jsonl", "metrics.superseded.jsonl"]


def test_an_evaluation_that_comes_again_is_in_the_file_once(tmp_path):
    """The checkpoint of an epoch's last step is made before the epoch's evaluation."""
    path = tmp_path / "metrics.jsonl"
    for evaluated in (True, False):
        path.unlink(missing_ok=True)
        first = RunMeter(path)
        first.log(point(3.0), 2)
        first.log({"val/loss": 2.0}, 2)
        RunMeter(path).resume(2, evaluated=evaluated)
        assert ["val/loss" in line for line in lines(path)] == [False, True][: 1 + evaluated]


def test_a_run_from_the_start_leaves_an_earlier_one_aside(tmp_path):
    path = tmp_path / "metrics.jsonl"
    RunMeter(path).log(point(3.0), 1)
    second = RunMeter(path)
    second.resume(0)
    second.log(point(2.0), 1)
    assert [line["train/loss"] for line in lines(path)] == [2.0]
    assert [line["train/loss"] for line in lines(tmp_path / "metrics.superseded.jsonl")] == [3.0]


def automodels_loop() -> ModuleType:
    """A module that forms the accept length as AutoModel's does: from its own global, out of the summed counts."""
    module = ModuleType("loop")
    exec(
        "def simulated_accept_length(hits, valid):\n    return 1 + (hits / valid.clamp_min(1)).sum()\n"
        "def window(hits, valid):\n    return simulated_accept_length(hits, valid).item()\n",
        module.__dict__,
    )
    return module


def test_acceptance_by_position_is_that_of_the_accept_length(tmp_path):
    meter, loop = RunMeter(tmp_path / "metrics.jsonl"), automodels_loop()
    formula = loop.simulated_accept_length
    with meter.keep_acceptance(loop):
        tau = loop.window(torch.tensor([6.0, 3.0, 0.0]), torch.tensor([8.0, 6.0, 0.0]))
        meter.log(point(3.0, tau=tau), 2)
        meter.log(point(3.0), 4)
    assert loop.simulated_accept_length is formula, "AutoModel's function is given back"
    first, second = lines(tmp_path / "metrics.jsonl")
    shares = [first[f"train/acceptance_{position}"] for position in (1, 2, 3)]
    assert shares == [0.75, 0.5, 0.0]
    assert 1 + sum(shares) == first["train/tau_sim"]
    assert not [key for key in second if "acceptance" in key], "a window's counts are not the next one's"


def test_the_acceptance_of_an_evaluation_is_the_evaluations(tmp_path):
    meter = RunMeter(tmp_path / "metrics.jsonl")
    meter.accepted(torch.tensor([1, 1]), torch.tensor([2, 4]))
    meter.log({"val/loss": 2.0, "val/tau_sim": 1.75}, 2)
    (line,) = lines(tmp_path / "metrics.jsonl")
    assert {key: value for key, value in line.items() if "acceptance" in key} == {
        "val/acceptance_1": 0.5,
        "val/acceptance_2": 0.25,
    }


def test_the_function_is_given_back_when_the_run_fails():
    loop = automodels_loop()
    formula = loop.simulated_accept_length
    with pytest.raises(RuntimeError), RunMeter(None).keep_acceptance(loop):
        raise RuntimeError("out of memory")
    assert loop.simulated_accept_length is formula
