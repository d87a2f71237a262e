"""A resumed Trainer keeps the number of samples per step and the data position, on any number of ranks."""

import sys
from pathlib import Path

from transformers import Trainer

from .data_position import DataPosition
from .global_batch import Batch, same_global_batch


class RowsOfAStep:
    """Computes the number of samples per step of one Trainer, and the data position.

    Attributes:
        steps_in_epoch: micro-batches of one rank in a pass over the data; set when training begins.
    """

    def __init__(self, trainer: Trainer):
        self._trainer = trainer
        self._former: DataPosition | None = None
        self.steps_in_epoch = 0

    def go_on_from(self, checkpoint: str) -> None:
        """Sets accumulation, and the micro-batch size if necessary, for as many samples per step as the checkpoint's run.

        Raises:
            CheckpointError: the checkpoint's data position file is damaged.
            ValueError: a step has fewer samples than there are ranks.
        """
        self._former = DataPosition.read(Path(checkpoint))
        if self._former is None:
            self._say(f"{checkpoint} does not record the rows of a step, so the training arguments set them.")
            return
        args, now, wanted = self._trainer.args, self._batch, self._former.global_rows
        if now.global_rows == wanted:
            return
        batch = same_global_batch(wanted, rows=now.rows, world_size=now.world_size)
        args.gradient_accumulation_steps = batch.accumulation
        # Divided, because `train_batch_size` multiplies by the GPUs of this process again.
        args.per_device_train_batch_size = batch.rows // max(1, args.n_gpu)
        self._trainer._train_batch_size = args.train_batch_size
        if batch.global_rows == wanted:
            self._say(
                f"a step keeps its {wanted} rows from before the restart: {batch}. The training arguments would give {now}."
            )
        else:
            self._say(
                f"a step had {wanted} rows, which {batch.world_size} ranks cannot share evenly: from now on it has {batch}. "
                "Learning rate and schedule are unchanged, and continue by steps."
            )

    def skipped_batches(self, epochs: int, batches: int) -> tuple[int, int]:
        """Returns the passes over the data, and a rank's micro-batches of the next pass, trained before the checkpoint.

        Args:
            epochs, batches: Trainer's own values, computed with the present step size.
        """
        former, now = self._former, self._batch
        if former is None or former.global_rows == now.global_rows or self._trainer.args.ignore_data_skip:
            return epochs, batches
        steps, again = divmod(former.rows, now.global_rows)
        if again:
            self._say(f"steps have a different size now: {again} rows from before the checkpoint are trained on again.")
        return former.epoch, steps * now.accumulation

    def position(self) -> DataPosition:
        """Returns the data position after a step."""
        done = self._trainer.state.epoch or 0.0
        # Rounded, because Trainer's epoch is a floating-point quotient and may be slightly below a whole batch.
        batches = round(done * self.steps_in_epoch)
        epoch, batches = divmod(batches, max(1, self.steps_in_epoch))
        # Keep the original number of samples: a restart on ranks that cannot share them evenly must not pass on its own
        # number.
        wanted = self._batch.global_rows if self._former is None else self._former.global_rows
        return DataPosition(global_rows=wanted, epoch=epoch, rows=batches * self._batch.rows_of_a_round)

    @property
    def _batch(self) -> Batch:
        args, trainer = self._trainer.args, self._trainer
        in_all = trainer.get_total_train_batch_size(args)
        # From the Trainer, because the arguments do not follow `auto_find_batch_size`.
        rows, accumulation = trainer._train_batch_size, args.gradient_accumulation_steps
        # With split batches, each batch is dealt to all ranks, so the number of ranks does not matter.
        ranks = 1 if args.accelerator_config.split_batches else in_all // (rows * accumulation)
        return Batch(rows=rows, accumulation=accumulation, world_size=ranks)

    def _say(self, what: str) -> None:
        if self._trainer.is_world_process_zero():
            print(f"hf_zero: {what}", file=sys.stderr, flush=True)
