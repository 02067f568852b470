"""Runs of one recipe in processes forked from this one, so that AutoModel is imported once: ``resumed_runs.py PLAN``.

PLAN is a JSON list of runs, ``{"config": …, "die_at": step or null, "ranks": n}``; a run ends with SIGKILL, as the
out-of-memory killer and a pre-empted node end it, once it has logged ``die_at``. Exit codes are printed as JSON.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from nemo_automodel.components.config.loader import ConfigNode

from nemo_eagle3_sglang.training.recipe import TrainEagle3SGLangRecipe


class Mortal(TrainEagle3SGLangRecipe):
    die_at: int | None = None

    def _maybe_run_regen(self) -> None:
        # AutoModel calls it on every rank behind a step's checkpoint and log point.
        if self.runtime.global_step == self.die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        super()._maybe_run_regen()


def train(run: dict[str, Any], rank: int, port: int) -> None:
    if run["ranks"] > 1:
        os.environ |= {"WORLD_SIZE": str(run["ranks"]), "RANK": str(rank), "LOCAL_RANK": str(rank)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    recipe = Mortal(ConfigNode(run["config"]))
    recipe.setup()
    recipe.die_at = run["die_at"]
    recipe.run_train_validation_loop()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def main() -> None:
    codes = []
    for run in json.loads(Path(sys.argv[1]).read_text()):
        port, fork = free_port(), multiprocessing.get_context("fork")
        processes = [fork.Process(target=train, args=(run, rank, port)) for rank in range(run["ranks"])]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        codes.append([process.exitcode for process in processes])
        # Separates the logs.
        print(f"\n=== {json.dumps(codes)}", flush=True)


if __name__ == "__main__":
    main()
