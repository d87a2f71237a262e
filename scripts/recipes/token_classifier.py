"""Fine-tune BERT to find names of persons, places and organizations (NER), with transformers' Trainer.

hf-zero run --zero 2 scripts/recipes/token_classifier.py --small  # a tiny random model on two CPU ranks
hf-zero run --zero 2 scripts/recipes/token_classifier.py          # BERT-base on CoNLL-2003, on all GPUs
"""

import argparse

from datasets import load_dataset
from transformers import (
    AutoModelForTokenClassification,
    AutoTokenizer,
    DataCollatorForTokenClassification,
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

    name, data = small.model("bert"), small.entities()
else:
    name = "google-bert/bert-base-cased"
    data = load_dataset("eriktks/conll2003", revision="refs/convert/parquet")

args = TrainingArguments(
    output_dir="outputs/token_classifier",
    max_steps=20 if is_small else -1,
    num_train_epochs=3,
    per_device_train_batch_size=8 if is_small else 16,
    learning_rate=1e-2 if is_small else 3e-5,
    bf16=not is_small,
    logging_steps=5 if is_small else 100,
)
tags = data["train"].features["ner_tags"].feature.names
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForTokenClassification.from_pretrained(
    name, id2label=dict(enumerate(tags)), label2id={tag: i for i, tag in enumerate(tags)}
)


def tokenize(batch):
    """Tokens of the model; the first token of a word has the word's tag, the others and [CLS] and [SEP] have none."""
    encoded = tokenizer(batch["tokens"], is_split_into_words=True, truncation=True, max_length=256)
    encoded["labels"] = []
    for i, word_tags in enumerate(batch["ner_tags"]):
        words = encoded.word_ids(i)
        is_first = [word is not None and word != before for word, before in zip(words, [None, *words])]
        encoded["labels"].append([word_tags[word] if first else -100 for word, first in zip(words, is_first)])
    return encoded


def accuracy(prediction):
    """The share of words outside of "O" with the right tag."""
    is_name = prediction.label_ids > 0
    return {"name_accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids)[is_name].mean())}


with args.main_process_first(desc="tokenizing"):
    columns = data["train"].column_names
    train, test = (data[split].map(tokenize, batched=True, remove_columns=columns) for split in ("train", "validation"))

trainer = Trainer(
    model=model,
    args=args,
    train_dataset=train,
    eval_dataset=test,
    processing_class=tokenizer,
    data_collator=DataCollatorForTokenClassification(tokenizer),
    compute_metrics=accuracy,
)
# The head averages over its own batch. Without this line, Trainer multiplies loss and gradients by the number of ranks.
trainer.model_accepts_loss_kwargs = False
trainer.train()
trainer.log_metrics("eval", trainer.evaluate())
trainer.save_model()  # the whole model in outputs/token_classifier, at any stage
