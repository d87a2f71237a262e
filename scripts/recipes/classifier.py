"""Fine-tune BERT to classify texts, with transformers' Trainer.

hf-zero run --zero 2 scripts/recipes/classifier.py --small  # a tiny random model on two CPU ranks
hf-zero run --zero 2 scripts/recipes/classifier.py          # BERT-base on IMDb, on all GPUs
"""

import argparse

from datasets import load_dataset
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
    set_seed,
)

parser = argparse.ArgumentParser()
parser.add_argument("--small", action="store_true", help="a tiny random model and made-up samples, no network")
is_small = parser.parse_args().small

set_seed(0)
if is_small:
    import small

    name, data = small.model("bert"), small.reviews()
else:
    name, data = "google-bert/bert-base-uncased", load_dataset("stanfordnlp/imdb")

args = TrainingArguments(
    output_dir="outputs/classifier",
    max_steps=20 if is_small else -1,
    num_train_epochs=2,
    per_device_train_batch_size=8 if is_small else 16,
    learning_rate=1e-2 if is_small else 2e-5,
    bf16=not is_small,
    logging_steps=5 if is_small else 100,
)
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForSequenceClassification.from_pretrained(name, num_labels=2)


def tokenize(batch):
    return tokenizer(batch["text"], truncation=True, max_length=512)


def accuracy(prediction):
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


with args.main_process_first(desc="tokenizing"):
    train, test = (data[split].map(tokenize, batched=True) for split in ("train", "test"))

trainer = Trainer(
    model=model,
    args=args,
    train_dataset=train,
    eval_dataset=test,
    processing_class=tokenizer,
    data_collator=DataCollatorWithPadding(tokenizer),
    compute_metrics=accuracy,
)
# The head averages over its own batch. Without this line, Trainer multiplies loss and gradients by the number of ranks.
trainer.model_accepts_loss_kwargs = False
trainer.train()
trainer.log_metrics("eval", trainer.evaluate())
trainer.save_model()  # the whole model in outputs/classifier, at any stage
