"""Whether host memory and disk can hold the offloaded state."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ..buckets.precision import resolve_precision
from ..buckets.unread_weights import is_loaded, wanted_dtype
from ..comm.all_or_none import all_or_none
from ..comm.groups import Groups, RankGroup
from ..comm.transport import Transport
from ..config import AUTO, OuterConfig, ZeroConfig
from ..device import available_host_bytes, free_bytes, ranks_on_this_host
from ..layout.blocks import block_bytes, is_in_blocks
from ..offload.files import free_disk_bytes
from ..offload.host_memory import disk_fault, host_memory_fault
from ..offload.shards import ParameterTier
from ..offload.tiers import Tier
from ..optimizer.scope import steps_on_device
from ..optimizer.trial_step import state_kinds
from .split_model import Mesh

_ROOM_TO_KEEP_WHOLE = 4
"""`reshard_after_forward: auto` keeps parameters whole if they need less than 1 / this number of the free memory."""


@dataclass(frozen=True, kw_only=True)
class Elsewhere:
    """Bytes stored by a rank outside of the training device."""

    host: int
    disk: int


def bytes_elsewhere(
    model: nn.Module,
    config: ZeroConfig,
    tier: Tier,
    parameter_tier: ParameterTier,
    owner: Mapping[nn.Parameter, tuple[int, int]],
    optimizers: Sequence[torch.optim.Optimizer],
    mesh: Mesh,
) -> Elsewhere:
    """Counts the bytes moved by `offload` to host memory and to files. State of unknown size counts nothing."""
    offload, host, disk = config.offload, 0, 0

    def share(parameters: Iterable[nn.Parameter]) -> int:
        sizes = Counter[int]()
        for p in parameters:
            sizes[_shards_of(mesh, p)] += p.numel() * _itemsize(config, p)
        return sum(size // shards for shards, size in sizes.items())

    if offload.moves_state:
        on_disk = offload.optimizer == "nvme"
        moved = _state_bytes(
            config,
            owner,
            optimizers,
            mesh,
            separate_master=parameter_tier.separates_masters(tier),
            copies=tier.copies_masters and not offload.moves_params,
            with_gradients=tier.is_offloaded and not on_disk,
        )
        # A lower bound, because whole buckets move. Anchors of outer steps are stored with masters.
        moved = int(offload.ratio * (moved + _anchor_bytes(config, owner, mesh.dp.all_groups)))
        host, disk = (0, moved) if on_disk else (moved, 0)
    if offload.moves_params:
        # Parameters already in host memory free their memory there.
        there = 0 if offload.params == "nvme" else sum(p.nbytes for p in model.parameters() if _is_in_memory(p))
        moved = max(0, share(model.parameters()) - there)
        host, disk = (host, disk + moved) if offload.params == "nvme" else (host + moved, disk)
        if offload.params == "nvme" and offload.moves_state:
            # Both counts above include fp32 parameters, which are their own masters and have only one file.
            equal = [p for p in owner if not resolve_precision(config, wanted_dtype(p)).rounds]
            once = share(equal)
            host, disk = (host, disk - once) if offload.optimizer == "nvme" else (host - once, disk)
    return Elsewhere(host=host, disk=disk)


def _state_bytes(
    config: ZeroConfig,
    owner: Mapping[nn.Parameter, tuple[int, int]],
    optimizers: Sequence[torch.optim.Optimizer],
    mesh: Mesh,
    *,
    separate_master: bool,
    copies: bool,
    with_gradients: bool,
) -> int:
    """Counts bytes of masters, optimizer state and, with `with_gradients`, reduced gradients of a rank's part.

    State that cannot be known beforehand is not counted.

    Args:
        owner: (optimizer, group) of each trained parameter.
        separate_master: whether masters are separate from parameters with the same dtype.
        copies: see `Precision`.
    """
    kinds: dict[tuple, list[int]] = {}
    # Bytes by the number of ranks sharing them.
    total = Counter[int]()
    for parameter, (index, group) in owner.items():
        precision = resolve_precision(config, wanted_dtype(parameter), separate_master=separate_master, copies=copies)
        key = (index, group, precision.master)
        # Run one trial step per group and dtype, because a model may have thousands of parameters.
        if key not in kinds:
            optimizer = optimizers[index] if index >= 0 else None
            found = state_kinds(optimizer, optimizer.param_groups[group], precision.master) if optimizer else ()
            kinds[key] = [dtype.itemsize for _, dtype in found or ()]
        master = precision.master.itemsize if precision.keeps_master else 0
        gradient = precision.master.itemsize if with_gradients else 0
        numel = parameter.numel()
        packed = config.quantizes_moments and is_in_blocks(numel)
        state = len(kinds[key]) * block_bytes(numel) if packed else numel * sum(kinds[key])
        total[_shards_of(mesh, parameter)] += state + numel * (master + gradient)
    return sum(nbytes // shards for shards, nbytes in total.items())


def _shards_of(mesh: Mesh, parameter: nn.Parameter) -> int:
    return mesh.group_of(parameter).groups.shard_size


def has_room_to_step(
    config: ZeroConfig,
    owner: Mapping[nn.Parameter, tuple[int, int]],
    optimizers: Sequence[torch.optim.Optimizer],
    device: torch.device,
    mesh: Mesh,
) -> bool:
    """Whether offloaded optimizer state is copied to the device for its step there. Collective if this is possible."""

    def least_free() -> int:
        # All ranks get the same answer: the arithmetic of the device rounds differently, and copies of a shard would differ.
        there = sum(p.nbytes for p in owner if p.device == device)
        return min(mesh.world.exchange(free_bytes(device) + there))

    return steps_on_device(config, optimizers, device, [(p, _shards_of(mesh, p)) for p in owner], least_free)


def anchor_numel(shard_numel: int, among: RankGroup, outer: OuterConfig) -> int:
    """Counts elements of an outer step's anchor and momentum on each of the ranks `among`, which store the same shard."""
    return -(-shard_numel // among.size) * (2 if outer.momentum else 1)


def _anchor_bytes(config: ZeroConfig, trained: Iterable[nn.Parameter], groups: Groups) -> int:
    """Counts bytes of outer steps' state on a rank."""
    if groups.outer is None:
        return 0
    masters = sum(p.numel() * resolve_precision(config, wanted_dtype(p)).master.itemsize for p in trained)
    return anchor_numel(masters // groups.shard_size, groups.outer, config.comm.outer)


def _is_in_memory(parameter: nn.Parameter) -> bool:
    return parameter.device.type == "cpu" and not is_loaded(parameter)


def _itemsize(config: ZeroConfig, parameter: nn.Parameter) -> int:
    dtype = wanted_dtype(parameter)
    return (resolve_precision(config, dtype).kept if parameter.requires_grad else dtype).itemsize


def refuse_unless_it_fits(config: ZeroConfig, needed: Elsewhere, transport: Transport) -> None:
    """Raises on every rank if the offloaded state does not fit into host memory or on the disk.

    Collective if something is offloaded.

    Raises:
        MemoryError: the state does not fit into host memory.
        OSError: the state does not fit on the disk.
    """
    offload, ranks = config.offload, ranks_on_this_host()
    if not (offload.moves_state or offload.moves_params):
        return
    wanted = {name: getattr(offload, name) for name in ("optimizer", "params")}
    kinds = {
        tier: " with ".join(f"offload.{n}: {t}" for n, t in wanted.items() if t == tier) for tier in ("cpu", "nvme")
    }

    def measure() -> None:
        if kinds["cpu"]:
            fault = host_memory_fault(needed.host, available_host_bytes(), ranks, kinds["cpu"])
            if fault is not None:
                raise MemoryError(fault)
        if kinds["nvme"]:
            free = free_disk_bytes(offload.files_folder)
            fault = disk_fault(needed.disk, free, ranks, str(offload.nvme_path), kinds["nvme"])
            if fault is not None:
                raise OSError(fault)

    all_or_none(
        transport.exchange,
        measure,
        expected=(MemoryError, OSError),
        tell=lambda error: (MemoryError if isinstance(error, MemoryError) else OSError, str(error)),
        error=lambda _, kind_and_reason: kind_and_reason[0](kind_and_reason[1]),
    )


def reshards_after_forward(config: ZeroConfig, model: nn.Module, device: torch.device, transport: Transport) -> bool:
    """Whether a layer is dropped after its forward. `auto`, which is collective, keeps layers if they need little free memory."""
    if config.reshard_after_forward != AUTO:
        return config.reshard_after_forward
    whole = sum(p.nbytes for p in model.parameters())
    # Use the minimum of free memory, so that all ranks get the same answer: a gather in backward needs all ranks.
    return whole * _ROOM_TO_KEEP_WHOLE > min(transport.exchange(free_bytes(device)))
