"""What elastic.py trains: a small GPT-2 by Trainer, each rank with a log of the rows and the loss of each micro-batch.

torchrun ... scripts/bench/elastic_train.py --rows_log LOG --output_dir OUT --zero 2 ...
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainerCallback

from hf_zero import ZeroTrainingArguments

ROWS = 480
VOCABULARY = 500
LENGTH = 32


@dataclass
class OwnArguments:
    """What is said of this script alone."""

    rows_log: str = field(metadata={"help": "A folder, in which each rank of each start writes a file."})
    step_s: float = field(default=0.0, metadata={"help": "Seconds that a step takes longer than it does."})
    width: int = field(default=64, metadata={"help": "Of the model."})


class LoggingTrainer(Trainer):
    """A Trainer that logs the rows and the loss of each micro-batch."""

    def __init__(self, *args: Any, log: Path, step_s: float, **kwargs: Any):
        super().__init__(*args, **kwargs)
        log.mkdir(parents=True, exist_ok=True)
        rank, world = self.args.process_index, self.args.world_size
        self._log = (log / f"{time.time_ns()}-{rank}-of-{world}.jsonl").open("w", buffering=1)
        self._say(rank=rank, world_size=world, restarts=os.environ.get("TORCHELASTIC_RESTART_COUNT"))
        self.add_callback(_Pause(step_s))
        self._first: dict[str, float] = {}

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self._began is not None:
            seconds, read = time.perf_counter() - self._began, bytes_from_disk() - self._read_before
            self._first, self._began = {"ready_s": round(seconds, 3), "disk_bytes": read}, None
        return super().training_step(*args, **kwargs)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        self._began: float | None = time.perf_counter()
        self._read_before = bytes_from_disk()
        return super().train(*args, **kwargs)

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        rows = inputs.pop("row").tolist()
        answer = super().compute_loss(model, inputs, *args, **kwargs)
        loss = answer[0] if isinstance(answer, tuple) else answer
        self._say(step=self.state.global_step, rows=rows, loss=loss.item().hex(), at=time.time(), **self._first)
        self._first = {}
        return answer

    def _say(self, **said: Any) -> None:
        self._log.write(json.dumps(said) + "\n")


def bytes_from_disk() -> int:
    """What this process has had the disk read for it."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes:"))


class _Pause(TrainerCallback):
    def __init__(self, seconds: float):
        self._seconds = seconds

    def on_step_end(self, *_args: Any, **_kwargs: Any) -> None:
        time.sleep(self._seconds)


def main() -> None:
    own, args = HfArgumentParser((OwnArguments, ZeroTrainingArguments)).parse_args_into_dataclasses()
    args.remove_unused_columns = False
    torch.manual_seed(0)
    sizes = {"n_embd": own.width, "n_layer": 2, "n_head": 2, "n_positions": LENGTH, "vocab_size": VOCABULARY}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    tokens = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    rows = [{"input_ids": ids, "labels": ids, "row": number} for number, ids in enumerate(tokens)]
    trainer = LoggingTrainer(model=model, args=args, train_dataset=rows, log=Path(own.rows_log), step_s=own.step_s)
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)


if __name__ == "__main__":
    main()
