"""Which ranks share one copy of the state, and which hold the same part of it."""

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist


@dataclass(frozen=True, kw_only=True)
class Groups:
    """The ranks of one engine.

    The shard group holds one copy of the sharded state between its ranks; the replicate group holds the ranks that own
    the same shard. Stage 0 is a shard group of one rank in a replicate group of all.

    Attributes:
        world_size, rank: of all ranks that train the model.
        shard_size, shard_rank: of the shard group.
        backend: name of the data backend; "local" for one rank without a process group.
        data: process group of the bulk data; None is the default group.
        gather: process group of the parameter all-gathers. At stage 3 on an accelerator it is a communicator of its own:
            gathers follow the order of forward and backward and reductions the order of buckets, and one communicator
            would ask all ranks for one common order of both.
        control: process group of the host's small agreements. On an accelerator it is a gloo group, so that agreeing
            does not stop the device's queue.
    """

    world_size: int
    rank: int
    shard_size: int
    shard_rank: int
    backend: str
    data: dist.ProcessGroup | None = None
    gather: dist.ProcessGroup | None = None
    control: dist.ProcessGroup | None = None

    @classmethod
    def create(cls, *, stage: int, device_type: str, timeout_s: float) -> "Groups":
        """The groups of this process. Collective: every rank calls it. Needs no process group at world size 1."""
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return cls(world_size=1, rank=0, shard_size=1, shard_rank=0, backend="local")
        world_size, rank = dist.get_world_size(), dist.get_rank()
        backend = _backend_for(device_type)
        sharded = stage > 0
        control = gather = None
        if backend not in ("gloo", "fake"):
            if stage == 3:
                gather = dist.new_group(backend=backend, timeout=timedelta(seconds=timeout_s))
            control = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        return cls(
            world_size=world_size,
            rank=rank,
            shard_size=world_size if sharded else 1,
            shard_rank=rank if sharded else 0,
            backend=backend,
            gather=gather,
            control=control,
        )


def _backend_for(device_type: str) -> str:
    # A group made with "cpu:gloo,cuda:nccl" has a backend a device type; one made with "gloo" has that for all.
    config = dist.get_backend_config()
    pairs = dict(part.split(":") for part in str(config).split(",") if ":" in part)
    return pairs.get(device_type, dist.get_backend())
