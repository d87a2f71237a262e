"""Fine-tune GPT-2 or Llama on prompts and completions, with TRL's SFTTrainer.

pip install trl
hf-zero run --zero 2 scripts/recipes/sft.py --small  # a tiny random GPT-2 on two CPU ranks
hf-zero run --zero 2 scripts/recipes/sft.py          # GPT-2 on TL;DR, on all GPUs
hf-zero run --zero 3 scripts/recipes/sft.py --model meta-llama/Llama-3.2-1B
"""

import argparse

from datasets import load_dataset
from transformers import set_seed
from trl import SFTConfig, SFTTrainer

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="openai-community/gpt2", help="a causal language model of the Hub, or a folder")
parser.add_argument("--small", action="store_true", help="a tiny random model and made-up samples, no network")
options = parser.parse_args()
is_small = options.small

set_seed(0)
if is_small:
    import small

    name, data = small.model("llama" if "llama" in options.model.lower() else "gpt2"), small.completions()
else:
    name, data = options.model, load_dataset("trl-lib/tldr", split="train")

args = SFTConfig(
    output_dir="outputs/sft",
    max_steps=20 if is_small else -1,
    num_train_epochs=1,
    per_device_train_batch_size=8,
    learning_rate=1e-2 if is_small else 2e-5,
    max_length=64 if is_small else 1024,
    bf16=not is_small,
    gradient_checkpointing=not is_small,
    logging_steps=5 if is_small else 50,
)
trainer = SFTTrainer(model=name, args=args, train_dataset=data)
trainer.train()
trainer.save_model()  # the whole model in outputs/sft, at any stage
