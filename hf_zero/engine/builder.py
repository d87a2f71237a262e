"""Moves a model's parameters into flat buckets."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import nn

from ..buckets.bucket import Bucket, BucketKey
from ..buckets.memory import ParameterMemory, UnshardedMemory
from ..buckets.offloaded_memory import sharded_memory
from ..buckets.packed import start_alike
from ..buckets.precision import resolve_precision
from ..buckets.unread_weights import take_from_file, take_rank_0s, wanted_dtype
from ..config import ZeroConfig
from ..layout.buckets import BucketLayout
from ..offload.choice import Placement
from ..offload.shards import ParameterTier
from ..optimizer.storage import OptimizerStorage
from .buffers import ignored_by_ddp, ignored_parameters
from .division import Division, Part, precision_of
from .split_model import Mesh
from .wire import Wire


@dataclass(frozen=True, kw_only=True)
class BucketBuilder:
    """Builds the buckets of a model, part by part.

    Attributes:
        mesh: the ranks that share parameters.
        wire: how parameters and gradients are sent.
        device: the training device.
        placement: chooses the tier of each bucket's state.
        parameter_tier: stores shards of parameters.
        storage: stores the masters and the optimizer state.
        on_progress: called with the bytes of parameters in buckets and of all parameters.
    """

    config: ZeroConfig
    mesh: Mesh
    wire: Wire
    device: torch.device
    placement: Placement
    parameter_tier: ParameterTier
    storage: OptimizerStorage
    on_progress: Callable[[int, int], None]

    def build(self, model: nn.Module, division: Division) -> tuple[list[Bucket], dict[tuple[str, ...], list[Bucket]]]:
        """Returns all buckets, in the order of their reduction, and the buckets of each unit by its modules. Collective.

        Afterwards, parameters in no bucket are also on the device, with rank 0's values unless the script has excluded them from
        DDP.
        """
        # Sizes before the move, because parameters have no memory afterwards at stage 3.
        nbytes_of = {parameter: parameter.nbytes for parameter in model.parameters()}
        total, done = sum(nbytes_of.values()), 0
        built: list[Bucket] = []
        of_units: dict[tuple[str, ...], list[Bucket]] = {}
        # One answer for all parts, because all buckets have the same gradient store.
        are_parameters = self._rows_are_parameters(p for part in division.parts for _, p in part.parameters)
        for part in division.parts:
            layouts = division.layouts_of(part, first_index=len(built))
            of_part = of_units.setdefault(part.modules, []) if part.sharded else []
            for bucket in self._build_part(part, layouts, are_parameters=are_parameters):
                # At once, so that the state moves to its tier before the next bucket allocates memory on the device.
                self.storage.adopt(bucket)
                built.append(bucket)
                of_part.append(bucket)
                done += sum(nbytes_of[slot.parameter] for slot in bucket.slots)
                self.on_progress(done, total)
        start_alike(model, self.device, self.mesh.dp.all_transport)
        taken = {slot.parameter for bucket in built for slot in bucket.slots}
        ignored, names = ignored_parameters(model), ignored_by_ddp(model)
        for name, parameter in model.named_parameters():
            if parameter in ignored and name in names:
                parameter.data = parameter.detach().to(self.device)
            elif parameter not in taken:
                # Parameters in buckets already have rank 0's values.
                self._start_alike(parameter)
            if parameter not in taken:
                take_from_file(parameter, self.device)
        return built, of_units

    def _build_part(self, part: Part, layouts: Sequence[BucketLayout], *, are_parameters: bool) -> Iterator[Bucket]:
        parameter_of = dict(part.parameters)
        for layout in layouts:
            parameters = [parameter_of[slot.name] for slot in layout.slots]
            # Before the bucket copies the values: at stage 3 this rank keeps only its part of rank 0's values.
            for parameter in parameters:
                self._start_alike(parameter)
            key = cast(BucketKey, layout.key)
            group = self.mesh.expert_dp if key.is_expert else self.mesh.dp
            rounds = self.wire.rounding_in(group)
            numel = sum(p.numel() for p in parameters)
            tier = self.placement.next_tier(numel) if key.trained else self.placement.device_tier
            precision = precision_of(
                self.config,
                key,
                adds_in_master=self.wire.adds_in_wider(group),
                separate_master=self.parameter_tier.separates_masters(tier) if part.sharded else tier.is_offloaded,
                copies=tier.copies_masters and not (part.sharded and self.config.offload.moves_params),
            )
            if key.trained and not part.sharded:
                precision = replace(precision, weights=rounds)
            arguments = (layout, precision.param, self.device, layout.shard(group.groups.shard_rank))
            memory: ParameterMemory = (
                sharded_memory(
                    *arguments,
                    precision.kept,
                    tier=self.parameter_tier,
                    rounded=rounds is not None and not key.is_packed,
                )
                if part.sharded
                else UnshardedMemory(*arguments)
            )
            yield Bucket(
                layout,
                parameters,
                precision,
                memory,
                group=group,
                rows_are_parameters=are_parameters,
                tier=tier,
            )

    def _start_alike(self, parameter: nn.Parameter) -> None:
        take_rank_0s(parameter, device=self.device, transport=self.mesh.group_of(parameter).all_transport)

    def _rows_are_parameters(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Whether the optimizer steps the parameters themselves: on one rank, without masters and without offload."""
        if self.mesh.dp.groups.shard_size > 1 or self.config.offload.moves_params or self.placement.tier.is_offloaded:
            return False
        dtypes = {wanted_dtype(parameter) for parameter in parameters}
        return not any(resolve_precision(self.config, dtype).has_master for dtype in dtypes)
