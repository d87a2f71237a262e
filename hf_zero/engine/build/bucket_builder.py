"""Moves a model's parameters into flat buckets."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from ...buckets.bucket import Bucket, BucketKey
from ...buckets.mapped_parameters import take_from_file, take_rank_0s, wanted_dtype
from ...buckets.memory import ParameterMemory, UnshardedMemory
from ...buckets.offloaded_memory import sharded_memory
from ...buckets.precision import resolve_precision
from ...config import ZeroConfig
from ...layout.slots import BucketLayout
from ...offload.choose import Placement
from ...offload.parameter_shards import ParameterTier
from ..travel.buffers import ignored_by_ddp, ignored_parameters
from ..travel.wire import Wire
from .bucketing import Division, Part, precision_of
from .mesh import Mesh


@dataclass(frozen=True, kw_only=True)
class BucketBuilder:
    """Builds the buckets of a model, part by part.

    Attributes:
        mesh: the ranks that share parameters.
        wire: how parameters and gradients travel.
        device: that the model is trained on.
        placement: of state in tiers.
        parameter_tier: where shards of parameters live.
        adopt: called with each bucket when it is built.
    """

    config: ZeroConfig
    mesh: Mesh
    wire: Wire
    device: torch.device
    placement: Placement
    parameter_tier: ParameterTier
    adopt: Callable[[Bucket], None]

    def build(self, model: nn.Module, division: Division) -> tuple[list[Bucket], dict[tuple[str, ...], list[Bucket]]]:
        """All buckets, as they are numbered and reduced, and those of each unit by its modules. Collective.

        Parameters that are in none are on the device afterwards too, with rank 0's values unless a script has told DDP to
        ignore them.
        """
        built: list[Bucket] = []
        of_units: dict[tuple[str, ...], list[Bucket]] = {}
        for part in division.parts:
            buckets = self._build_part(part, division.layouts_of(part, first_index=len(built)))
            built += buckets
            if part.sharded:
                of_units.setdefault(part.modules, []).extend(buckets)
        taken = {slot.parameter for bucket in built for slot in bucket.slots}
        ignored, names = ignored_parameters(model), ignored_by_ddp(model)
        for name, parameter in model.named_parameters():
            if parameter in ignored and name in names:
                parameter.data = parameter.detach().to(self.device)
            elif parameter not in taken:
                self._start_alike(parameter)
            if parameter not in taken:
                take_from_file(parameter, self.device)
        return built, of_units

    def _build_part(self, part: Part, layouts: Sequence[BucketLayout]) -> list[Bucket]:
        parameter_of = dict(part.parameters)
        are_parameters = self._rows_are_parameters(parameter_of.values())
        buckets = []
        for layout in layouts:
            parameters = [parameter_of[slot.name] for slot in layout.slots]
            for parameter in parameters:
                self._start_alike(parameter)
            key = cast(BucketKey, layout.key)
            group = self.mesh.expert_dp if key.is_expert else self.mesh.dp
            format = self.wire.weight_format(group)
            numel = sum(p.numel() for p in parameters)
            tier = self.placement.next_tier(numel) if key.trained else self.placement.device_tier
            precision = precision_of(
                self.config,
                key,
                weights=None if part.sharded else format,
                adds_in_master=self.wire.adds_in_wider(group),
                apart=self.parameter_tier.masters_apart(tier) if part.sharded else tier.is_apart,
            )
            place = (layout, precision.param, self.device, layout.shard(group.groups.shard_rank))
            memory: ParameterMemory = (
                sharded_memory(*place, precision.kept, tier=self.parameter_tier, rounded=format is not None)
                if part.sharded
                else UnshardedMemory(*place)
            )
            bucket = Bucket(
                layout,
                parameters,
                precision,
                memory,
                group=group,
                rows_are_parameters=are_parameters,
                tier=tier,
            )
            self.adopt(bucket)
            buckets.append(bucket)
        return buckets

    def _start_alike(self, parameter: nn.Parameter) -> None:
        take_rank_0s(parameter, device=self.device, transport=self.mesh.group_of(parameter).all_transport)

    def _rows_are_parameters(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Whether the optimizer steps on the parameters themselves: one rank, which has no master of any and moves none."""
        if self.mesh.dp.groups.shard_size > 1 or self.config.offload.moves_params or self.placement.tier.is_apart:
            return False
        dtypes = {wanted_dtype(parameter) for parameter in parameters}
        return not any(resolve_precision(self.config, dtype).has_master for dtype in dtypes)
