"""The engines under comparison, each behind the same four calls: make, step, finish, close.

engine = ENGINES["ddp"](workload.make_model, adamw_arguments(fused=True))
loss = engine.step(input_ids)
engine.finish()
engine.close()
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from accelerate_peers import make_accelerate_ddp, make_accelerate_fsdp2, make_accelerate_hf_zero
from deepspeed_peer import SETTINGS as DEEPSPEED_SETTINGS
from deepspeed_peer import make_deepspeed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from training_loop import Engine, MakeModel, OptimizerArguments


class DataParallel(Engine):
    """torch's DistributedDataParallel."""

    def accumulating(self) -> AbstractContextManager[None]:
        return self.model.no_sync()


class FullyShard(Engine):
    """FSDP2. Micro-batches are reduced one by one, which keeps no whole gradients."""


class HfZero(Engine):
    """This package's engine, which leaves parameter all-gathers in flight after a step and counts its own waits."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, settings: dict) -> None:
        # Imported here, so that torch's own engines can be measured without this package.
        from hf_zero.engine.engine import ZeroEngine

        super().__init__(model, optimizer)
        self.zero = ZeroEngine(model, [optimizer], settings)

    def accumulating(self) -> AbstractContextManager[None]:
        return self.zero.no_sync()

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


BYTES_IN_MIB = 2**20


def make_ddp(make_model: MakeModel, optimizer_arguments: OptimizerArguments, bucket_bytes: int | None = None) -> Engine:
    """Replicated everything: the engine the others are measured against."""
    sizes = {} if bucket_bytes is None else {"bucket_cap_mb": bucket_bytes / BYTES_IN_MIB}
    model = DistributedDataParallel(make_model(), **sizes)
    return DataParallel(model, torch.optim.AdamW(model.parameters(), **optimizer_arguments))


def make_zero_optimizer(make_model: MakeModel, optimizer_arguments: OptimizerArguments) -> Engine:
    """DDP with torch's ZeroRedundancyOptimizer: optimizer state sharded by whole parameters, then broadcast."""
    # Imported here: it takes half a second, and most of what imports this module makes another engine.
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(make_model())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, **optimizer_arguments)
    return DataParallel(model, optimizer)


def shard_fully(model: torch.nn.Module, reshard_after_forward: bool) -> torch.nn.Module:
    """FSDP2 as its documentation shows it: every block is a unit, the rest belongs to the root."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    blocks = next(module for module in model.modules() if isinstance(module, torch.nn.ModuleList))
    for block in blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard_after_forward)
    # torch's default keeps the root's parameters from forward to backward, where they are needed first.
    return fully_shard(model, mesh=mesh, reshard_after_forward=None if reshard_after_forward else False)


def make_fsdp2(
    make_model: MakeModel, optimizer_arguments: OptimizerArguments, reshard_after_forward: bool = True
) -> Engine:
    model = shard_fully(make_model(), reshard_after_forward)
    return FullyShard(model, torch.optim.AdamW(model.parameters(), **optimizer_arguments))


def make_torchao(make_model: MakeModel, optimizer_arguments: OptimizerArguments, *, name: str, shards: bool) -> Engine:
    """An optimizer of torchao with state of few bits, over DDP's parameters or FSDP2's."""
    from torchao import optim

    model = shard_fully(make_model(), True) if shards else DistributedDataParallel(make_model())
    arguments = {key: value for key, value in optimizer_arguments.items() if key != "fused"}
    kind = FullyShard if shards else DataParallel
    return kind(model, getattr(optim, name)(model.parameters(), **arguments))


def make_hf_zero(
    make_model: MakeModel, optimizer_arguments: OptimizerArguments, bucket_bytes: int | None = None, **settings: object
) -> Engine:
    """This package's engine with these settings, and its defaults for the others."""
    model = make_model()
    sizes = {} if bucket_bytes is None else {"bucket_bytes": bucket_bytes}
    return HfZero(model, torch.optim.AdamW(model.parameters(), **optimizer_arguments), settings | sizes)


@dataclass(frozen=True, kw_only=True)
class Peer:
    """One engine: how it is made, and what a table says of it.

    Attributes:
        settings: what is set, and on whose advice.
        is_exact: its losses are to be DDP's. False where fewer bits are sent or kept.
        package: that has to be installed.
        imported: modules that a script would have imported before it trains.
    """

    title: str
    make: Callable[..., Engine]
    settings: str
    is_exact: bool = True
    package: str = "torch"
    imported: tuple[str, ...] = ()

    def __call__(self, make_model: MakeModel, optimizer_arguments: OptimizerArguments, **sizes: Any) -> Engine:
        return self.make(make_model, optimizer_arguments, **sizes)

    @property
    def is_ours(self) -> bool:
        return self.title.startswith("hf_zero")

    @property
    def hindrance(self) -> str | None:
        """Why it cannot be measured here; None where it can."""
        return None if importlib.util.find_spec(self.package) else f"{self.package} is not installed"

    def import_modules(self) -> None:
        for module in self.imported:
            importlib.import_module(module)


def _ours(title: str, settings: str, **given: object) -> Peer:
    make = partial(make_hf_zero, **given)
    return Peer(title=f"hf_zero {title}", make=make, settings=settings, imported=("hf_zero.engine.engine",))


def _ours_rounded(title: str, settings: str, **given: object) -> Peer:
    make = partial(make_hf_zero, **given)
    return Peer(
        title=f"hf_zero {title}", make=make, settings=settings, is_exact=False, imported=("hf_zero.engine.engine",)
    )


def _through_accelerate(title: str, make: Callable[..., Engine], settings: str, *imported: str) -> Peer:
    return Peer(
        title=f"{title}, accelerate",
        make=make,
        settings=settings,
        package="accelerate",
        imported=("accelerate", *imported),
    )


def _deepspeed(stage: int) -> Peer:
    return Peer(
        title=f"DeepSpeed {stage}",
        make=partial(make_deepspeed, stage=stage),
        settings=DEEPSPEED_SETTINGS,
        package="deepspeed",
        imported=("deepspeed",),
    )


def _torchao(title: str, name: str, shards: bool) -> Peer:
    return Peer(
        title=title,
        make=partial(make_torchao, name=name, shards=shards),
        settings=f"torchao.optim.{name} in place of AdamW, which it compiles in the first step",
        is_exact=False,
        package="torchao",
        imported=("torchao.optim",),
    )


BASELINE = "ddp"
DEFAULTS = "the defaults"
INT8 = {"comm": {"gradients": "int8", "weights": "int8"}}
OFFLOAD = {"offload": {"optimizer": "cpu"}}
INT8_SETTINGS = "comm.gradients: int8, comm.weights: int8"

USUAL_ENGINES: dict[str, Peer] = {
    BASELINE: Peer(title="DDP", make=make_ddp, settings="defaults (buckets of 25 MiB); accumulates under no_sync"),
    "zero_optimizer": Peer(
        title="DDP + ZeroRedundancyOptimizer",
        make=make_zero_optimizer,
        settings="optimizer_class=AdamW over all parameters, as its tutorial shows",
    ),
    "fsdp2": Peer(
        title="FSDP2",
        make=make_fsdp2,
        settings="fully_shard on every block and on the root, as its tutorial shows; reshard_after_forward=True",
    ),
    "hf_zero0": _ours("stage 0", DEFAULTS, stage=0),
    "hf_zero1": _ours("stage 1", DEFAULTS, stage=1),
    "hf_zero2": _ours("stage 2", DEFAULTS, stage=2),
    "hf_zero3": _ours("stage 3", DEFAULTS, stage=3),
}

ENGINES: dict[str, Peer] = USUAL_ENGINES | {
    "fsdp2_kept": Peer(
        title="FSDP2, kept gathered",
        make=partial(make_fsdp2, reshard_after_forward=False),
        settings="the same with reshard_after_forward=False",
    ),
    "ddp_accelerate": _through_accelerate("DDP", make_accelerate_ddp, "Accelerator(cpu=True)"),
    "fsdp2_accelerate": _through_accelerate(
        "FSDP2",
        make_accelerate_fsdp2,
        "FullyShardedDataParallelPlugin(fsdp_version=2), wrapped by the model's own blocks; accelerate takes that plugin on "
        "accelerators only, so on a CPU its state is told to be FSDP's",
    ),
    "hf_zero2_accelerate": _through_accelerate(
        "hf_zero stage 2", partial(make_accelerate_hf_zero, stage=2), "ZeroPlugin(2)", "hf_zero.integrations.accelerate"
    ),
    "hf_zero3_accelerate": _through_accelerate(
        "hf_zero stage 3", partial(make_accelerate_hf_zero, stage=3), "ZeroPlugin(3)", "hf_zero.integrations.accelerate"
    ),
    **{f"deepspeed{stage}": _deepspeed(stage) for stage in range(4)},
    "torchao_8bit": _torchao("DDP + torchao AdamW8bit", "AdamW8bit", shards=False),
    "torchao_4bit": _torchao("DDP + torchao AdamW4bit", "AdamW4bit", shards=False),
    "fsdp2_torchao_8bit": _torchao("FSDP2 + torchao AdamW8bit", "AdamW8bit", shards=True),
    "hf_zero2_8bit": _ours_rounded("stage 2, 8-bit moments", "moments: 8bit", stage=2, moments="8bit"),
    "hf_zero2_offload": _ours("stage 2, CPU-offload", "offload.optimizer: cpu", stage=2, **OFFLOAD),
    "hf_zero3_offload": _ours("stage 3, CPU-offload", "offload.optimizer: cpu", stage=3, **OFFLOAD),
    "hf_zero2_int8": _ours_rounded("stage 2, int8 wire", INT8_SETTINGS, stage=2, **INT8),
    "hf_zero3_int8": _ours_rounded("stage 3, int8 wire", INT8_SETTINGS, stage=3, **INT8),
    "hf_zero3_kept": _ours(
        "stage 3, kept gathered", "reshard_after_forward: false", stage=3, reshard_after_forward=False
    ),
    "hf_zero3_no_prefetch": _ours("stage 3, no prefetch", "prefetch_units: 0", stage=3, prefetch_units=0),
}
"""All that can be named; the variants of one engine are measured only when they are."""

ALL_PEERS = [
    *("ddp", "zero_optimizer", "fsdp2", "fsdp2_kept", "ddp_accelerate", "fsdp2_accelerate"),
    *("deepspeed0", "deepspeed1", "deepspeed2", "deepspeed3", "torchao_8bit", "torchao_4bit", "fsdp2_torchao_8bit"),
    *("hf_zero0", "hf_zero1", "hf_zero2", "hf_zero3", "hf_zero3_kept", "hf_zero2_accelerate", "hf_zero3_accelerate"),
    *("hf_zero2_offload", "hf_zero3_offload", "hf_zero2_8bit", "hf_zero2_int8", "hf_zero3_int8"),
]
"""What `all.sh` compares."""


def chosen_engines(names: list[str]) -> list[str]:
    """Check names and put the baseline first, without which there is nothing to compare with."""
    unknown = [name for name in names if name not in ENGINES]
    if unknown:
        raise ValueError(f"unknown engines {', '.join(unknown)}; there are {', '.join(ENGINES)}")
    return list(dict.fromkeys([BASELINE, *names]))
