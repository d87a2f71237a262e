"""Trainer scripts that know nothing of hf_zero: `trainers.py KIND --losses FILE`, and training arguments."""

import gc
import json
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch
from sizes import data, tiny_bert
from transformers import (
    HfArgumentParser,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)


class SmoothedTrainer(Trainer):
    """Of a kind that projects write: a constructor, a loss and a hook of their own."""

    def __init__(self, *args, smoothing: float, **kwargs):
        super().__init__(*args, **kwargs)
        self.smoothing = smoothing

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(input_ids=inputs["input_ids"])
        loss = torch.nn.functional.cross_entropy(outputs.logits, inputs["labels"], label_smoothing=self.smoothing)
        return (loss, outputs) if return_outputs else loss


@dataclass
class ScriptArguments:
    kind: str = field(default="trainer")
    losses: str = field(default="losses.json")


def tiny_t5() -> T5ForConditionalGeneration:
    size = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(vocab_size=60, decoder_start_token_id=0, pad_token_id=0, **size))


class EndOfTrials(TrainerCallback):
    """Notes the losses of each trial of a search, and what the process holds at its end."""

    def __init__(self):
        self.losses: list[list[float]] = []
        self.held: list[tuple[int, int]] = []

    def on_train_end(self, args, state, control, **kwargs):
        self.losses.append([entry["loss"] for entry in state.log_history if "loss" in entry])
        gc.collect()
        process = psutil.Process()
        self.held.append((process.num_fds(), process.num_threads()))


def search(script: ScriptArguments, args: TrainingArguments, rows: list) -> None:
    import optuna

    trials = EndOfTrials()
    args.eval_strategy, args.save_strategy = "epoch", "no"
    trainer = Trainer(model_init=tiny_bert, args=args, train_dataset=rows, eval_dataset=rows, callbacks=[trials])
    trainer.hyperparameter_search(
        lambda trial: {"learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-2)},
        n_trials=6,
        backend="optuna",
        sampler=optuna.samplers.RandomSampler(seed=1),
    )
    # Caches fill in the first trials.
    assert len(set(trials.held[2:])) == 1, trials.held
    if trainer.is_world_process_zero():
        Path(script.losses).write_text(json.dumps(trials.losses))


def main() -> None:
    script, args = HfArgumentParser((ScriptArguments, Seq2SeqTrainingArguments)).parse_args_into_dataclasses()
    set_seed(args.seed)
    rows = data(48)
    if script.kind == "seq2seq":
        pairs = [{"input_ids": row["input_ids"], "labels": row["input_ids"].flip(0)} for row in rows]
        trainer = Seq2SeqTrainer(model=tiny_t5(), args=args, train_dataset=pairs)
    elif script.kind == "search":
        search(script, args, rows)
        return
    elif script.kind == "subclass":
        trainer = SmoothedTrainer(model=tiny_bert(), args=args, train_dataset=rows, smoothing=0.1)
    else:
        plain = TrainingArguments(output_dir=args.output_dir, max_steps=args.max_steps, logging_steps=1, report_to=[])
        plain.max_grad_norm = args.max_grad_norm
        trainer = Trainer(model=tiny_bert(), args=plain, train_dataset=rows)
    trainer.train()
    trainer.save_model()
    if trainer.is_world_process_zero():
        logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        Path(script.losses).write_text(json.dumps(logged))


if __name__ == "__main__":
    main()
