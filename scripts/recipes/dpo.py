"""Align Qwen3-0.6B with preferences (DPO), with TRL's DPOTrainer.

pip install trl
hf-zero run --zero 2 scripts/recipes/dpo.py --small  # a tiny random model on two CPU ranks
hf-zero run --zero 2 scripts/recipes/dpo.py          # Qwen3-0.6B on UltraFeedback, on all GPUs
"""

import argparse

from datasets import load_dataset
from transformers import set_seed
from trl import DPOConfig, DPOTrainer

parser = argparse.ArgumentParser()
parser.add_argument("--small", action="store_true", help="a tiny random model and made-up samples, no network")
is_small = parser.parse_args().small

set_seed(0)
if is_small:
    import small

    name, data = small.model("qwen3"), small.preferences()
else:
    name, data = "Qwen/Qwen3-0.6B", load_dataset("trl-lib/ultrafeedback_binarized", split="train")

args = DPOConfig(
    output_dir="outputs/dpo",
    max_steps=20 if is_small else -1,
    num_train_epochs=1,
    per_device_train_batch_size=8 if is_small else 2,
    gradient_accumulation_steps=1 if is_small else 8,
    learning_rate=1e-3 if is_small else 1e-6,
    max_length=64 if is_small else 1024,
    bf16=not is_small,
    gradient_checkpointing=not is_small,
    logging_steps=5 if is_small else 10,
)
# Without a `ref_model`, TRL loads the model a second time as the reference.
trainer = DPOTrainer(model=name, args=args, train_dataset=data)
trainer.train()
trainer.save_model()  # the whole model in outputs/dpo, at any stage
