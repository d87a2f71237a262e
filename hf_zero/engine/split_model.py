"""Models split by tensor or expert parallelism: local parts, copies, the ranks of a step, and the mesh of all ranks."""

import hashlib
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..arithmetic.checksums import checksum
from ..buckets.bucket import Bucket
from ..buckets.memory import UnshardedMemory
from ..comm.choice import choose_group, choose_transport
from ..comm.groups import Groups
from ..comm.ledger import Ledger
from ..comm.local import LocalTransport
from ..comm.model_copies import Agreement, ModelCopies
from ..comm.transport import DataParallelGroup, Transport
from ..config import CommConfig, ConfigError, ZeroConfig
from ..hooks.tensors import is_in_backward
from ..hooks.weak import WeakHook
from ..layout.boxes import Box
from ..layout.intervals import Interval
from ..optimizer.replicas import ReplicasDivergedError

if TYPE_CHECKING:
    from torch.distributed.tensor import DeviceMesh, DTensor


# Models split by tensor or expert parallelism: their DTensors become plain parameters with this rank's part.
#
# [Note: plain parameters, DTensors in forward] Buckets, tiers, kernels and stages handle only plain tensors. So each DTensor is
# replaced by a plain parameter of the same name with this rank's part. But the parallelism's own code needs DTensors. So while a
# module's forward runs, its parameters' names refer to DTensors made from the plain parameters by a differentiable operation.
# Backward returns gradients to the plain parameters, in their layout.

_SUMS_GRADIENTS = "ReplicatedWithGradAllReduce.install_forward.<locals>.tp_forward"
"""transformers' forward of a norm over a split axis. It registers hooks on parameters to sum gradients over the ranks."""


@dataclass(frozen=True, eq=False, kw_only=True)
class SplitParameter:
    """This rank's part of a former DTensor parameter.

    Attributes:
        box: the part.
        mesh: the DTensor's mesh.
        placements: the DTensor's placements.
    """

    box: Box
    mesh: "DeviceMesh"
    placements: tuple[Any, ...]

    def as_dtensor(self, local: torch.Tensor) -> "DTensor":
        """Returns the DTensor with `local` as this rank's part. Differentiable."""
        from torch.distributed.tensor import DTensor

        stride = torch.empty(self.box.shape, device="meta").stride()
        return DTensor.from_local(
            local, self.mesh, self.placements, run_check=False, shape=torch.Size(self.box.shape), stride=stride
        )

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks over which the tensor is split, in the order of the mesh."""
        coordinate = self.mesh.get_coordinate()
        assert coordinate is not None
        ranks = self.mesh.mesh
        # From the last dimension, because the indices of earlier dimensions then stay valid.
        for dim in reversed(range(self.mesh.ndim)):
            if not _splits(self.placements[dim]) and self.mesh.ndim > 1:
                ranks = ranks.select(dim, coordinate[dim])
        return tuple(ranks.reshape(-1).tolist())


class SplitModel:
    """The split parameters of a model. Empty if each rank has the whole model.

    If experts are split over more ranks than the remaining model (`ep_size` above `tp_size`), the ranks with one copy of the
    model form several sets, and each set computes a different batch.

    Args:
        model: its DTensors are replaced by plain parameters.
        optimizers: DTensors in their groups are replaced as well.

    Attributes:
        parts: maps each plain parameter that replaces a DTensor to its part.
        copy_ranks: the ranks that together have one copy of the model, in the order of their parts.
        ranks: the ranks in `copy_ranks` that compute the same batch as this rank: all, unless experts are split over more ranks.

    Raises:
        ConfigError: the model has DTensors, but none is split; or one is split in an unsupported way or over different ranks.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]):
        self._model = model
        self._optimizers = list(optimizers)
        self.parts: dict[nn.Parameter, SplitParameter] = {}
        self._undo: list[Callable[[], None]] = []
        self.ranks: tuple[int, ...]
        self.copy_ranks: tuple[int, ...]
        self.ranks = self.copy_ranks = (dist.get_rank(),) if dist.is_initialized() else (0,)
        found = {name: p for name, p in model.named_parameters() if is_dtensor(p)}
        parts = {name: _part_of(name, dtensor) for name, dtensor in found.items()}
        if not found:
            return
        if not any(map(_splits, (placement for part in parts.values() for placement in part.placements))):
            name = next(iter(found))
            raise ConfigError(
                f"hf_zero: the parameter {name!r} is a DTensor with equal values on all ranks of its mesh, as are all other "
                "parameters. Load the model without a plan, or with one that splits it (tp_size, ep_size)."
            )
        self.copy_ranks = max((part.ranks for part in parts.values()), key=len)
        self.ranks = _together(model, parts, self.copy_ranks)
        self._swap({id(dtensor): self._replace(dtensor, parts[name]) for name, dtensor in found.items()})
        for module in model.modules():
            self._prepare(module)

    @property
    def is_empty(self) -> bool:
        return not self.parts

    @cached_property
    def experts(self) -> frozenset[nn.Parameter]:
        """The parameters split over more ranks than compute a batch together."""
        return frozenset(parameter for parameter, part in self.parts.items() if self._is_expert(part))

    def _is_expert(self, part: SplitParameter) -> bool:
        return self.ranks != self.copy_ranks and len(part.ranks) == len(self.copy_ranks)

    def box_of(self, parameter: torch.Tensor) -> Box:
        """Returns this rank's part of the whole parameter."""
        part = self.parts.get(parameter) if isinstance(parameter, nn.Parameter) else None
        return Box.whole(parameter.shape) if part is None else part.box

    def boxes(self) -> dict[str, Box]:
        """Returns `box_of` of each parameter of the model, by name."""
        return {name: self.box_of(parameter) for name, parameter in self._model.named_parameters()}

    def restore(self) -> None:
        """Restores DTensors, with the present values of the plain parameters."""
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()
        dtensor_of = {}
        for plain, part in self.parts.items():
            if not plain.is_meta:
                now = part.as_dtensor(plain.detach())
                dtensor_of[id(plain)] = nn.Parameter(now, requires_grad=plain.requires_grad)
        self._swap(dtensor_of)
        self.parts.clear()

    def _replace(self, dtensor: nn.Parameter, part: SplitParameter) -> nn.Parameter:
        local = dtensor.detach().to_local()  # type: ignore[attr-defined]  # A DTensor, which nn.Parameter does not say.
        plain = nn.Parameter(local, requires_grad=dtensor.requires_grad)
        # Keep attributes that other libraries have set on the parameter.
        plain.__dict__.update(dtensor.__dict__)
        self.parts[plain] = part
        return plain

    def _to_dtensor(self, part: SplitParameter) -> Callable[[torch.Tensor], torch.Tensor]:
        if not self._is_expert(part):
            return part.as_dtensor
        # Tokens come from several batches, each with its own mean loss. Scale the gradient to the mean over these batches, as for
        # all other parameters.
        mean = len(self.ranks) / len(self.copy_ranks)
        return lambda value: part.as_dtensor(_ScaleGradient.apply(value, mean))

    def _swap(self, others: Mapping[int, nn.Parameter]) -> None:
        """Replaces parameters, by `id`, in the model and the optimizers."""
        for module in self._model.modules():
            for name, parameter in module._parameters.items():
                if id(parameter) in others:
                    module._parameters[name] = others[id(parameter)]
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["params"] = [others.get(id(parameter), parameter) for parameter in group["params"]]
            for held in [each for each in optimizer.state if id(each) in others]:
                optimizer.state[others[id(held)]] = _as_local(optimizer.state.pop(held))

    def _prepare(self, module: nn.Module) -> None:
        """Makes a module's forward use DTensors, and its `state_dict` return them."""
        own = {name: self.parts[p] for name, p in module._parameters.items() if p in self.parts}
        stock = module.forward
        is_summing = getattr(stock, "__qualname__", "") == _SUMS_GRADIENTS
        if not own and not is_summing:
            return
        had_own = "forward" in module.__dict__
        convert: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
            name: self._to_dtensor(part) for name, part in own.items()
        }
        run = stock
        if is_summing:
            # Its hooks would run after the engine's hooks, which remove gradients.
            nonlocals = inspect.getclosurevars(stock).nonlocals
            mesh = inspect.getclosurevars(nonlocals["_all_reduce_grad"]).nonlocals["mesh"]
            run, group = nonlocals["original_forward"], mesh.get_group()
            summed = [name for name, p in module._parameters.items() if p is not None and name not in own]
            convert |= {name: _sum_of_gradients_over(group) for name in summed}

        def forward(*args: Any, **kwargs: Any) -> Any:
            # Read before saving the dict, because a read may wait for a gather, which then replaces the module's dict.
            held = {name: module._parameters[name] for name in convert}
            before: Any = module.__dict__["_parameters"]
            shown = {name: convert[name](value) for name, value in held.items() if value is not None}
            module.__dict__["_parameters"] = {**before, **shown}
            try:
                return run(*args, **kwargs)
            finally:
                module.__dict__["_parameters"] = before

        def undo() -> None:
            # If a script has wrapped `forward` since, the script's wrapper stays.
            if module.__dict__.get("forward") is forward:
                if had_own:
                    changed.forward = stock
                else:
                    del module.__dict__["forward"]

        changed: Any = module
        changed.forward = forward
        self._undo.append(undo)
        if own:
            hook = module.register_state_dict_post_hook(_StateDictHook(own))
            self._undo.append(hook.remove)


class _StateDictHook:
    """Makes a module's `state_dict` return DTensors, as before the engine, so that savers recognize parts."""

    def __init__(self, own: Mapping[str, SplitParameter]):
        self._own = own

    def __call__(self, _module: nn.Module, state_dict: dict[str, Any], prefix: str, _metadata: object) -> None:
        for name, part in self._own.items():
            value = state_dict.get(f"{prefix}{name}")
            # With `keep_vars`, the caller wants the parameters themselves.
            if isinstance(value, torch.Tensor) and not (isinstance(value, nn.Parameter) or is_dtensor(value)):
                state_dict[f"{prefix}{name}"] = part.as_dtensor(value)


class _SumGradients(torch.autograd.Function):
    """Returns its input; backward sums the gradient over the ranks of a group."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        # Clone, because the all-reduce writes in place, and autograd may pass the same gradient to other nodes.
        summed = gradients[0].contiguous().clone()
        dist.all_reduce(summed, group=ctx.group)
        return summed, None


class _ScaleGradient(torch.autograd.Function):
    """Returns its input; backward multiplies the gradient."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * ctx.factor, None


def _sum_of_gradients_over(group: dist.ProcessGroup) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda value: _SumGradients.apply(value, group)


def read_part(box: Box, interval: Interval, read: Callable[[Interval], torch.Tensor]) -> torch.Tensor:
    """Reads elements of a part with a reader of the whole tensor.

    Args:
        box: the part.
        interval: the elements to read, as indices in the part.
        read: reads elements of the whole tensor.
    """
    if box.is_whole:
        return read(interval)
    return torch.cat([read(Interval(start, start + run.numel)) for run, start in box.runs(interval)])


def whole_tensors(
    parts: Mapping[str, torch.Tensor], boxes: Mapping[str, Box], copy: Transport, *, wanted: bool
) -> dict[str, torch.Tensor]:
    """Returns the whole tensors of the ranks' parts if `wanted`, otherwise {}. Collective; sends one tensor at a time.

    Args:
        parts: this rank's parts, by name; tied tensors under each of their names.
        boxes: the parameters' parts, by the first name of each parameter.
        copy: connects the ranks that together have the tensors.
    """
    # Reversed, so that a tied tensor keeps the first of its names.
    first_name = {id(parts[name]): name for name in reversed(list(boxes)) if name in parts}
    found: dict[str, torch.Tensor] = {}
    made: dict[int, torch.Tensor] = {}
    for name, part in parts.items():
        box = boxes.get(first_name.get(id(part), ""))
        if box is None or box.is_whole:
            found[name] = part
            continue
        if id(part) not in made:
            # As bytes, because numpy has no bfloat16.
            everyone = copy.exchange((box, part.contiguous().view(torch.uint8).numpy()), "whole tensors")
            made[id(part)] = _put_together(box.shape, part.dtype, everyone) if wanted else part
        found[name] = made[id(part)]
    return found if wanted else {}


def _put_together(shape: tuple[int, ...], dtype: torch.dtype, everyone: Sequence[tuple[Box, Any]]) -> torch.Tensor:
    whole = torch.empty(shape, dtype=dtype)
    for box, values in everyone:
        part = torch.from_numpy(values).view(dtype).view(box.local_shape)
        for there, here in box.slices():
            whole[there] = part[here]
    return whole


def _as_local(state: Any) -> Any:
    if not isinstance(state, dict):
        return state
    return {key: value.to_local() if is_dtensor(value) else value for key, value in state.items()}


def is_dtensor(value: object) -> bool:
    """Whether a value is a DTensor."""
    # If nobody has imported the module, which costs a second, there are no DTensors.
    home = sys.modules.get("torch.distributed.tensor")
    return home is not None and isinstance(value, home.DTensor)


def _splits(placement: Any) -> bool:
    return not placement.is_replicate()


def _together(model: nn.Module, parts: Mapping[str, SplitParameter], copy: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the ranks of a copy that compute the same batch as this rank."""
    # transformers' config. Without `tp_size`, all ranks of the copy compute the same batch.
    said = getattr(getattr(model, "config", None), "distributed_config", None)
    size = min(getattr(said, "tp_size", len(copy)), len(copy))
    first = copy.index(dist.get_rank()) // size * size
    together = copy[first : first + size]
    for name, part in parts.items():
        if len(part.ranks) > 1 and set(part.ranks) not in (set(copy), set(together)):
            raise ConfigError(
                f"hf_zero: {name!r} is split over ranks {list(part.ranks)}, but other parameters over ranks {list(copy)}; "
                "allowed: one set of ranks, and further sets for experts. Load the model with "
                "hf_zero.parallel_config(tp_size=..., ep_size=...)."
            )
    return together


def _part_of(name: str, dtensor: Any) -> SplitParameter:
    mesh, box = dtensor.device_mesh, Box.whole(dtensor.shape)
    coordinate = mesh.get_coordinate()
    for dim, placement in enumerate(dtensor.placements):
        # transformers' packed weights use `_StridedShard`, which is not a subclass of `Shard` in some releases of torch.
        along = getattr(placement, "dim", None)
        if placement.is_replicate():
            continue
        if along is None or placement.is_partial():
            raise _unknown(name, dtensor, "")
        repeats = getattr(placement, "split_factor", 1)
        box = box.split(along % dtensor.ndim, mesh.size(dim), coordinate[dim], repeats=repeats)
    if box.local_shape != tuple(dtensor.to_local().shape):
        raise _unknown(name, dtensor, f", with local shape {tuple(dtensor.to_local().shape)} of {tuple(dtensor.shape)}")
    return SplitParameter(box=box, mesh=mesh, placements=tuple(dtensor.placements))


def _unknown(name: str, dtensor: Any, more: str) -> ConfigError:
    return ConfigError(
        f"hf_zero: {name!r} is a DTensor of placements {tuple(dtensor.placements)}{more}. Allowed: Shard and Replicate, as "
        "created by tensor and expert parallelism of transformers (DistributedConfig with tp_size and ep_size)."
    )


# Checks of a split model: its ranks must have the same batches, and equal values of parameters that are not split.

_FORWARDS = 2
_STEPS = 2


class DifferentBatchesError(RuntimeError):
    """Ranks with parts of one copy of a model got different batches."""


class CopyChecks:
    """Compares, in the first forwards and steps, inputs and values that must be equal on a copy's ranks.

    Args:
        split: the split parameters.
        everyone: connects all ranks, which raise together.
        copy: connects the ranks of this copy of the model.
        buckets: the buckets of trained and of frozen parameters.
    """

    def __init__(self, split: SplitModel, everyone: Transport, copy: Transport, buckets: Sequence[Bucket]):
        self._split = split
        self._everyone = everyone
        self._forwards = self._steps = 0
        self._buckets = buckets
        self._ranks = everyone.exchange(tuple(split.ranks), "ranks of a copy of the model")
        index = split.ranks.index(torch.distributed.get_rank())
        self._held_before = _held_before(copy.exchange((index, split.boxes()), "parts of the model"), index)

    def watch(self, entry: nn.Module) -> list[RemovableHandle]:
        """Compares the batches of the first training forwards of a module; returns the removable handles."""
        return [entry.register_forward_pre_hook(WeakHook(self, CopyChecks._before_forward), with_kwargs=True)]

    def _before_forward(self, _module: nn.Module, args: tuple, kwargs: dict) -> None:
        if self._forwards < _FORWARDS and torch.is_grad_enabled() and not is_in_backward():
            self.compare_batches(args, kwargs)

    def is_first_with(self, name: str) -> bool:
        """Whether this rank is the first of its copy with its part of a parameter."""
        return name not in self._held_before

    def compare_batches(self, args: tuple, kwargs: Mapping[str, Any]) -> None:
        """Raises `DifferentBatchesError` on all ranks if ranks of a copy have different batches. Collective."""
        self._forwards += 1
        for ranks, other in differing([*args, *kwargs.values()], self._everyone, self._ranks):
            raise DifferentBatchesError(
                f"hf_zero: ranks {ranks[0]} and {other} hold one copy of the model together (ranks {list(ranks)}) but received "
                "different batches. Sample by engine.groups.rank of engine.groups.world_size, or prepare the dataloader with "
                "ZeroPlugin(tp_size=...)."
            )

    def is_due(self, step: int, *, every: int) -> bool:
        """Whether values are compared after this step: after the first few steps, and after each `every`-th step."""
        return step <= _STEPS or (every > 0 and step % every == 0)

    @torch.no_grad()
    def compare_values(self, step: int) -> None:
        """Raises `ReplicasDivergedError` if ranks have different values of a parameter that is not split. Collective."""
        mine = self._checksums()
        everyone = self._everyone.exchange(mine, "comparison of unsplit parameters")
        for ranks in dict.fromkeys(self._ranks):
            for rank in ranks[1:]:
                first, other = everyone[ranks[0]], everyone[rank]
                # Compare only intervals on both ranks, because shards of a copy's ranks may begin at different elements.
                for key in first.keys() & other.keys():
                    if first[key] != other[key]:
                        raise ReplicasDivergedError(
                            f"hf_zero: the parameter {key[0]!r} is not split over ranks {list(ranks)}, but by step {step} rank "
                            f"{rank} has different values than rank {ranks[0]}, because its gradients differed. Check the "
                            "model's tp_plan, and the seeds of dropout."
                        )

    def _checksums(self) -> dict[tuple[str, int, int], int]:
        """Returns the checksum of each interval of an unsplit parameter on this rank, by (name, start, stop)."""
        held: dict[tuple[str, int, int], torch.Tensor] = {}
        for bucket in self._buckets:
            own = None if isinstance(bucket.memory, UnshardedMemory) else bucket.memory.read_own()
            for slot in bucket.slots:
                if slot.parameter in self._split.parts:
                    continue
                if own is None:
                    held[slot.name, 0, slot.interval.numel] = slot.view_of(bucket.flat)
                    continue
                part = bucket.own_parts.get(slot)
                if part is not None:
                    run = part.in_parameter
                    held[slot.name, run.start, run.stop] = own[part.in_shard.start : part.in_shard.stop]
        sums = torch.stack([checksum(values) for values in held.values()]).tolist() if held else []
        return dict(zip(held, sums, strict=True))


def _held_before(everyone: Sequence[tuple[int, Mapping[str, Box]]], index: int) -> set[str]:
    """Returns names of parameters of which a rank with a smaller index has the same part."""
    found = {of_rank: boxes for of_rank, boxes in everyone}
    mine = found[index]
    return {name for before in range(index) for name, box in found[before].items() if mine.get(name) == box}


def differing(
    batch: Sequence[Any], everyone: Transport, sets: Iterable[tuple[int, ...]]
) -> list[tuple[tuple[int, ...], int]]:
    """Returns sets of ranks with a rank whose batch differs from the batch of the set's first rank. Collective."""
    digests = everyone.exchange(_digest_of(batch), "comparison of batches")
    return [(ranks, rank) for ranks in sets for rank in ranks if digests[rank] != digests[ranks[0]]]


def _digest_of(values: Sequence[Any]) -> str:
    """Returns a digest of the tensors in a batch, including their dtypes and shapes."""
    digest = hashlib.sha256()
    for value in values:
        if is_dtensor(value):
            # Parts of one tensor may differ, so only their form is compared.
            is_same = all(placement.is_replicate() for placement in value.placements)
            value = value.to_local() if is_same else value.to_local().new_zeros(()).expand(value.shape)
        if isinstance(value, Mapping):
            digest.update(_digest_of(list(value.values())).encode())
        elif isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
            digest.update(str((value.dtype, tuple(value.shape))).encode())
            digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """The groups of this rank.

    Attributes:
        split: the parameters split by tensor or expert parallelism.
        world_groups: the group of all ranks of the run.
        world: connects all ranks of the run.
        dp: the ranks with the same part of the model.
        expert_dp: the ranks with the same experts, if experts are split over more ranks than compute a batch together; otherwise
            `dp`.
        tp: connects the ranks that compute a batch together; only this rank, unless the model is split.
        model_parallel: connects the ranks that together have one copy of the model. Differs from `tp` only with such experts.
    """

    split: SplitModel
    world_groups: Groups
    world: Transport
    dp: DataParallelGroup
    expert_dp: DataParallelGroup
    tp: Transport
    model_parallel: Transport

    @classmethod
    def create(cls, split: SplitModel, config: ZeroConfig, device: torch.device) -> "Mesh":
        """Makes the groups of a run. Collective."""
        comm = config.comm
        if split.is_empty:
            dp = _data_parallel(config, device)
            alone, groups, world = LocalTransport(dp.transport.ledger), dp.all_groups, dp.all_transport
            return cls(
                split=split, world_groups=groups, world=world, dp=dp, expert_dp=dp, tp=alone, model_parallel=alone
            )
        # The groups of all ranks, and of a copy's ranks, share no state. They are only used for agreements.
        plain = CommConfig(timeout_s=comm.timeout_s, late_s=comm.late_s, node_size=comm.node_size)
        groups = Groups.create(stage=1, device_type=device.type, comm=plain)
        world = choose_transport(groups, device, groups.timeout_s)
        copies = ModelCopies.of(world.exchange(split.ranks, "ranks of a copy of the model"))
        world.watch.log.part = copies.part_in_words(groups.rank)
        tp = model_parallel = _between(copies.copies, device, plain, world.ledger)
        expert_copies = None
        if split.experts:
            expert_copies = ModelCopies.of(world.exchange(split.copy_ranks, "ranks of a copy of the experts"))
            model_parallel = _between(expert_copies.copies, device, plain, world.ledger)
        dp = expert_dp = _data_parallel(config, device, copies, world.ledger)
        if expert_copies is not None:
            expert_dp = _data_parallel(config, device, expert_copies, world.ledger)
        return cls(
            split=split,
            world_groups=groups,
            world=world,
            dp=dp,
            expert_dp=expert_dp,
            tp=tp,
            model_parallel=model_parallel,
        )

    def group_of(self, parameter: torch.Tensor) -> DataParallelGroup:
        """Returns the ranks with the same part of a parameter; of a buffer, those with all of it."""
        return self.expert_dp if parameter in self.split.experts else self.dp

    def copies_of(self, parameter: torch.Tensor) -> tuple[tuple[int, ...], int]:
        """Returns the ranks with the same part of a parameter, and this rank's shard. Ranks with equal results have copies.

        Includes all ranks of the group, because the groups of experts and of other parameters may begin with the same rank.
        """
        groups = self.group_of(parameter).all_groups
        return groups.world.ranks, groups.shard_rank

    @property
    def not_counted(self) -> str:
        """Names the traffic of training that belongs to the model and is in no report; "" without any."""
        if self.split.is_empty:
            return ""
        copies = self.world_groups.world_size // len(self.split.copy_ranks)
        is_alike = copies == self.dp.groups.world_size
        between = f"between the {copies} copies of the model" if is_alike else "of state and gradients"
        return (
            f"These are hf_zero's messages, {between}. Messages of the model itself (tensor or expert parallel), between ranks "
            f"{list(self.split.copy_ranks)} in forward and backward, are not counted."
        )

    @property
    def agreement(self) -> Transport | Agreement:
        """Connects the ranks that each have a share of a step's gradients."""
        if self.split.experts:
            # The groups of experts differ from the groups of other parameters.
            return self.world
        if self.dp.groups.shard_size == 1:
            # Ranks with the same part already have the same values.
            return self.model_parallel
        return self.dp.transport if self.split.is_empty else Agreement(self.dp.transport, self.model_parallel)


def _data_parallel(
    config: ZeroConfig, device: torch.device, copies: ModelCopies | None = None, ledger: Ledger | None = None
) -> DataParallelGroup:
    separate = None if copies is None else copies.dp_groups
    groups = Groups.create(stage=config.stage, device_type=device.type, comm=config.comm, separate=separate)
    return choose_group(groups, device, ledger)


def _between(sets: Sequence[Sequence[int]], device: torch.device, comm: CommConfig, ledger: Ledger) -> Transport:
    """Makes a transport between the ranks of each set, for agreements only."""
    groups = Groups.create(stage=1, device_type=device.type, comm=comm, separate=tuple(map(sorted, sets)))
    return choose_transport(groups, device, groups.timeout_s, ledger)
