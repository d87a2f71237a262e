#!/usr/bin/env bash
# Installs the package, trains BERT under ZeRO-2 on text this machine has, and classifies a sentence with the result.
# On all GPUs, or without any on two processes on the CPU: under five minutes, most of them for the installation.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/venv.sh
export TOKENIZERS_PARALLELISM=false

gpus="$(python -c 'import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)')"
case "$gpus" in
    0) launch=(--config_file configs/accelerate/cpu2.yaml) ;;
    1) launch=(--config_file configs/accelerate/one_gpu.yaml) ;;
    *) launch=(--config_file configs/accelerate/eight_gpus.yaml --num_processes "$gpus") ;;
esac
[[ "$gpus" != 0 ]] || export ACCELERATE_USE_CPU=true

output="outputs/quickstart"
accelerate launch "${launch[@]}" scripts/finetune_bert.py --zero configs/zero2.yaml \
    --max_seq_length 64 --output_dir "$output"

echo "Reloading the model from $output"
python scripts/classify.py "$output" "Emit a record by sending it to the handlers of this logger."
