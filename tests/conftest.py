"""What every test runs under: no GPU, no hub, no noise."""

import os

# Before torch is imported: the tests of the default run are CPU tests on any host (tests/gpu unsets this itself).
if not os.environ.get("NEMO_EAGLE3_SGLANG_GPU_TESTS"):
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
# Workers side by side, each with threads for all cores, wait for each other at every barrier.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
