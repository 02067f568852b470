"""Runs of recipes over several ranks with the real engine, forked from one process that has imported all of it.

``rank_runs.py PLAN``: PLAN is a JSON list of ``{"config": …, "ranks": n, "kill": [rank, step] or null}``. The targets'
processes are forks as well, of the same worker that is otherwise started with ``python -m``: importing SGLang takes
twenty seconds, and there would be a dozen of them. Exit codes are printed as JSON behind the logs.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

# As the client sets it for a target on a CPU.
os.environ["TORCHDYNAMO_DISABLE"] = "1"

import sglang.srt.model_executor.model_runner  # noqa: F401  (before the fork)
from nemo_automodel.components.config.loader import ConfigNode
from resumed_runs import free_port

from nemo_eagle3_sglang.sidecar import client, worker
from nemo_eagle3_sglang.training.recipe import TrainEagle3SGLangRecipe


class Forked:
    """A fork of this process that serves one trainer, with the methods of ``Popen`` that the client uses."""

    def __init__(self, theirs: socket.socket, python: str | None, device: Any) -> None:
        assert python is None
        parent, fd = os.getpid(), os.dup(theirs.fileno())
        self.pid = os.fork()
        if self.pid == 0:
            for name in client.TRAINERS_GROUP:
                os.environ.pop(name, None)
            # The trainer's groups are not this process's, and must not be waited for when it ends.
            forget_groups()
            try:
                os._exit(worker.main(fd, parent))
            finally:
                os._exit(9)
        os.close(fd)
        self._status: int | None = None

    def poll(self) -> int | None:
        if self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._status = os.waitstatus_to_exitcode(status) if pid else None
        return self._status

    def wait(self, timeout: float = 60.0) -> int:
        end = time.monotonic() + timeout
        while self.poll() is None and time.monotonic() < end:
            time.sleep(0.01)
        assert self._status is not None
        return self._status

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


def forget_groups() -> None:
    import torch.distributed.distributed_c10d as c10d

    c10d._world.default_pg = None
    for table in (c10d._world.pg_map, c10d._world.pg_names, c10d._world.pg_group_ranks):
        table.clear()


class Mortal(TrainEagle3SGLangRecipe):
    dies_at: int | None = None

    def _forward_batch(self, *args: Any, **kwargs: Any) -> Any:
        if self.runtime.global_step == self.dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return super()._forward_batch(*args, **kwargs)


def train(run: dict[str, Any], rank: int, port: int) -> None:
    if run["ranks"] > 1:
        os.environ |= {"WORLD_SIZE": str(run["ranks"]), "RANK": str(rank), "LOCAL_RANK": str(rank)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_WORLD_SIZE": str(run["ranks"])}
    recipe = Mortal(ConfigNode(run["config"]))
    recipe.setup()
    if run.get("kill") and run["kill"][0] == rank:
        recipe.dies_at = run["kill"][1]
    recipe.run_train_validation_loop()


def main() -> None:
    client.spawn = Forked
    codes = []
    for run in json.loads(Path(sys.argv[1]).read_text()):
        port, fork = free_port(), multiprocessing.get_context("fork")
        processes = [fork.Process(target=train, args=(run, rank, port)) for rank in range(run["ranks"])]
        began = time.monotonic()
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        codes.append([process.exitcode for process in processes])
        print(f"\n=== {json.dumps(codes)} {time.monotonic() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main()
