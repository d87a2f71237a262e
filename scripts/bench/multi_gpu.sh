#!/usr/bin/env bash
# For a machine with 2-8 GPUs: BERT and GPT-2 from models in host memory, through accelerate and NCCL, at stages 0-3 and in
# every tier, beside DDP and FSDP2: the losses, the time of a step, how much of communication is hidden, memory.
#
#     bash scripts/bench/multi_gpu.sh              # all GPUs
#     bash scripts/bench/multi_gpu.sh 2            # two
#     bash scripts/bench/multi_gpu.sh 2 --device cpu --models bert-tiny --steps 2      # does it run?
#
# About ten minutes. The figures are kept in scripts/bench/results/. Ends with status 1 where losses are off or a way fails.
set -euo pipefail
cd "$(dirname "$0")/../.."
ranks="${1:-$(python -c 'import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)')}"
shift || true
if (( ranks < 2 )); then
    echo "skipped: $ranks GPUs here; scripts/gpu_day.sh is for one"
    exit 0
fi
exec timeout --kill-after=30 1200 python -m torch.distributed.run --standalone --nproc-per-node "$ranks" scripts/bench/gpus.py "$@"
