"""What a run says about itself: the progress bar, ``metrics.jsonl`` and the closing summary."""

from __future__ import annotations

import json
import logging
import math
import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from tqdm import tqdm

logger = logging.getLogger(__name__)

GIB = 2**30
# Pairs of events kept at most, a log window that is longer adds up what the device has finished.
MAX_SPANS = 512


class RunMeter:
    """Counts tokens and times parts, and turns AutoModel's log points into lines, files and a summary.

    Nothing here makes the host wait for the device: spans on a GPU are pairs of events, read at a log point, for which
    AutoModel waits anyway.

    Args:
        path: ``metrics.jsonl``, one JSON object a log point, appended to when a run is resumed; ``None`` on ranks
            that do not write.
        device: Where target and draft run.
        peak_flops: FLOP/s to which the MFU relates; ``None`` reports none.
    """

    def __init__(self, path: Path | None, device: torch.device | None = None, peak_flops: float | None = None) -> None:
        self._path = path
        self._device, self._peak = device or torch.device("cpu"), peak_flops
        self._tokens_total = 0
        self._first: dict[str, Any] | None = None
        self._last: dict[str, Any] | None = None
        self._accepted: tuple[torch.Tensor, torch.Tensor] | None = None
        self.bar: tqdm | None = None
        self.restart()

    def count(self, tokens: int) -> None:
        """Add the real (unpadded) tokens of one training micro-batch."""
        self._tokens += tokens
        self._tokens_total += tokens

    def add_flops(self, flops: float) -> None:
        """Add the model FLOPs of one training micro-batch; see ``flops.py``."""
        self._flops += flops

    def target(self) -> AbstractContextManager[None]:
        """Time the target: on a GPU what the device spends, elsewhere what the host does."""
        return self._timed("target")

    def data(self) -> AbstractContextManager[None]:
        """Time a wait for the data loader: on a GPU for how long the device idles, elsewhere what the host waits.

        The second event of a pair is recorded when the batch has come; a device that is still busy with earlier work
        reaches both at once. So a wait that its work hides costs nothing, as it should.
        """
        return self._timed("data")

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        if self._device.type != "cuda":
            begin = time.perf_counter()
            yield
            self._seconds[part] += time.perf_counter() - begin
            return
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        yield
        end.record()
        self._spans.append((part, start, end))
        if len(self._spans) > MAX_SPANS:
            self._add_finished()

    def _add_finished(self) -> None:
        """Add up the spans that the device has passed; asks, and does not wait."""
        while self._spans and self._spans[0][2].query():
            part, start, end = self._spans.popleft()
            self._seconds[part] += start.elapsed_time(end) / 1e3

    def accepted(self, hits: torch.Tensor, valid: torch.Tensor) -> None:
        """Keep the counts ``[K]`` behind the next record's simulated accept length, those of all ranks."""
        self._accepted = hits, valid

    @contextmanager
    def keep_acceptance(self, loop: ModuleType) -> Iterator[None]:
        """Keep the counts behind each simulated accept length that AutoModel's loop forms.

        Its log point adds them up over the ranks and returns one number. A subclass could only count again, with a
        second collective at the same point of every rank; so the function that takes the sums is wrapped instead.

        Args:
            loop: The module of the loop, which calls its global ``simulated_accept_length(hits, valid)``.
        """
        formula = loop.simulated_accept_length

        def keeping(hits: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
            self.accepted(hits, valid)
            return formula(hits, valid)

        loop.simulated_accept_length = keeping
        try:
            yield
        finally:
            loop.simulated_accept_length = formula

    @property
    def tokens(self) -> int:
        """Real tokens that the run has been trained on, those before it was resumed included."""
        return self._tokens_total

    def resume(self, step: int, tokens: int | None = None, evaluated: bool = True) -> None:
        """Go on where the run that wrote ``metrics.jsonl`` stood at ``step``.

        What it logged after that comes a second time, so that those lines are moved to ``metrics.superseded.jsonl``.

        Args:
            step: Optimizer step of the checkpoint; 0 for a run from the start.
            tokens: :attr:`tokens` at the checkpoint; ``None`` takes them from the last line before it.
            evaluated: Whether an evaluation at ``step`` came before the checkpoint, so that there will be none again.
        """
        if self._path is not None and self._path.exists():
            self._supersede(self._path, step, evaluated)
        self._tokens_total = self._tokens_total if tokens is None else tokens

    def _supersede(self, path: Path, step: int, evaluated: bool) -> None:
        kept, rest = [], []
        for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                # A run that was killed while it wrote.
                continue
            if record["step"] > step or (record["step"] == step and "val/loss" in record and not evaluated):
                rest.append(line)
                continue
            kept.append(line)
            self._tokens_total = record["tokens"]
        if not rest:
            return
        logger.info("%d lines of %s are after step %d and move to metrics.superseded.jsonl", len(rest), path, step)
        with path.with_name("metrics.superseded.jsonl").open("a", encoding="utf-8") as sink:
            sink.writelines(rest)
        whole = path.with_name(path.name + ".new")
        whole.write_text("".join(kept), encoding="utf-8")
        whole.replace(path)

    def restart(self) -> None:
        """Start a window, so that set-up and evaluation are not counted as training time."""
        self._tokens, self._since = 0, time.perf_counter()
        self._flops = 0.0
        self._seconds = {"target": 0.0, "data": 0.0}
        self._spans: deque[tuple[str, torch.cuda.Event, torch.cuda.Event]] = deque()
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def log(self, data: dict[str, Any], step: int) -> dict[str, Any]:
        """Take one of AutoModel's log records and return it with the window's speed, shares and memory added.

        Added to a training record: ``train/tokens_per_second``; ``train/time_target``, ``train/time_data`` and
        ``train/time_draft``, shares of the window (the draft's is the rest: its step, the optimizer, and a checkpoint
        that was saved in the window); ``train/mfu`` where FLOPs were counted and the device's peak is known;
        ``train/peak_memory_gib`` on a GPU.

        Added beside a simulated accept length: ``train/acceptance_1``, … or ``val/acceptance_1``, …: the share of
        chains whose drafts are the target's up to that position; 1 and their sum is the accept length.

        AutoModel's EAGLE-3 recipe (0.6.0) logs to W&B alone: it has no MLflow logger, so none is fed here.

        Args:
            data: Keys as AutoModel logs them: ``train/loss``, ``train/accuracy``, ``train/tau_sim``, ``val/loss``, …
            step: Optimizer step.
        """
        if not math.isfinite(data.get("train/loss", 0.0)):
            raise FloatingPointError(
                f"step {step}: train/loss is {data['train/loss']}; the draft holds no numbers any more. Lower "
                "optimizer.lr, or look for inf/nan in the target's states; checkpoints before this step can be resumed"
            )
        data = {**data, **self._by_position(data)}
        if "train/loss" in data:
            data = {**data, **self._window()}
            self._first = self._first or data
            self._last = data
            self._show(data, step)
        self._write({"step": step, "tokens": self._tokens_total, "time": time.time(), **data})
        self.restart()
        return data

    def _by_position(self, data: dict[str, Any]) -> dict[str, float]:
        counts, self._accepted = self._accepted, None
        part = next((name for name in ("train", "val") if f"{name}/tau_sim" in data), None)
        if part is None or counts is None:
            return {}
        hits, valid = counts
        shares = (hits.float() / valid.float().clamp_min(1.0)).tolist()
        return {f"{part}/acceptance_{position}": share for position, share in enumerate(shares, 1)}

    def _window(self) -> dict[str, float]:
        seconds = max(time.perf_counter() - self._since, 1e-9)
        if self._spans:
            # Recorded before the values of this log point, which have been read.
            self._spans[-1][2].synchronize()
            self._add_finished()
        shares = {part: min(spent / seconds, 1.0) for part, spent in self._seconds.items()}
        found = {
            "train/tokens_per_second": self._tokens / seconds,
            "train/time_target": shares["target"],
            "train/time_data": shares["data"],
            "train/time_draft": max(0.0, 1.0 - sum(shares.values())),
        }
        if self._peak and self._flops:
            found["train/mfu"] = self._flops / seconds / self._peak
        if self._device.type == "cuda":
            found["train/peak_memory_gib"] = torch.cuda.max_memory_allocated(self._device) / GIB
        return found

    def _show(self, data: dict[str, Any], step: int) -> None:
        speed = {
            "tok/s": f"{data['train/tokens_per_second']:.0f}",
            "target": f"{data['train/time_target']:.0%}",
            "data": f"{data['train/time_data']:.0%}",
        }
        if "train/mfu" in data:
            speed["mfu"] = f"{data['train/mfu']:.0%}"
        if "train/peak_memory_gib" in data:
            speed["peak"] = f"{data['train/peak_memory_gib']:.1f}G"
        logger.info("step=%s %s", step, " ".join(f"{name}={value}" for name, value in speed.items()))
        if self.bar is None:
            return
        postfix = {"loss": f"{data['train/loss']:.3f}", "acc": f"{data['train/accuracy']:.3f}"}
        if "train/tau_sim" in data:
            postfix["accept"] = f"{data['train/tau_sim']:.2f}"
        self.bar.set_postfix({**postfix, **speed})

    def _write(self, record: dict[str, Any]) -> None:
        if self._path is not None:
            append_line(self._path, record)

    def summary(self) -> str | None:
        """Return how loss, accuracy and accept length moved from the first log window to the last."""
        if self._first is None or self._last is None or self._first is self._last:
            return None
        parts = [
            f"loss {self._first['train/loss']:.3f} -> {self._last['train/loss']:.3f}",
            f"accuracy {self._first['train/accuracy']:.3f} -> {self._last['train/accuracy']:.3f}",
        ]
        if "train/tau_sim" in self._last:
            parts.append(
                f"simulated accept length {self._first['train/tau_sim']:.2f} -> {self._last['train/tau_sim']:.2f}"
            )
        return ", ".join(parts) + f", {self._tokens_total:,} tokens"


class TimedLoader:
    """A data loader that tells a meter how long the host waited for each batch.

    Args:
        loader: AutoModel's ``DataLoader``; everything but iteration is its own.
        meter: Where the waiting is added.
    """

    def __init__(self, loader: Any, meter: RunMeter) -> None:
        self._loader, self._meter = loader, meter

    def __iter__(self) -> Iterator[Any]:
        """Yield the loader's batches."""
        with self._meter.data():
            # Starts the worker processes, where there are any.
            batches = iter(self._loader)
        end = object()
        while True:
            with self._meter.data():
                batch = next(batches, end)
            if batch is end:
                return
            yield batch

    def __len__(self) -> int:
        """Return the batches of an epoch."""
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        """Return what is the loader's."""
        return getattr(self._loader, name)


def append_line(path: Path, record: dict[str, Any]) -> None:
    """Append ``record`` as a line of JSON; what JSON lacks is written as text."""
    line = json.dumps(record, default=str) + "\n"
    with path.open("a", encoding="utf-8") as sink:
        sink.write(("\n" if _torn(path) else "") + line)


def _torn(path: Path) -> bool:
    """Return whether the file ends in the middle of a line, as a killed run leaves it."""
    with path.open("rb") as source:
        if source.seek(0, 2) == 0:
            return False
        source.seek(-1, 2)
        return source.read(1) != b"\n"
