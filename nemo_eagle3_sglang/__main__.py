"""``python -m nemo_eagle3_sglang``: the console script by a name that holds in every install, also under torchrun."""

import sys

from nemo_eagle3_sglang.cli import main

if __name__ == "__main__":
    sys.exit(main())
