"""Target servers in processes of their own, for tests."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

START_SECONDS = 600.0
FOREIGN = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "PYTEST_XDIST_WORKER", "NEMO_EAGLE3_SGLANG_TOKEN")


class Server:
    """``nemo-eagle3-sglang serve-target`` with its log in a file."""

    def __init__(self, log: Path, target: Path, *flags: str, python: str = sys.executable, **env: str) -> None:
        self.log = log
        clean = {k: v for k, v in os.environ.items() if k not in FOREIGN}
        command = [python, "-m", "nemo_eagle3_sglang.cli", "serve-target", "--target", str(target), *flags]
        with log.open("ab") as out:
            self._from = out.tell()
            # A session of its own: what it leaves behind can be seen, and ended.
            self.process = subprocess.Popen(
                command,
                stdout=out,
                stderr=out,
                env={**clean, "CUDA_VISIBLE_DEVICES": "", **env},
                start_new_session=True,
            )
        self.pid = self.process.pid

    @property
    def text(self) -> str:
        with self.log.open("rb") as log:
            log.seek(self._from)
            return log.read().decode(errors="replace")

    @property
    def url(self) -> str:
        """Wait until it is ready and return its address."""
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            if found := re.search(r"remote_urls: \[(\S+)\]", self.text):
                return found[1]
            assert self.process.poll() is None, self.text[-4000:]
            time.sleep(0.1)
        raise AssertionError(f"not ready in {START_SECONDS} s: {self.text[-4000:]}")

    def workers(self) -> list[int]:
        """Return the processes of its session but itself."""
        listed = subprocess.run(
            ["ps", "-s", str(self.pid), "-o", "pid=,stat="], capture_output=True, text=True, check=False
        ).stdout
        rows = [line.split() for line in listed.splitlines()]
        # A zombie has ended; who reaps it is no matter of ours.
        return [int(pid) for pid, state in rows if int(pid) != self.pid and not state.startswith("Z")]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(30)

    def terminate(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(90)

    def clean_up(self) -> None:
        for pid in [self.pid, *self.workers()]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait(30)


@contextmanager
def serving(log: Path, target: Path, *flags: str, **env: str) -> Iterator[Server]:
    server = Server(log, target, *flags, **env)
    try:
        yield server
    finally:
        server.clean_up()
