#!/usr/bin/env bash
# Start recipes/kimi_k2.7_code_eagle3.yaml on this node; run it on every node of the job.
set -euo pipefail
cd "$(dirname "$0")/.."

usage() {
  cat <<'END'
usage: RDZV_ENDPOINT=HOST:PORT examples/run_kimi_k2.7_code_eagle3.sh [--dry-run] [--recipe_args.KEY=VALUE ...]

Starts this node's share of the training of an EAGLE-3 draft for Kimi K2.7 Code: 16 processes over nodes of 4 GPUs.
Run the same command on every node (srun does); options after it override keys of the recipe. The job ends when one
process fails, when the nodes do not meet in time, and at the time limit; no process outlives this script.

  --dry-run        check the recipe, print the command and stop
  --help           print this

environment:
  RDZV_ENDPOINT    host and port on which the nodes meet: the first node's (required)
  WORLD            processes in all                                        (16; must be the recipe's tp_size times k)
  GPUS_PER_NODE    processes on this node                                  (4)
  RUN_ID           name of the job, the same on all nodes                  (SLURM_JOB_ID, or kimi-eagle3)
  JOIN_TIMEOUT     seconds that the nodes wait for each other              (900)
  TIME_LIMIT       of the whole run, as timeout(1) takes it                (24h)
  RECIPE           the YAML                                                (recipes/kimi_k2.7_code_eagle3.yaml)
  PYTHON           an interpreter that has nemo-eagle3-sglang[all]         (python3)

With Slurm:
  srun --nodes 4 --ntasks-per-node 1 --gpus-per-node 4 \
    env RDZV_ENDPOINT="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1):29500" \
    examples/run_kimi_k2.7_code_eagle3.sh
END
}

fail() {
  echo "error: $*" >&2
  exit 2
}

dry_run=false
overrides=()
for argument in "$@"; do
  case "$argument" in
    -h | --help) usage; exit 0 ;;
    --dry-run) dry_run=true ;;
    --*=*) overrides+=("$argument") ;;
    *) fail "$argument: write overrides as --recipe_args.KEY=VALUE; --help shows the rest" ;;
  esac
done

world="${WORLD:-16}"
gpus="${GPUS_PER_NODE:-4}"
run_id="${RUN_ID:-${SLURM_JOB_ID:-kimi-eagle3}}"
join_timeout="${JOIN_TIMEOUT:-900}"
time_limit="${TIME_LIMIT:-24h}"
recipe="${RECIPE:-recipes/kimi_k2.7_code_eagle3.yaml}"
python="${PYTHON:-python3}"

[[ "$world" =~ ^[1-9][0-9]*$ ]] || fail "WORLD=$world is not a number of processes"
[[ "$gpus" =~ ^[1-9][0-9]*$ ]] || fail "GPUS_PER_NODE=$gpus is not a number of processes"
[[ "$join_timeout" =~ ^[1-9][0-9]*$ ]] || fail "JOIN_TIMEOUT=$join_timeout is not a number of seconds"
((world % gpus == 0)) || fail "WORLD=$world is not a multiple of GPUS_PER_NODE=$gpus"
[[ -f "$recipe" ]] || fail "RECIPE=$recipe does not exist"
[[ -n "${RDZV_ENDPOINT:-}" ]] || fail "RDZV_ENDPOINT is not set; write HOST:PORT of the first node, e.g. node0:29500"
[[ "$RDZV_ENDPOINT" == *?:[0-9]* ]] || fail "RDZV_ENDPOINT=$RDZV_ENDPOINT: write HOST:PORT"

"$python" -m nemo_eagle3_sglang.cli validate "$recipe" "${overrides[@]}" >/dev/null

command=(
  timeout --signal=TERM --kill-after=60 "$time_limit"
  "$python" -m torch.distributed.run
  --nnodes="$((world / gpus))"
  --nproc-per-node="$gpus"
  --max-restarts=0
  --rdzv-backend=c10d
  --rdzv-endpoint="$RDZV_ENDPOINT"
  --rdzv-id="$run_id"
  --rdzv-conf="join_timeout=$join_timeout,close_timeout=60"
  -m nemo_automodel.cli.app "$recipe" "${overrides[@]}"
)
if "$dry_run"; then
  printf '%q ' "${command[@]}"
  echo
  exit 0
fi
exec "${command[@]}"
