"""Forecasts for every set-up of a model: the engine's layout of its state, and a trace of its activations."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...config import ZeroConfig
from ...layout.pool import GRAD_BUFFERS
from ...offload.window import WINDOW
from ...plan.forecast import Activations, Forecast, Passing, forecast, forecast_ddp
from .layouts import Layout, ddp_state, lay_out, ranks_without_a_group

RUNTIME_ON_HOST_BYTES = 28 * 2**20
"""Thread pools, libraries that load at the first product, buffers of gloo: set by hand, from the peaks of planned_peaks.py."""

CONTEXT_BYTES, WORKSPACES_BYTES, COMMUNICATORS_BYTES = 400 * 2**20, 144 * 2**20, 256 * 2**20
"""A CUDA context; workspaces of cuBLAS with kernels that are loaded at their first call; buffers of NCCL. Not measured here."""

_FUSED_BY_KERNELS = ("AdamW", "Adam", "SGD", "Lion")


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is to be trained, where.

    Attributes:
        model: with or without memory; nothing of it is touched.
        optimizers: over its parameters.
        device: that it will be trained on.
        world_size: ranks; `ranks_a_node` of them on one host.
        activations: of a micro-batch; None where they are not known.
        accumulates: a step has several micro-batches.
        runtime_bytes: that libraries take when training begins; None is what they usually do.
        experts: parameters that only `expert_ranks` of the ranks share.
    """

    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    device: torch.device
    world_size: int
    ranks_a_node: int
    activations: Activations | None
    accumulates: bool = False
    runtime_bytes: int | None = None
    experts: Collection[nn.Parameter] = ()
    expert_ranks: int = 1

    @property
    def on_host(self) -> bool:
        return self.device.type == "cpu"

    @property
    def backend(self) -> str:
        return "gloo" if self.on_host else "nccl"

    def layout(self, config: ZeroConfig) -> Layout:
        """The engine's buckets under a config."""
        groups = ranks_without_a_group(self.world_size, self.ranks_a_node, config, self.backend)
        return lay_out(self.model, self.optimizers, config, groups, self.device, self.experts, self.expert_ranks)

    def forecast(self, name: str, settings: Mapping[str, Any], config: ZeroConfig) -> Forecast:
        """Bytes that a rank needs under a config.

        Raises:
            ConfigError, ValueError: the engine would refuse it.
        """
        return self.forecast_of(name, settings, self.layout(config))

    def forecast_of(self, name: str, settings: Mapping[str, Any], layout: Layout) -> Forecast:
        """The same for a layout."""
        config, plan = layout.config, layout.plan(accumulates=self.accumulates)
        passing = self._passing(
            gathered=layout.gathered_bytes(),
            received=_received_bytes(layout, reduces_in_place=not plan.gradient_buffers) if self.on_host else 0,
            step=self._step_bytes(
                [bucket.cost.layout.shard_numel * bucket.cost.master_bytes for bucket in layout.buckets]
            ),
            window=_window_bytes(layout),
        )
        return forecast(
            name,
            settings,
            config,
            plan,
            layout.costs,
            passing,
            self.activations,
            on_host=self.on_host,
            accumulates=self.accumulates,
        )

    def forecast_ddp(self) -> Forecast:
        """The same under DistributedDataParallel."""
        state = ddp_state(self.model, self.optimizers, self.world_size)
        largest = [p.nbytes for p in self.model.parameters() if p.requires_grad]
        passing = self._passing(step=self._step_bytes(largest, kernels=False))
        return forecast_ddp(state, passing, self.activations, accumulates=self.accumulates)

    def _passing(self, **held: int) -> Passing:
        tensors = [*self.model.parameters(), *self.model.buffers()]
        usual = RUNTIME_ON_HOST_BYTES if self.on_host else CONTEXT_BYTES + WORKSPACES_BYTES + COMMUNICATORS_BYTES
        return Passing(
            runtime=usual if self.runtime_bytes is None else self.runtime_bytes,
            largest_parameter=max((tensor.nbytes for tensor in tensors), default=0),
            model=sum(tensor.nbytes for tensor in tensors),
            **held,
        )

    def _step_bytes(self, sizes: Sequence[int], *, kernels: bool = True) -> int:
        """Temporaries of a step over tensors of these sizes: of the largest on the host, of all with foreach loops."""
        found = 0
        for optimizer in self.optimizers:
            settings = optimizer.param_groups[0]
            if settings.get("fused"):
                continue
            if self.on_host and not settings.get("foreach"):
                largest = max((p.nbytes for group in optimizer.param_groups for p in group["params"]), default=0)
                found = max(found, 2 * min(largest, max(sizes, default=0)))
            elif not kernels or type(optimizer).__name__ not in _FUSED_BY_KERNELS:
                found = max(found, sum(sizes))
        return found


def _received_bytes(layout: Layout, *, reduces_in_place: bool) -> int:
    """Parts of gradients that peers have sent, where ranks send to each other point to point.

    Args:
        reduces_in_place: all buckets may be on their way until backward ends, and what a rank adds up lies among what it sends.
            Otherwise a few are, and the first part lands where the sum stays.
    """
    # Through a pool, the first of the other ranks' parts is what the sum is taken in.
    spared = 1 if reduces_in_place else 2
    received = (
        max(0, cost.layout.shards - spared) * cost.layout.shard_numel * cost.reduce_bytes
        for cost in layout.costs
        if cost.trained
    )
    parts = sorted(received, reverse=True)
    return sum(parts if reduces_in_place else parts[:GRAD_BUFFERS])


def _window_bytes(layout: Layout) -> int:
    """State that passes through host memory on its way from and to files: of the largest buckets."""
    offload = layout.config.offload
    if offload.optimizer != "nvme":
        return 0
    sizes = []
    for cost in layout.costs:
        if cost.trained and cost.in_files:
            state = sum(cost.state_itemsizes or ()) + cost.master_bytes * cost.keeps_master
            sizes.append(cost.layout.shard_numel * state)
    return sum(sorted(sizes, reverse=True)[: 1 + WINDOW])
