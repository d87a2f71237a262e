"""Engines as a script meets them that is written for accelerate: made by `Accelerator.prepare`."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from training_loop import Engine, MakeModel, OptimizerArguments

STORE_PORT = "29500"
"""Of a store that nobody opens: the process group is there already."""


class Accelerated(Engine):
    """What `Accelerator.prepare` returned, in accelerate's training loop."""

    def __init__(self, accelerator: Any, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(*accelerator.prepare(model, optimizer))
        self.accelerator = accelerator

    def accumulating(self) -> AbstractContextManager[None]:
        return self.accelerator.no_sync(self.model)

    def backward(self, loss: torch.Tensor) -> None:
        self.accelerator.backward(loss)

    def clip(self, max_norm: float) -> None:
        self.accelerator.clip_grad_norm_(self.model.parameters(), max_norm)

    def close(self) -> None:
        self.accelerator.free_memory()
        super().close()
        del self.accelerator


class AcceleratedHfZero(Accelerated):
    """The same with this package's engine behind it."""

    def finish(self) -> None:
        for engine in self.accelerator.zero_engines:
            engine.finish_parameters()


def make_accelerate_ddp(make_model: MakeModel, optimizer_arguments: OptimizerArguments) -> Engine:
    return _prepared(Accelerated, make_model, optimizer_arguments)


def make_accelerate_hf_zero(make_model: MakeModel, optimizer_arguments: OptimizerArguments, *, stage: int) -> Engine:
    from hf_zero import ZeroPlugin

    return _prepared(AcceleratedHfZero, make_model, optimizer_arguments, parallelism_config=ZeroPlugin(stage))


def make_accelerate_fsdp2(make_model: MakeModel, optimizer_arguments: OptimizerArguments) -> Engine:
    """FSDP2 as accelerate sets it up on an accelerator."""
    from accelerate import DistributedType, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, reshard_after_forward=True, auto_wrap_policy="transformer_based_wrap"
    )

    def tell_state(_accelerator: Any) -> None:
        state = AcceleratorState()
        state.distributed_type, state.fsdp_plugin = DistributedType.FSDP, plugin

    return _prepared(Accelerated, make_model, optimizer_arguments, tell_state)


def _prepared(
    kind: type[Accelerated],
    make_model: MakeModel,
    optimizer_arguments: OptimizerArguments,
    prepare_state: Callable[[Any], None] = lambda accelerator: None,
    **settings: object,
) -> Engine:
    from accelerate import Accelerator

    _say_where_ranks_are()
    accelerator = Accelerator(cpu=True, **settings)
    prepare_state(accelerator)
    model = make_model()
    return kind(accelerator, model, torch.optim.AdamW(model.parameters(), **optimizer_arguments))


def _say_where_ranks_are() -> None:
    """Sets what a launcher sets."""
    rank, world_size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world_size, LOCAL_WORLD_SIZE=world_size)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=STORE_PORT, ACCELERATE_USE_CPU="true")
