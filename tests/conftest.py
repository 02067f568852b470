"""What every test runs under: no GPU, no hub, no noise."""

import os

# Before torch is imported: the tests of the default run are CPU tests on any host (tests/gpu unsets this itself).
if not os.environ.get("NEMO_EAGLE3_SGLANG_GPU_TESTS"):
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
