#!/usr/bin/env bash
# Everything that needs a GPU, in one command. Reports go to $OUT (outputs/gpu).
#
#   tests/gpu/run.sh                                             in an installed environment
#   SGLANG_ARGS="attention_backend=triton sampling_backend=pytorch" tests/gpu/run.sh      without FA3 and flashinfer
set -uo pipefail
cd "$(dirname "$0")/../.."
export NEMO_EAGLE3_SGLANG_GPU_TESTS=1 PYTHONUNBUFFERED=1 HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}"
OUT="${OUT:-outputs/gpu}"
mkdir -p "$OUT"
status=0
python3 -m pytest tests/gpu -q --timeout 500 --rootdir . "$@" || status=1
args=()
for pair in ${SGLANG_ARGS:-}; do args+=(--sglang-arg "$pair"); done
python3 scripts/bench_memory_split.py --json "$OUT/memory_split.json" "${args[@]}" || status=1
exit $status
