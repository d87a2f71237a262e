"""Trainer's checkpoints in the nodes' memory, every few steps (`checkpoint.replicate`)."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from transformers import Trainer, logging

from ...checkpoint.folder.disks import Disk
from ...checkpoint.format.manifest import CheckpointError
from ...checkpoint.verify import newest_first, step_of
from ...comm.all_or_none import Exchange
from ...config import ConfigError
from ...engine.engine import ZeroEngine
from ..checkpoints.placed_weights import Layout, ShardedLayout, WeightsPlan
from ..elastic.data_position import DataPosition
from ..elastic.exchange import exchange_between_ranks
from ..elastic.node_memory import GENERATIONS, NodeMemory
from .checkpoints import CheckpointSaver

logger = logging.get_logger(__name__)


class MemorySaver(CheckpointSaver):
    """Saves into the nodes' memory, behind training, what CheckpointSaver saves on a disk. Made on all ranks."""

    keeps_for_users = False

    def __init__(self, trainer: Trainer, engine: ZeroEngine, stock_save: Callable, memory: NodeMemory):
        super().__init__(trainer, engine, stock_save)
        self._memory = memory
        self._last_step = 0
        if not self._is_placed:
            raise ConfigError(
                "hf_zero: `checkpoint.replicate: neighbour` keeps each rank's part of the model, and this one is saved whole "
                "(adapters, or a Trainer with a save_model of its own). Leave `checkpoint.replicate` at none."
            )

    def save_if_due(self, position: DataPosition) -> None:
        """Saves at the steps that `checkpoint.replicate_every` says, once at each. Collective then."""
        step = self._trainer.state.global_step
        if step % self.engine.config.checkpoint.replicate_every == 0 and step != self._last_step:
            self._last_step = step
            self.save(None, position)

    def _run_folder(self, trial: object) -> Path:
        return self._memory.folder

    def _is_async(self, *, is_awaited: bool) -> bool:
        return True

    def _is_full(self, run_folder: Path) -> bool:
        return False

    def _layout(self, disk: Disk, *, is_full: bool) -> Layout:
        return ShardedLayout()

    def _plan_model(self, layout: Layout, temporary: Path, disk: Disk) -> WeightsPlan:
        plan = layout.plan(self._trainer, self.engine, temporary, disk, self.engine.transport.exchange)
        if plan is None:
            raise CheckpointError(
                "hf_zero: the model's tensors are put together when it is saved, so ranks keep no part of it"
            )
        return plan

    def _finish_folder(self, temporary: Path, exchange: Exchange) -> None:
        if self._memory.has_neighbours:
            self._memory.share(temporary, exchange)

    def _kept(self) -> int:
        return GENERATIONS

    @contextmanager
    def _on_failure(self) -> Iterator[None]:
        try:
            yield
        except CheckpointError as error:
            logger.warning(f"{error} Shards of this step are not in a neighbour's memory; training goes on.")


def open_memory(trainer: Trainer) -> NodeMemory | None:
    """The nodes' memory for this run, where settings ask for it. Collective."""
    if trainer.accelerator.zero_config.checkpoint.replicate == "none":
        return None
    memory = NodeMemory(Path(trainer.args.output_dir), exchange_between_ranks, trainer.args.process_index)
    if not memory.has_neighbours and trainer.is_world_process_zero():
        print(
            "hf_zero: all ranks are on one node: its memory keeps their shards over a restart of the workers, and no neighbour "
            "has them.",
            file=sys.stderr,
        )
    return memory


def newest_in_memory(trainer: Trainer, memory: NodeMemory) -> str | None:
    """The newest generation, gathered on each node, unless the disk has a later checkpoint. Collective."""
    step = memory.newest()
    on_disk = max(exchange_between_ranks(max(map(step_of, newest_first(Path(trainer.args.output_dir))), default=0)))
    if step is None or step < on_disk:
        return None
    try:
        return str(memory.gathered(step))
    except CheckpointError as error:
        logger.warning(f"{error} Resuming from the disk.")
        return None
