"""Train Qwen2.5-0.5B-Instruct with a reward function (GRPO), with TRL's GRPOTrainer.

pip install trl
hf-zero run --zero 2 scripts/recipes/grpo.py --small  # a tiny random model on two CPU ranks
hf-zero run --zero 2 scripts/recipes/grpo.py          # Qwen2.5-0.5B-Instruct on TL;DR, on all GPUs
"""

import argparse

from datasets import load_dataset
from transformers import set_seed
from trl import GRPOConfig, GRPOTrainer

parser = argparse.ArgumentParser()
parser.add_argument("--small", action="store_true", help="a tiny random model and made-up samples, no network")
is_small = parser.parse_args().small

set_seed(0)
if is_small:
    import small

    name, data = small.model("qwen3"), small.prompts()
else:
    name = "Qwen/Qwen2.5-0.5B-Instruct"
    data = load_dataset("trl-lib/tldr", split="train").remove_columns("completion")


words_wanted = 8 if is_small else 30


def near_length(completions, **kwargs):
    """The reward: the nearer a completion is to a number of words, the better. Put your own reward here."""
    return [-abs(words_wanted - len(text.split())) for text in completions]


args = GRPOConfig(
    output_dir="outputs/grpo",
    max_steps=20 if is_small else -1,
    num_train_epochs=1,
    per_device_train_batch_size=8,
    num_generations=8,
    max_completion_length=16 if is_small else 256,
    learning_rate=2e-2 if is_small else 1e-6,
    bf16=not is_small,
    gradient_checkpointing=not is_small,
    logging_steps=5 if is_small else 10,
)
trainer = GRPOTrainer(model=name, args=args, train_dataset=data, reward_funcs=near_length)
trainer.train()
trainer.save_model()  # the whole model in outputs/grpo, at any stage
