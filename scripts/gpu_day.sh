#!/usr/bin/env bash
# Everything that a machine with one GPU can show, in less than nine minutes: the tests that need CUDA, BERT and GPT-2 at every
# stage and tier beside stock torch, the kernels beside a copy, and state offloaded to the host and to files.
#
#     bash scripts/gpu_day.sh                      # with the Python that is active
#     bash scripts/gpu_day.sh --device cpu         # does it run? small models, no CUDA tests
#
# Each part has a time limit of its own, and a part that fails does not stop the next. Figures are kept as JSON in
# scripts/bench/results/ (or $RESULTS), logs beside them in outputs/gpu_day/. Ends with status 1 if a part failed.
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
commit="$(git rev-parse --short HEAD 2>/dev/null || echo unknown)"
results="${RESULTS:-scripts/bench/results}"
logs=outputs/gpu_day
mkdir -p "$results" "$logs"
is_small=false
[[ "${1:-} ${2:-}" == "--device cpu" ]] && is_small=true
summary=()

# part NAME SECONDS COMMAND...: runs it with its output on the screen and in a log.
part() {
    local name="$1" limit_s="$2" began_s=$SECONDS status
    shift 2
    echo "== $name (at most $limit_s s)"
    timeout --kill-after=10 "$limit_s" "$@" 2>&1 | tee "$logs/$name.log"
    status=${PIPESTATUS[0]}
    local outcome=passed
    (( status == 0 )) || outcome="FAILED with status $status"
    (( status != 124 )) || outcome="FAILED: not done after $limit_s s"
    summary+=("$(printf '%-12s %4d s  %s' "$name" $(( SECONDS - began_s )) "$outcome")")
}

if $is_small; then
    part training 200 python scripts/bench/gpus.py --device cpu --models bert-tiny --steps 1 --rounds 1 \
        --json "$results/gpus-$commit-cpu.json"
    part kernels 100 python scripts/bench/fused_kernels.py --device cpu --numel 65536 --rounds 1 --json "$results/kernels-$commit.json"
else
    part tests 170 python -m pytest -q -m gpu tests/engine/test_gpu.py tests/kernels/test_kernels.py
    part training 200 python scripts/bench/gpus.py --minutes 3 --json "$results/gpus-$commit-1.json"
    part kernels 70 python scripts/bench/fused_kernels.py --json "$results/kernels-$commit.json"
    part offload 90 python scripts/bench/offload.py --minutes 1.2 --nvme-path outputs/nvme --json "$results/offload-$commit.json"
fi
echo "== summary of commit $commit"
printf '%s\n' "${summary[@]}"
[[ ! "${summary[*]}" == *FAILED* ]]
