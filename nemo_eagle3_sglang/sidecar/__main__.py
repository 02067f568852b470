"""``python -m nemo_eagle3_sglang.sidecar FD PARENT``: started by the trainer, not by hand."""

from __future__ import annotations

import sys

from nemo_eagle3_sglang.sidecar.worker import main

if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("this is the target's process of a training run; nemo-eagle3-sglang train starts it")
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
