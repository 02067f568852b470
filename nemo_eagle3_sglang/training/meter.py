"""What a run says about itself: the progress bar, ``metrics.jsonl`` and the closing summary."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm


class RunMeter:
    """Counts tokens, and turns AutoModel's log points into lines, files and a summary.

    Args:
        path: ``metrics.jsonl``, one JSON object a log point, appended to when a run is resumed; ``None`` on ranks
            that do not write.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._tokens = 0
        self._tokens_total = 0
        self._since = time.perf_counter()
        self._first: dict[str, Any] | None = None
        self._last: dict[str, Any] | None = None
        self.bar: tqdm | None = None

    def count(self, tokens: int) -> None:
        """Add the real (unpadded) tokens of one training micro-batch."""
        self._tokens += tokens
        self._tokens_total += tokens

    def resume(self, step: int) -> None:
        """Go on counting tokens where the run that wrote ``metrics.jsonl`` stood at ``step``."""
        if self._path is None or step == 0 or not self._path.exists():
            return
        for line in self._path.read_text(encoding="utf-8").splitlines():
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                # A run that was killed while it wrote.
                continue
            if record["step"] <= step:
                self._tokens_total = record["tokens"]

    def restart(self) -> None:
        """Start the clock of a window, so that set-up and evaluation are not counted as training time."""
        self._tokens, self._since = 0, time.perf_counter()

    def log(self, data: dict[str, Any], step: int) -> dict[str, Any]:
        """Take one of AutoModel's log records and return it with ``train/tokens_per_second`` added.

        Args:
            data: Keys as AutoModel logs them: ``train/loss``, ``train/accuracy``, ``train/tau_sim``, ``val/loss``, …
            step: Optimizer step.
        """
        if not math.isfinite(data.get("train/loss", 0.0)):
            raise FloatingPointError(
                f"step {step}: train/loss is {data['train/loss']}; the draft holds no numbers any more. Lower "
                "optimizer.lr, or look for inf/nan in the target's states; checkpoints before this step can be resumed"
            )
        if "train/loss" in data:
            data = {**data, "train/tokens_per_second": self._tokens / max(time.perf_counter() - self._since, 1e-9)}
            self._first = self._first or data
            self._last = data
            self._show(data)
        self._write({"step": step, "tokens": self._tokens_total, "time": time.time(), **data})
        self.restart()
        return data

    def _show(self, data: dict[str, Any]) -> None:
        if self.bar is None:
            return
        postfix = {"loss": f"{data['train/loss']:.3f}", "acc": f"{data['train/accuracy']:.3f}"}
        if "train/tau_sim" in data:
            postfix["accept"] = f"{data['train/tau_sim']:.2f}"
        postfix["tok/s"] = f"{data['train/tokens_per_second']:.0f}"
        self.bar.set_postfix(postfix)

    def _write(self, record: dict[str, Any]) -> None:
        if self._path is None:
            return
        with self._path.open("a", encoding="utf-8") as sink:
            sink.write(("\n" if self._torn() else "") + json.dumps(record) + "\n")

    def _torn(self) -> bool:
        """Return whether the file ends in the middle of a line, as a killed run leaves it."""
        assert self._path is not None
        with self._path.open("rb") as source:
            if source.seek(0, 2) == 0:
                return False
            source.seek(-1, 2)
            return source.read(1) != b"\n"

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
