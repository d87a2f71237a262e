"""A Trainer run with DDP or the engine, for tests that start ranks themselves, and as a script for `accelerate launch`."""

import json
import logging
import os
import sys
from pathlib import Path

import torch
from training import bert, bert_batch, gpt2, gpt2_batch, llama
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainingArguments

from hf_zero import ZeroCallback, ZeroTrainingArguments

# transformers 5.23 renamed the argument.
CHECKPOINTING = next(
    name
    for name in ("activation_checkpointing", "gradient_checkpointing")
    if name in TrainingArguments.__dataclass_fields__
)
MODELS = {"bert": (bert, bert_batch), "gpt2": (gpt2, gpt2_batch), "llama": (llama, gpt2_batch)}


def as_launched(rank: int, world_size: int, *, forecasts: bool = False) -> None:
    """Sets the variables of a launcher, for ranks already started and connected by a test.

    Args:
        forecasts: forecast memory at the start. For this a model is traced, which takes as long as ten steps.
    """
    logging.getLogger("hf_zero").setLevel(logging.INFO if forecasts else logging.NOTSET)
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ.update({name: str(value) for name, value in places.items()})
    os.environ["OMP_NUM_THREADS"] = "1"
    # The group is connected already; accelerate only requires an address. Under a launcher, the address is the run's: two runs
    # with one port would use the same store.
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "ACCELERATE_USE_CPU": "true"}.items():
        os.environ.setdefault(name, value)


def make_trainer(
    door: str, model: str, output_dir: str | Path, seed: int = 0, dropout: float = 0.1, **overrides
) -> Trainer:
    """Makes a Trainer for `door`: "ddp", "flag 2", "callback 1", "both 2" or "seq2seq 2".

    Overrides are training arguments. `callbacks` and `compute_metrics` are passed to the Trainer, a `trainer_class`, and `adapt`
    is called with the model.
    """
    kind, _, stage = door.partition(" ")
    make_model, make_batch = MODELS[model]
    torch.manual_seed(seed)
    built = overrides.pop("adapt", lambda model: model)(make_model(dropout=dropout))
    generator = torch.Generator().manual_seed(5)
    data = [{key: value[0] for key, value in make_batch(generator, 1).items()} for _ in range(240)]
    passed = {name: overrides.pop(name) for name in ("compute_metrics",) if name in overrides}
    callbacks = list(overrides.pop("callbacks", []))
    trainer_class = overrides.pop("trainer_class", Seq2SeqTrainer if kind == "seq2seq" else Trainer)
    settings = {
        "output_dir": str(output_dir),
        "per_device_train_batch_size": 4,
        "max_steps": 8,
        "logging_steps": 1,
        "warmup_steps": 5,
        "learning_rate": 1e-3,
        "max_grad_norm": 100.0,
        "use_cpu": not torch.cuda.is_available(),
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "no",
        "seed": 3,
        **overrides,
    }
    if kind in ("flag", "both"):
        arguments = ZeroTrainingArguments(zero=stage, **settings)
    elif kind == "seq2seq":
        arguments = Seq2SeqTrainingArguments(**settings)
    else:
        arguments = TrainingArguments(**settings)
    if kind in ("callback", "seq2seq"):
        callbacks.append(ZeroCallback(int(stage)))
    if kind == "both":
        callbacks.append(ZeroCallback())
    return trainer_class(
        model=built, args=arguments, train_dataset=data, eval_dataset=data[:24], callbacks=callbacks, **passed
    )


def history(trainer: Trainer) -> dict[str, list[float]]:
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {"losses": [entry["loss"] for entry in logged], "norms": [float(entry["grad_norm"]) for entry in logged]}


def run(
    rank: int,
    world_size: int,
    door: str,
    model: str,
    output_dir: str,
    resume: object = None,
    forecasts: bool = False,
    **overrides,
) -> dict:
    """Trains; returns losses and norms, log entries with a loss, the last entry, the state dict as lists, and class names."""
    as_launched(rank, world_size, forecasts=forecasts)
    trainer = make_trainer(door, model, output_dir, **overrides)
    trainer.train(resume_from_checkpoint=resume)
    if overrides.get("save_strategy", "no") == "no":
        trainer.save_model()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {
        **history(trainer),
        "log": logged[-1],
        "logged": logged,
        "state": {name: value.float().tolist() for name, value in trainer.model.state_dict().items()},
        "best": trainer.state.best_model_checkpoint,
        "classes": [type(trainer).__name__, type(trainer.accelerator).__mro__[1].__name__],
    }


if __name__ == "__main__":
    door, model, output_dir = sys.argv[1:4]
    world = int(os.environ.get("WORLD_SIZE", 1))
    outcome = run(
        int(os.environ.get("RANK", 0)), world, door, model, output_dir, **json.loads((sys.argv[4:] or ["{}"])[0])
    )
    if int(os.environ.get("RANK", 0)) == 0:
        Path(output_dir, "outcome.json").write_text(json.dumps(outcome))
