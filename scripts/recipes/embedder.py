"""Train an embedding model on ModernBERT, with sentence-transformers.

pip install "sentence-transformers[train]"
hf-zero run --zero 2 scripts/recipes/embedder.py --small  # a tiny random model on two CPU ranks
hf-zero run --zero 2 scripts/recipes/embedder.py          # ModernBERT-base on all-nli, on all GPUs
"""

import argparse

from datasets import load_dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer.losses import MatryoshkaLoss, MultipleNegativesRankingLoss
from transformers import set_seed

parser = argparse.ArgumentParser()
parser.add_argument("--small", action="store_true", help="a tiny random model and made-up samples, no network")
is_small = parser.parse_args().small

set_seed(0)
if is_small:
    import small

    name, data = small.model("modernbert"), small.triplets()
    dimensions = [32, 16, 8]
else:
    name = "answerdotai/ModernBERT-base"
    data = load_dataset("sentence-transformers/all-nli", "triplet", split="train")
    dimensions = [768, 512, 256, 128, 64]

model = SentenceTransformer(name)
# The negatives of all ranks, and embeddings that can be cut to each of these lengths.
loss = MatryoshkaLoss(model, MultipleNegativesRankingLoss(model, gather_across_devices=True), dimensions)
args = SentenceTransformerTrainingArguments(
    output_dir="outputs/embedder",
    max_steps=20 if is_small else -1,
    num_train_epochs=1,
    per_device_train_batch_size=8 if is_small else 128,
    learning_rate=1e-2 if is_small else 8e-5,
    warmup_steps=0 if is_small else 200,
    bf16=not is_small,
    batch_sampler="no_duplicates",
    logging_steps=5 if is_small else 100,
)
trainer = SentenceTransformerTrainer(model=model, args=args, train_dataset=data, loss=loss)
trainer.train()
trainer.save_model()  # the whole model in outputs/embedder, at any stage
