"""Cases in worker processes that outlive a CUDA fault, a hang and a crash: only the case at hand is lost.

SGLang cannot be forked: importing it asks the GPU for its compute capability, which initialises CUDA, and CUDA does
not survive a fork. So a few workers import it once each, and take case after case. A worker whose case did not end
well is replaced, since neither CUDA nor SGLang's globals can be trusted after that.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
# A cold host reads SGLang and its libraries from disk in some 20 s, four times at once.
START_SECONDS = 240.0

Result = dict[str, Any]


def run_cases(call: str, names: Sequence[str], logs: Path, workers: int, seconds: float) -> dict[str, Result]:
    """Run ``call(name, stage)`` for every name, each in one of ``workers`` processes.

    Args:
        call: ``module:function``; the function returns what JSON can hold, and calls ``stage(words)`` before each
            part of its work, so that a crash can be placed.
        names: The cases.
        logs: Folder for what the workers print.
        workers: Processes at a time.
        seconds: Limit of one case.

    Returns:
        What the function returned by name, or ``{"error": ..., "stage": ...}`` where it raised, hung or crashed.
    """
    todo: queue.SimpleQueue[str] = queue.SimpleQueue()
    for name in names:
        todo.put(name)
    results: dict[str, Result] = {}
    logs.mkdir(parents=True, exist_ok=True)

    def serve(number: int) -> None:
        log = logs / f"worker{number}.log"
        worker: _Worker | None = None
        try:
            with contextlib.suppress(queue.Empty):
                while True:
                    name = todo.get_nowait()
                    worker = worker or _Worker(call, log)
                    results[name] = worker.run(name, seconds)
                    if "error" in results[name]:
                        worker = worker.stop()
        finally:
            if worker:
                worker.stop()

    threads = [threading.Thread(target=serve, args=(i,)) for i in range(min(workers, len(names)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {name: results[name] for name in names}


class _Worker:
    """One process that runs cases one after another; see :func:`main` for its side."""

    def __init__(self, call: str, log: Path) -> None:
        self._log = log
        with log.open("a") as sink:
            self._process = subprocess.Popen(
                [sys.executable, __file__, call], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=sink, text=True
            )
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()
        self._ready = False

    def _read(self) -> None:
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def run(self, name: str, seconds: float) -> Result:
        stage = "import"
        try:
            if not self._ready:
                self._next(time.monotonic() + START_SECONDS)
                self._ready = True
            start = time.monotonic()
            self._process.stdin.write(json.dumps(name) + "\n")
            self._process.stdin.flush()
            while "stage" in (message := self._next(start + seconds)) and "error" not in message:
                stage = message["stage"]
            return {**message, "seconds": round(time.monotonic() - start, 1)}
        except TimeoutError:
            return {"error": f"no answer after {seconds:.0f} s", "stage": stage}
        except (EOFError, BrokenPipeError):
            code = self._process.wait()
            return {"error": f"the process ended with {code}: {self._last_words()}", "stage": stage}

    def _next(self, deadline: float) -> Result:
        try:
            line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise TimeoutError from None
        if line is None:
            raise EOFError
        return json.loads(line)

    def _last_words(self) -> str:
        lines = [line.strip() for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return " | ".join(lines[-8:])[-1000:]

    def stop(self) -> None:
        """End the process; it holds nothing that must be put back."""
        self._process.kill()
        self._process.wait()


@contextlib.contextmanager
def _private_stdout() -> Iterator[Callable[[Result], None]]:
    """Keep stdout for messages, and send everything that is printed to stderr, by C code too."""
    with os.fdopen(os.dup(1), "w") as channel:
        os.dup2(2, 1)

        def send(message: Result) -> None:
            channel.write(json.dumps(message) + "\n")
            channel.flush()

        yield send


def main() -> None:
    """Import the function named on the command line, then run it for each name that comes on stdin."""
    faulthandler.enable()
    module, function = sys.argv[1].split(":")
    sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1])]
    with _private_stdout() as send:
        run = getattr(importlib.import_module(module), function)
        send({"ready": True})
        for line in sys.stdin:
            at = ["start"]

            def stage(words: str, at: list[str] = at) -> None:
                at[0] = words
                send({"stage": words})

            try:
                send(run(json.loads(line), stage))
            except BaseException as error:
                traceback.print_exc()
                sys.stderr.flush()
                words = str(error).strip() or "no message"
                send({"error": f"{type(error).__name__}: {words[:1000]}", "stage": at[0]})


if __name__ == "__main__":
    main()
