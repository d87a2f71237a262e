"""A plain loop saves and stops at the request for the next batch."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..checkpoint.commit import discard
from ..checkpoint.disks import find_disk
from ..config import AUTO, ConfigError
from ..config.zero import CheckpointConfig
from ..engine.engine import ZeroEngine
from ..hooks.weak import WeakHook
from .callers import trainer_in_callers
from .save_clock import SAVE_DUE
from .signals import StopSignals
from .state_folder import numbered_states


class LoopStop(StopSignals):
    """Saves and ends a loop written with accelerate.

    The stop waits until the loop asks for its next batch: by then it has stepped its schedule, counted, logged and evaluated.
    A loop without prepared data loaders stops at its next training forward.

    Raises:
        ConfigError: the settings name no folder in which the Accelerator would save.
    """

    def __init__(self, accelerator: Any):
        super().__init__()
        self._accelerator = accelerator
        asked = accelerator.zero_config.checkpoint.on_signal
        self._asked = AUTO if asked == "none" else asked
        self._with_batches = 0
        self._is_put_off = self._saves = False
        self._by_clock: Path | None = None
        self._refuse_folder()

    def _refuse_folder(self) -> None:
        names_itself = self._accelerator.project_configuration.automatic_checkpoint_naming
        if self._asked == AUTO and self._accelerator.project_dir is None:
            raise ConfigError(
                "hf_zero config: `checkpoint.on_signal: auto`, `every_minutes` and `budget` save in `checkpoints` of the "
                "Accelerator's project_dir, which is None. Pass project_dir to the Accelerator, or set on_signal to a folder: "
                "`runs/first/step_{step}`."
            )
        if self._asked != AUTO and names_itself:
            raise ConfigError(
                f"hf_zero config: `checkpoint.on_signal` is {self._asked}, but the Accelerator names its states itself "
                "(automatic_checkpoint_naming). Set `checkpoint.on_signal: auto`."
            )

    def follow(self, engine: ZeroEngine) -> None:
        """Announces signals to the other ranks in this engine's backward."""
        engine.stop_when(self.asked)
        engine.entry.register_forward_pre_hook(WeakHook(self, LoopStop._before_forward))

    def _before_forward(self, module: torch.nn.Module, _args: tuple) -> None:
        # Inside a batch of a followed loader, the stop waits for the end of the batch. Otherwise the script's work after its
        # step would be lost.
        if not self._with_batches and module.training and torch.is_grad_enabled():
            self.end_if_due()

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Active while the script uses a batch of a prepared data loader. If a stop is due, the run ends after the batch."""
        before = self._backwards()
        self._with_batches += 1
        try:
            yield
        finally:
            self._with_batches -= 1
        # A save needs all ranks. So save only after a backward, because one rank alone may run an evaluation loop inside the
        # training loop. The `finally` block does not save, because one rank alone may leave the loop or fail.
        if self._backwards() > before:
            self.end_if_due()

    @contextmanager
    def put_off(self) -> Iterator[None]:
        """Delays the stop while ranks without data join the steps of other ranks, so no rank ends early."""
        self._is_put_off = True
        try:
            yield
        finally:
            self._is_put_off = False
        self.end_if_due()

    def _backwards(self) -> int:
        return sum(engine.ended_backwards for engine in self._accelerator.zero_engines)

    def end_if_due(self) -> None:
        """Saves and ends if all ranks have agreed on a stop; collective in this case."""
        engines = self._accelerator.zero_engines
        number = max((engine.stop_due for engine in engines), default=0)
        if self.clock is not None:
            self.clock.end_pass()
        # Hooks of the save may run the model, which calls this method again.
        if not number or self.ends or self._saves or self._is_put_off:
            return
        for engine in engines:
            engine.drop_stop()
        if number == SAVE_DUE:
            self._save_by_time(engines[0])
            return
        self.end(engines[0], number, self._accelerator.zero_steps, partial(self._save, engines[0]))

    def _save_by_time(self, engine: ZeroEngine) -> None:
        """Saves, and removes the previous state if only the clock asked for the previous one."""
        former, self._saves = self._by_clock, True
        try:
            self._by_clock = self._save(engine)
        finally:
            self._saves = False
        automatic = self._accelerator.project_configuration.automatic_checkpoint_naming
        # With automatic naming, accelerate itself limits the number of checkpoints.
        if former is not None and former != self._by_clock and not automatic:
            discard_on_its_disk(former, engine)

    def _save(self, engine: ZeroEngine) -> Path:
        accelerator = self._accelerator
        naming = accelerator.project_configuration
        if naming.automatic_checkpoint_naming:
            # A script resumed without `last_good_state` has not advanced the number.
            taken = [int(path.name.rpartition("_")[2]) for path in numbered_states(accelerator)[-1:]]
            naming.iteration = max(naming.iteration, *engine.world.exchange(max(taken, default=-1) + 1, "signals"))
            return accelerator.save_state()
        named = f"{accelerator.project_dir}/checkpoints/checkpoint_{{step}}" if self._asked == AUTO else self._asked
        return accelerator.save_state(named.replace("{step}", str(accelerator.zero_steps)))


def discard_on_its_disk(state: Path, engine: ZeroEngine) -> None:
    """Removes a saved state from each disk. Collective."""
    disk = find_disk(state.parent, engine.world_groups.rank, engine.world.exchange, then="Nothing was removed.")
    if disk.leads and state.is_dir():
        discard(state)


def may_stop(settings: CheckpointConfig) -> bool:
    """Whether a run saves on a signal or by the clock."""
    return settings.on_signal != "none" or settings.is_timed


def follow_signals(accelerator: Any, engine: ZeroEngine) -> None:
    """Follows signals in a script's own loop if `checkpoint.on_signal` is set. Trainer's `train()` follows its own."""
    stop, settings = accelerator.zero_stop, accelerator.zero_config.checkpoint
    if stop is None and may_stop(settings) and trainer_in_callers() is None:
        stop = accelerator.zero_stop = LoopStop(accelerator)
        stop.follow_clock(settings, lambda: accelerator.zero_steps, decides=accelerator.is_main_process)
        if settings.on_signal != "none":
            stop.install()
    if isinstance(stop, LoopStop):
        stop.follow(engine)
    # Trainer's stop exists before its engine, which has to announce the signals to the other ranks.
    elif stop is not None:
        engine.stop_when(stop.asked)
