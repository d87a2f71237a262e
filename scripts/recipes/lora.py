"""Fine-tune Qwen3-8B with LoRA on two consumer cards of 16 GB, with TRL's SFTTrainer and PEFT.

pip install trl peft
hf-zero run --zero 3 scripts/recipes/lora.py --small  # a tiny random model on two CPU ranks
hf-zero run --zero 3 scripts/recipes/lora.py          # Qwen3-8B on Capybara, on all GPUs
"""

import argparse

from datasets import load_dataset
from peft import LoraConfig
from transformers import set_seed
from trl import SFTConfig, SFTTrainer

parser = argparse.ArgumentParser()
parser.add_argument("--small", action="store_true", help="a tiny random model and made-up samples, no network")
is_small = parser.parse_args().small

set_seed(0)
if is_small:
    import small

    name, data = small.model("qwen3"), small.chats()
else:
    name, data = "Qwen/Qwen3-8B", load_dataset("trl-lib/Capybara", split="train")

args = SFTConfig(
    output_dir="outputs/lora",
    max_steps=20 if is_small else -1,
    num_train_epochs=1,
    per_device_train_batch_size=8 if is_small else 1,
    gradient_accumulation_steps=1 if is_small else 8,
    learning_rate=3e-2 if is_small else 2e-4,
    max_length=64 if is_small else 1024,
    bf16=not is_small,
    gradient_checkpointing=not is_small,
    logging_steps=5 if is_small else 10,
)
adapter = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
trainer = SFTTrainer(model=name, args=args, train_dataset=data, peft_config=adapter)
trainer.train()
trainer.save_model()  # the adapter in outputs/lora, at any stage
