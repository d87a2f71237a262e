#!/usr/bin/env bash
# Everything that a machine with one GPU can show, in a quarter of an hour: where the host's time of a bfloat16 step goes, the tests
# that need CUDA, BERT and GPT-2 at every stage and tier beside stock torch in float32 and bfloat16, forecasts of memory, the
# kernels beside a copy, and state offloaded to the host and to files.
#
#     bash scripts/gpu_day.sh                      # with the Python that is active
#     bash scripts/gpu_day.sh bf16                 # traces of the bfloat16 step, and each suspect out of the way: four minutes
#     bash scripts/gpu_day.sh tests kernels        # some parts
#     bash scripts/gpu_day.sh --device cpu         # does it run? small models, no CUDA tests
#
# Two ranks share the GPU in one more part, `ranks`, where NCCL lets them: NCCL_MULTI_RANK_GPU_ENABLE=1 and NCCL 2.30, which is
# newer than torch 2.11's own (LD_PRELOAD=.../libnccl.so.2). They take turns, so losses and memory say something there, times do
# not.
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
[[ "${1:-} ${2:-}" == "--device cpu" ]] && { is_small=true; shift 2; }
wanted=" $* " left=" $* " names=""
summary=()

# part NAME SECONDS COMMAND...: runs it with its output on the screen and in a log.
part() {
    local name="$1" limit_s="$2" began_s=$SECONDS status
    shift 2
    names+=" $name"
    left="${left// $name / }"
    [[ "$wanted" == "  " || "$wanted" == *" $name "* ]] || return 0
    echo "== $name (at most $limit_s s)"
    timeout --kill-after=10 "$limit_s" "$@" 2>&1 | tee "$logs/$name.log"
    status=${PIPESTATUS[0]}
    local outcome=passed
    (( status == 0 )) || outcome="FAILED with status $status"
    (( status != 124 )) || outcome="FAILED: not done after $limit_s s"
    summary+=("$(printf '%-14s %4d s  %s' "$name" $(( SECONDS - began_s )) "$outcome")")
}

gpus=scripts/bench/gpus.py
if $is_small; then
    part bf16 200 python scripts/bench/bf16_trace.py --device cpu --model gpt2-tiny --steps 1 --folder "$logs/bf16_trace" \
        --json "$results/bf16_trace-$commit-cpu.json"
    part training 200 python "$gpus" --device cpu --models bert-tiny --steps 1 --rounds 1 --json "$results/gpus-$commit-cpu.json"
    part kernels 100 python scripts/bench/fused_kernels.py --device cpu --numel 65536 --rounds 1 --json "$results/kernels-$commit.json"
else
    part bf16 240 python scripts/bench/bf16_trace.py --minutes 3.3 --folder "$logs/bf16_trace" \
        --json "$results/bf16_trace-$commit.json"
    part tests 170 python -m pytest -q -m gpu tests/engine/test_gpu.py tests/kernels/test_kernels.py
    part training 110 python "$gpus" --minutes 1.5 --json "$results/gpus-$commit-1.json"
    part training-bf16 70 python "$gpus" --mixed-precision bf16 --models gpt2 --minutes 0.9 --json "$results/gpus-$commit-bf16.json"
    part forecast 80 python scripts/bench/planned_peaks.py --device cuda --ranks 1 --models gpt2 bert llama t5 \
        --set-ups 2 "3, bf16" --batches 8x128 --json "$results/planned_peaks-$commit-gpu.json"
    part kernels 60 python scripts/bench/fused_kernels.py --json "$results/kernels-$commit.json"
    part offload 90 python scripts/bench/offload.py --minutes 1.2 --nvme-path outputs/nvme --json "$results/offload-$commit.json"
    if [[ "${NCCL_MULTI_RANK_GPU_ENABLE:-0}" == 1 ]]; then
        part ranks 90 bash scripts/bench/multi_gpu.sh 2 --models gpt2 --steps 2 --rounds 1 --minutes 1.2 \
            --ways FSDP2 "stage 0" "stage 1" "stage 2" "stage 3" "stage 2, torch's steps" "stage 3, bf16 parameters" \
            --json "$results/gpus-$commit-2.json"
    fi
fi
if [[ -n "${left// /}" ]]; then
    echo "gpu_day.sh: no part is called$left; parts here:$names." >&2
    exit 2
fi
echo "== summary of commit $commit"
printf '%s\n' "${summary[@]}"
[[ ! "${summary[*]}" == *FAILED* ]]
