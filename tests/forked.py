"""Trainers and servers as forks of one process that has imported what they need, which takes twenty seconds otherwise.

Started by :class:`Nursery`; each line on its standard input is a job, ``{"kind": "train" | "cli", …}``, answered by the
process id of the fork. A fork writes its exit status to ``<log>.status`` when it ends by itself.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

FOREIGN = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "PYTEST_XDIST_WORKER", "NEMO_EAGLE3_SGLANG_TOKEN")


def wait_for(condition: Any, seconds: float, what: Any) -> Any:
    """Return the first true value of ``condition()``."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := condition():
            return found
        time.sleep(0.05)
    raise AssertionError(f"not in {seconds:.0f} s: {what()[-4000:] if callable(what) else what}")


class Fork:
    """A process of the nursery."""

    def __init__(self, pid: int, log: Path) -> None:
        self.pid, self.log = pid, log

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid, number)

    def wait(self, seconds: float = 120.0) -> int:
        status = self.log.with_suffix(".status")
        wait_for(status.exists, seconds, lambda: self.text)
        return int(status.read_text())

    def until(self, words: str, seconds: float = 120.0) -> None:
        ended = self.log.with_suffix(".status")
        wait_for(lambda: words in self.text or ended.exists(), seconds, lambda: self.text)
        assert words in self.text, self.text[-4000:]

    def go_on(self) -> None:
        self.log.with_suffix(".go").touch()


class Nursery:
    """The process that forks."""

    def __init__(self, log: Path) -> None:
        env = {k: v for k, v in os.environ.items() if k not in FOREIGN}
        env |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("wb"),
            env=env,
            text=True,
        )
        self._children: list[Fork] = []

    def fork(self, log: Path, **job: Any) -> Fork:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        for suffix in (".status", ".go"):
            log.with_suffix(suffix).unlink(missing_ok=True)
        self._process.stdin.write(json.dumps({**job, "log": str(log)}) + "\n")
        self._process.stdin.flush()
        self._children.append(Fork(int(self._process.stdout.readline()), log))
        return self._children[-1]

    def close(self) -> None:
        for child in self._children:
            try:
                child.kill()
            except ProcessLookupError:
                continue
        self._process.kill()
        self._process.wait()


def _train(config: dict[str, Any], pause_at: int | None, go: Path) -> None:
    from nemo_automodel.components.config.loader import ConfigNode

    from nemo_eagle3_sglang.training.recipe import TrainEagle3SGLangRecipe

    class Paused(TrainEagle3SGLangRecipe):
        def _forward_batch(self, *args: Any, **kwargs: Any) -> Any:
            if self.runtime.global_step == pause_at and not go.exists():
                print("PAUSED", flush=True)
                while not go.exists():
                    time.sleep(0.05)
            return super()._forward_batch(*args, **kwargs)

    recipe = Paused(ConfigNode(config))
    recipe.setup()
    recipe.run_train_validation_loop()


def _run(job: dict[str, Any]) -> int:
    log = Path(job["log"])
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if job["kind"] == "train":
        _train(job["config"], job.get("pause_at"), log.with_suffix(".go"))
        return 0
    from nemo_eagle3_sglang.cli import main

    return main(job["arguments"])


def main() -> None:
    # Whatever is imported may print; only this says process ids.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # Before the first fork: what all of them would import.
    import aiohttp  # noqa: F401
    import sglang.srt.model_executor.model_runner  # noqa: F401

    import nemo_eagle3_sglang.remote.hf_engine
    import nemo_eagle3_sglang.remote.serve
    import nemo_eagle3_sglang.training.recipe  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        job = json.loads(line)
        pid = os.fork()
        if pid:
            print(pid, file=answers, flush=True)
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        status = 1
        try:
            status = _run(job)
        except SystemExit as leaving:
            status = int(leaving.code or 0)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            log = Path(job["log"])
            # Renamed into place, so that nobody reads half of it.
            log.with_suffix(".part").write_text(str(status))
            log.with_suffix(".part").rename(log.with_suffix(".status"))
            os._exit(status)


if __name__ == "__main__":
    main()
