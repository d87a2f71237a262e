"""The engines under comparison, each behind the same four calls: make, step, finish, close.

engine = ENGINES["ddp"](workload.make_model, adamw_arguments(fused=True))
loss = engine.step(input_ids)
engine.finish()
engine.close()
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

MakeModel = Callable[[], torch.nn.Module]
OptimizerArguments = dict[str, object]


class Engine:
    """A model and its optimizer in the plain training loop; what shards them has been installed by whoever made it."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model = model
        self.optimizer = optimizer

    def step(self, input_ids: torch.Tensor) -> float:
        """Train on one batch and return its loss on this rank."""
        loss = self.model(input_ids, labels=input_ids).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def clip(self, max_norm: float) -> None:
        """Scale the gradients of the last backward so that their norm over all ranks is at most `max_norm`."""
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)

    def finish(self) -> None:
        """Wait for what the last step left in flight: nothing, in torch's own engines."""

    def waited_ms(self) -> float | None:
        """Time spent waiting for the other ranks since the start, or None where the engine does not count it."""
        return None

    def close(self) -> None:
        """Let go of the model and the optimizer; call it before the process group is destroyed."""
        del self.model, self.optimizer


class HfZero(Engine):
    """This package's engine, which leaves parameter all-gathers in flight after a step and counts its own waits."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, settings: dict) -> None:
        # Imported here, so that torch's own engines can be measured without this package.
        from hf_zero.engine.engine import ZeroEngine

        super().__init__(model, optimizer)
        self.zero = ZeroEngine(model, [optimizer], settings)

    def clip(self, max_norm: float) -> None:
        self.zero.clip_grad_norm_(max_norm)

    def finish(self) -> None:
        self.zero.finish_parameters()

    def waited_ms(self) -> float:
        return 1e3 * sum(row.wait_seconds for row in self.zero.comm_report().rows)

    def close(self) -> None:
        self.zero.close()
        del self.zero
        super().close()


def make_ddp(make_model: MakeModel, optimizer_arguments: OptimizerArguments) -> Engine:
    """Replicated everything: the engine the others are measured against."""
    model = DistributedDataParallel(make_model())
    return Engine(model, torch.optim.AdamW(model.parameters(), **optimizer_arguments))


def make_zero_optimizer(make_model: MakeModel, optimizer_arguments: OptimizerArguments) -> Engine:
    """DDP with torch's ZeroRedundancyOptimizer: optimizer state sharded by whole parameters, then broadcast."""
    model = DistributedDataParallel(make_model())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, **optimizer_arguments)
    return Engine(model, optimizer)


def make_fsdp2(make_model: MakeModel, optimizer_arguments: OptimizerArguments) -> Engine:
    """FSDP2 as its documentation shows it: every block is a unit, the rest belongs to the root."""
    model = make_model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    blocks = next(module for module in model.modules() if isinstance(module, torch.nn.ModuleList))
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return Engine(model, torch.optim.AdamW(model.parameters(), **optimizer_arguments))


def make_hf_zero(make_model: MakeModel, optimizer_arguments: OptimizerArguments, **settings: object) -> Engine:
    """This package's engine with these settings, and its defaults for the others."""
    model = make_model()
    return HfZero(model, torch.optim.AdamW(model.parameters(), **optimizer_arguments), settings)


BASELINE = "ddp"

USUAL_ENGINES: dict[str, Callable[[MakeModel, OptimizerArguments], Engine]] = {
    BASELINE: make_ddp,
    "zero_optimizer": make_zero_optimizer,
    "fsdp2": make_fsdp2,
    "hf_zero0": partial(make_hf_zero, stage=0),
    "hf_zero1": partial(make_hf_zero, stage=1),
    "hf_zero2": partial(make_hf_zero, stage=2),
    "hf_zero3": partial(make_hf_zero, stage=3),
}

INT8 = {"comm": {"gradients": "int8", "weights": "int8"}}
AUTO = {"comm": {"gradients": "auto", "weights": "auto"}}
SHARED = {"comm": {"peer_memory": "always"}}

ENGINES = USUAL_ENGINES | {
    "hf_zero2_int8": partial(make_hf_zero, stage=2, **INT8),
    "hf_zero3_int8": partial(make_hf_zero, stage=3, **INT8),
    "hf_zero2_auto": partial(make_hf_zero, stage=2, **AUTO),
    "hf_zero3_auto": partial(make_hf_zero, stage=3, **AUTO),
    "hf_zero2_shared": partial(make_hf_zero, stage=2, **SHARED),
    "hf_zero3_shared": partial(make_hf_zero, stage=3, **SHARED),
    "hf_zero3_kept": partial(make_hf_zero, stage=3, reshard_after_forward=False),
    "hf_zero3_no_prefetch": partial(make_hf_zero, stage=3, prefetch_units=0),
}
"""All that can be named; the variants of one engine are measured only when they are."""


def chosen_engines(names: list[str]) -> list[str]:
    """Check names and put the baseline first, without which there is nothing to compare with."""
    unknown = [name for name in names if name not in ENGINES]
    if unknown:
        raise ValueError(f"unknown engines {', '.join(unknown)}; there are {', '.join(ENGINES)}")
    return list(dict.fromkeys([BASELINE, *names]))
