"""Checks that the ranks of a model that is split over them work together: same batches, same values where all have them."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ...buckets.bucket import Bucket
from ...buckets.memory import UnshardedMemory
from ...comm.transport import Transport
from ...layout.boxes import Box
from ...optimizer.state.replicas import ReplicasDivergedError, checksum
from .split_model import SplitModel

_FORWARDS = 2
_STEPS = 2


class DifferentBatchesError(RuntimeError):
    """Ranks that hold one copy of a model together were given different batches."""


class CopyChecks:
    """Compares, in the first forwards and steps, what the ranks of a copy have to have in common.

    Args:
        everyone: all ranks, who fail together.
        copy: the ranks of this copy of the model.
        buckets: of trained and of frozen parameters.
    """

    def __init__(self, split: SplitModel, everyone: Transport, copy: Transport, buckets: Sequence[Bucket]):
        self._split = split
        self._everyone = everyone
        self._forwards = self._steps = 0
        self._buckets = buckets
        self._ranks = everyone.exchange(tuple(split.ranks), "ranks of a copy of the model")
        place = split.ranks.index(torch.distributed.get_rank())
        self._held_before = _held_before(copy.exchange((place, split.boxes()), "parts of the model"), place)

    @property
    def compares_batches(self) -> bool:
        """Whether the next forward's batch is to be compared."""
        return self._forwards < _FORWARDS

    def is_first_with(self, name: str) -> bool:
        """Whether this rank is the first of its copy that has its part of a parameter."""
        return name not in self._held_before

    def compare_batches(self, args: tuple, kwargs: Mapping[str, Any]) -> None:
        """Raises `DifferentBatchesError`, on all ranks, where those of a copy have different batches. Collective."""
        self._forwards += 1
        digests = self._everyone.exchange(_digest([*args, *kwargs.values()]), "comparison of batches")
        for ranks in dict.fromkeys(self._ranks):
            other = next((rank for rank in ranks if digests[rank] != digests[ranks[0]]), None)
            if other is not None:
                raise DifferentBatchesError(
                    f"hf_zero: ranks {ranks[0]} and {other} hold one copy of the model together (tensor or expert parallel, "
                    f"ranks {list(ranks)}) and were given different batches, so that what they compute is of neither. Give "
                    "them the same: in a loop of your own, sample by engine.groups.rank of engine.groups.world_size in place "
                    "of the process's rank; with accelerate, prepare the dataloader with ZeroPlugin(tp_size=...)."
                )

    def is_due(self, step: int, *, every: int) -> bool:
        """Whether values are compared behind this step: the first few, and each `every`-th."""
        return step <= _STEPS or (every > 0 and step % every == 0)

    @torch.no_grad()
    def compare_values(self, step: int) -> None:
        """Raises `ReplicasDivergedError` where a parameter that is not split has become different ones. Collective."""
        mine = self._checksums()
        everyone = self._everyone.exchange(mine, "comparison of what is not split")
        for ranks in dict.fromkeys(self._ranks):
            for rank in ranks[1:]:
                first, other = everyone[ranks[0]], everyone[rank]
                for key in first.keys() & other.keys():
                    if first[key] != other[key]:
                        raise ReplicasDivergedError(
                            f"hf_zero: the parameter {key[0]!r} is not split over ranks {list(ranks)}, which hold one copy of "
                            f"the model together, and by step {step} rank {rank} has other values of it than rank {ranks[0]}. "
                            "Their gradients were different: a layer behind it works on part of what the other ranks have and "
                            "does not sum its gradients, or dropout was seeded otherwise. See the model's tp_plan for it."
                        )

    def _checksums(self) -> dict[tuple[str, int, int], int]:
        """Of each run of elements that this rank has of parameters that are not split: name and interval → checksum."""
        held: dict[tuple[str, int, int], torch.Tensor] = {}
        for bucket in self._buckets:
            own = None if isinstance(bucket.memory, UnshardedMemory) else bucket.memory.read_own()
            for slot in bucket.slots:
                if slot.parameter in self._split.parts:
                    continue
                if own is None:
                    held[slot.name, 0, slot.interval.numel] = slot.view_of(bucket.flat)
                    continue
                common = slot.interval.intersect(bucket.own_interval)
                if common is not None:
                    in_own, run = common.shift(-bucket.own_interval.start), common.shift(-slot.interval.start)
                    held[slot.name, run.start, run.stop] = own[in_own.start : in_own.stop]
        sums = torch.stack([checksum(values) for values in held.values()]).tolist() if held else []
        return dict(zip(held, sums, strict=True))


def _held_before(everyone: Sequence[tuple[int, Mapping[str, Box]]], place: int) -> set[str]:
    """Names of the parameters of which a rank with a smaller place has the same part."""
    found = {of_rank: boxes for of_rank, boxes in everyone}
    mine = found[place]
    return {name for before in range(place) for name, box in found[before].items() if mine.get(name) == box}


def _digest(values: Sequence[Any]) -> str:
    digest = hashlib.sha256()
    for value in values:
        if isinstance(value, Mapping):
            digest.update(_digest(list(value.values())).encode())
        elif isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
            digest.update(str((value.dtype, tuple(value.shape))).encode())
            digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
