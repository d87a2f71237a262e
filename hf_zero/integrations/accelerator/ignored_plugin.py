"""A plugin that accelerate left aside: the run stops at its first step, and does not train without the engine.

The Accelerators of a process share one state, that of the first. A `parallelism_config` that a later one is given is dropped
without a call, so the plugin learns of it from the steps of optimizers.
"""

import weakref

import torch
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import AcceleratorState

from ...config import ConfigError, ZeroConfig
from .first_step import StepWatch


def watch_for_steps_without(plugin: ParallelismConfig, config: ZeroConfig) -> StepWatch:
    """Raises `ConfigError` in the first step that is taken without the plugin's engine beside an Accelerator.

    Args:
        plugin: closes the watch when it is installed. Until an Accelerator exists it may go unused and be forgotten.
    """
    came_second = bool(AcceleratorState._shared_state)
    reference = weakref.ref(plugin)

    def judge(optimizer: torch.optim.Optimizer, engine: object | None) -> bool:
        if reference() is None and not came_second:
            return True
        if not AcceleratorState._shared_state:
            return False
        first = getattr(AcceleratorState._shared_state.get("parallelism_config"), "config", None)
        is_without = engine is None and first is None
        is_anothers = came_second and first is not None and first != config
        if is_without or is_anothers:
            raise ConfigError(
                f"hf_zero: {type(optimizer).__name__} steps, and a ZeroPlugin for stage {config.stage} was installed nowhere: "
                f"accelerate takes what the first Accelerator of a process was given ({_named(first)}) for all of them, and "
                "ignores the plugin of a later one. Call plugin.attach(accelerator) before accelerator.prepare, or "
                "pass ZeroCallback to the Trainer; or give the plugin to the first."
            )
        # An equal plugin does as well.
        return came_second and first == config

    return StepWatch(judge)


def _named(first: ZeroConfig | None) -> str:
    return "no plugin" if first is None else f"a plugin for stage {first.stage}"
