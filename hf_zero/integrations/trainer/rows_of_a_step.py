"""A resumed Trainer takes as many rows a step as before, from where it stood in its data, on whatever number of ranks."""

import sys
from pathlib import Path

from transformers import Trainer

from ..elastic.data_position import DataPosition
from ..elastic.global_batch import Batch, same_global_batch


class RowsOfAStep:
    """How many rows one Trainer's steps take, and which come next.

    Attributes:
        steps_in_epoch: micro-batches of a rank in a pass over the data; set when training begins.
    """

    def __init__(self, trainer: Trainer):
        self._trainer = trainer
        self._former: DataPosition | None = None
        self.steps_in_epoch = 0

    def go_on_from(self, checkpoint: str) -> None:
        """Sets accumulation, and the micro-batch where need be, so that steps take the rows that the checkpoint's took.

        Raises:
            CheckpointError: the checkpoint's file about that is damaged.
            ValueError: a step has fewer rows than there are ranks.
        """
        self._former = DataPosition.read(Path(checkpoint))
        if self._former is None:
            self._say(f"{checkpoint} does not say how many rows a step took, so the training arguments do.")
            return
        args, now, wanted = self._trainer.args, self._batch, self._former.global_rows
        if now.global_rows == wanted:
            return
        batch = same_global_batch(wanted, rows=now.rows, world_size=now.world_size)
        args.gradient_accumulation_steps = batch.accumulation
        args.per_device_train_batch_size = batch.rows // max(1, args.n_gpu)
        self._trainer._train_batch_size = args.train_batch_size
        if batch.global_rows == wanted:
            self._say(
                f"a step takes {wanted} rows as before the restart: {batch}. By the training arguments it were {now}."
            )
        else:
            self._say(
                f"a step took {wanted} rows, which {batch.world_size} ranks cannot share evenly: from here it takes {batch}. "
                "Learning rate and schedule go on by steps, as they are."
            )

    def skipped_batches(self, epochs: int, batches: int) -> tuple[int, int]:
        """Whole passes over the data, and a rank's micro-batches of the next, that were trained on before the checkpoint.

        Args:
            epochs, batches: that Trainer comes to, which counts steps of the present size.
        """
        former, now = self._former, self._batch
        if former is None or former.global_rows == now.global_rows or self._trainer.args.ignore_data_skip:
            return epochs, batches
        steps, again = divmod(former.rows, now.global_rows)
        if again:
            self._say(f"steps have another size now: {again} rows before the checkpoint are trained on once more.")
        return former.epoch, steps * now.accumulation

    def position(self) -> DataPosition:
        """Where training stands after a step."""
        done = self._trainer.state.epoch or 0.0
        batches = round(done * self.steps_in_epoch)
        epoch, batches = divmod(batches, max(1, self.steps_in_epoch))
        wanted = self._batch.global_rows if self._former is None else self._former.global_rows
        return DataPosition(global_rows=wanted, epoch=epoch, rows=batches * self._batch.rows_of_a_round)

    @property
    def _batch(self) -> Batch:
        args, trainer = self._trainer.args, self._trainer
        in_all = trainer.get_total_train_batch_size(args)
        # Not by the arguments, which do not follow `auto_find_batch_size`.
        rows, accumulation = trainer._train_batch_size, args.gradient_accumulation_steps
        # With split batches a batch is dealt to all ranks, however many they are.
        ranks = 1 if args.accelerator_config.split_batches else in_all // (rows * accumulation)
        return Batch(rows=rows, accumulation=accumulation, world_size=ranks)

    def _say(self, what: str) -> None:
        if self._trainer.is_world_process_zero():
            print(f"hf_zero: {what}", file=sys.stderr, flush=True)
