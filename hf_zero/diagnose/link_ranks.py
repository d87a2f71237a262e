"""Local ranks, started by links.py, which measure their links and test each collective of the engine.

python -m hf_zero.diagnose.link_ranks FOLDER RANK WORLD_SIZE BACKEND TP_SIZE
"""

import json
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from ..comm.choice import choose_transport
from ..comm.collective import all_gather_flat
from ..comm.groups import Groups
from ..comm.model_copies import ModelCopies
from ..comm.own_groups import own_group
from ..comm.transport import Transport
from ..comm.waits import Label
from ..config import CommConfig

_TIMEOUT_S = 30.0
_NUMEL = 4 * 2**20
_TURNS = 5
_SMALL_TURNS = 30


def main(folder: Path, rank: int, world_size: int, backend: str, tp_size: int) -> None:
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group(
        f"cpu:gloo,cuda:{backend}" if backend == "nccl" else backend,
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=_TIMEOUT_S),
    )
    copies = ModelCopies.of([_copy_of(each, tp_size) for each in range(world_size)])
    found = {
        "tp": measure(copies.copies, device),
        "dp": measure(copies.dp_groups, device),
        "wrong": wrong_collectives(copies, device),
    }
    dist.barrier()
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def _copy_of(rank: int, tp_size: int) -> tuple[int, ...]:
    """Returns the ranks of a copy: neighbors, as in transformers' mesh."""
    first = rank - rank % tp_size
    return tuple(range(first, first + tp_size))


def measure(axis: Sequence[tuple[int, ...]], device: torch.device) -> dict[str, float] | None:
    """Measures all-reduce and all-gather: latency in microseconds, and 1e9 bytes sent per rank and second.

    All groups of the axis send at the same time, as in training.

    Args:
        axis: groups of equal size that together contain each rank once.

    Returns:
        The values of the slowest rank; None for groups of one rank.
    """
    size = len(axis[0])
    if size == 1:
        return None
    group = own_group(axis, timedelta(seconds=_TIMEOUT_S))
    flat, part = (torch.ones(n, device=device) for n in (_NUMEL, _NUMEL // size))
    small = torch.ones(size, device=device)
    gathered = torch.empty(size * (_NUMEL // size), device=device)
    sent = flat.nbytes * (size - 1) / size
    calls = [
        (lambda: dist.all_reduce(small, group=group), _SMALL_TURNS),
        (lambda: all_gather_flat(small, small[:1].clone(), group=group), _SMALL_TURNS),
        (lambda: dist.all_reduce(flat, group=group), _TURNS),
        (lambda: all_gather_flat(gathered, part, group=group), _TURNS),
    ]
    seconds = torch.tensor([_seconds(call, device, turns) for call, turns in calls], device=device)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    small_reduce_s, small_gather_s, reduce_s, gather_s = seconds.tolist()
    return {
        "all_reduce_us": 1e6 * small_reduce_s,
        "all_gather_us": 1e6 * small_gather_s,
        "all_reduce_gb": 2 * sent / reduce_s / 1e9,
        "all_gather_gb": sent / gather_s / 1e9,
    }


def _seconds(call: Callable[[], object], device: torch.device, turns: int) -> float:
    """Returns the median; the first turn is not counted."""
    seconds = []
    for _ in range(turns + 1):
        began_s = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began_s)
    return median(seconds[1:])


def wrong_collectives(copies: ModelCopies, device: torch.device) -> list[str]:
    """Lists collectives of the engine's transport with a wrong result, between ranks with the same part of a model."""
    comm = CommConfig(timeout_s=_TIMEOUT_S)
    groups = Groups.create(stage=2, device_type=device.type, comm=comm, separate=copies.dp_groups)
    transport = choose_transport(groups, device, _TIMEOUT_S)
    tried = _tried(transport, groups.rank, groups.world_size, device)
    found: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(found, [f"{name} on rank {dist.get_rank()}" for name, is_right in tried if not is_right])
    return sorted({each for theirs in found for each in theirs})


def _tried(transport: Transport, rank: int, world_size: int, device: torch.device) -> list[tuple[str, bool]]:
    ranks = torch.arange(world_size, dtype=torch.float32, device=device)
    flat, out = ranks + rank, torch.empty(1, device=device)
    transport.start_reduce_scatter(flat, out, _label("reduce-scatter")).finish()
    total = float(sum(range(world_size)))
    tried = [("reduce-scatter", out.item() == world_size * rank + total)]
    gathered = torch.empty(world_size, device=device)
    transport.start_all_gather(gathered, torch.full((1,), float(rank), device=device), _label("all-gather")).finish()
    tried.append(("all-gather", torch.equal(gathered, ranks)))
    swapped = torch.empty(world_size, device=device)
    transport.start_all_to_all(ranks * 10 + rank, swapped, _label("all-to-all")).finish()
    tried.append(("all-to-all", torch.equal(swapped, ranks + 10 * rank)))
    sent = torch.full((3,), float(rank + 1), device=device)
    transport.broadcast(sent, _label("broadcast"))
    tried.append(("broadcast", sent.tolist() == [1.0] * 3))
    summed = transport.agree_sum(torch.full((2,), float(rank), device=device), _label("sum"))
    tried.append(("sum of small values", summed.tolist() == [total] * 2))
    largest = transport.agree_max(torch.tensor([rank, -rank]), _label("maximum"))
    tried.append(("maximum of small values", largest.tolist() == [world_size - 1, 0]))
    tried.append(("exchange", transport.exchange(rank) == list(range(world_size))))
    transport.barrier("probe", _TIMEOUT_S)
    return tried


def _label(kind: str) -> Label:
    return Label(kind=kind, subject="a probe")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], int(sys.argv[5]))
