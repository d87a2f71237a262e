"""Train a reranker (a cross-encoder) on ModernBERT, with sentence-transformers.

pip install "sentence-transformers[train]"
hf-zero run --zero 2 scripts/recipes/reranker.py --small  # a tiny random model on two CPU ranks
hf-zero run --zero 2 scripts/recipes/reranker.py          # ModernBERT-base on GooAQ, on all GPUs
"""

import argparse

from datasets import load_dataset
from sentence_transformers import CrossEncoder, CrossEncoderTrainer, CrossEncoderTrainingArguments
from sentence_transformers.cross_encoder.losses import MultipleNegativesRankingLoss
from transformers import set_seed

parser = argparse.ArgumentParser()
parser.add_argument("--small", action="store_true", help="a tiny random model and made-up samples, no network")
is_small = parser.parse_args().small

set_seed(0)
if is_small:
    import small

    name, data = small.model("modernbert"), small.answers()
else:
    name = "answerdotai/ModernBERT-base"
    data = load_dataset("sentence-transformers/gooaq", split="train").select(range(200_000))

model = CrossEncoder(name, num_labels=1)
# Each question is scored with its answer and with four answers of other questions in the batch.
loss = MultipleNegativesRankingLoss(model, num_negatives=4)
args = CrossEncoderTrainingArguments(
    output_dir="outputs/reranker",
    max_steps=40 if is_small else -1,
    num_train_epochs=1,
    per_device_train_batch_size=8 if is_small else 16,
    learning_rate=1e-2 if is_small else 2e-5,
    warmup_steps=0 if is_small else 200,
    bf16=not is_small,
    batch_sampler="no_duplicates",
    logging_steps=10 if is_small else 100,
    ddp_find_unused_parameters=False,  # Only DDP needs this: its default fails with cross-encoders.
)
trainer = CrossEncoderTrainer(model=model, args=args, train_dataset=data, loss=loss)
trainer.train()
trainer.save_model()  # the whole model in outputs/reranker, at any stage
