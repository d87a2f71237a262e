"""A few local ranks that measure their link and try each collective of the engine; started by checks/links.py.

python -m hf_zero.diagnose.link_ranks FOLDER RANK WORLD_SIZE BACKEND
"""

import json
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from ..comm.choose import choose_transport
from ..comm.groups.groups import Groups
from ..comm.names import all_gather_flat
from ..comm.transport import Label, Transport
from ..config import CommConfig

_TIMEOUT_S = 30.0
_NUMEL = 4 * 2**20
_TURNS = 5
_SMALL_TURNS = 30


def main(folder: Path, rank: int, world_size: int, backend: str) -> None:
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
    found = {**measure(world_size, device), "wrong": wrong_collectives(rank, world_size, device)}
    dist.barrier()
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def measure(world_size: int, device: torch.device) -> dict[str, float]:
    """Latency in microseconds and achieved 1e9 bytes a second that a rank sends, of all-reduce and all-gather."""
    flat, part = (torch.ones(n, device=device) for n in (_NUMEL, _NUMEL // world_size))
    small = torch.ones(world_size, device=device)
    gathered = torch.empty(world_size * (_NUMEL // world_size), device=device)
    sent = flat.nbytes * (world_size - 1) / world_size
    return {
        "all_reduce_us": 1e6 * _seconds(lambda: dist.all_reduce(small), device, _SMALL_TURNS),
        "all_gather_us": 1e6 * _seconds(lambda: all_gather_flat(small, small[:1].clone()), device, _SMALL_TURNS),
        "all_reduce_gb": 2 * sent / _seconds(lambda: dist.all_reduce(flat), device, _TURNS) / 1e9,
        "all_gather_gb": sent / _seconds(lambda: all_gather_flat(gathered, part), device, _TURNS) / 1e9,
    }


def _seconds(call: Callable[[], object], device: torch.device, turns: int) -> float:
    seconds = []
    for _ in range(turns + 1):
        began_s = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began_s)
    return median(seconds[1:])


def wrong_collectives(rank: int, world_size: int, device: torch.device) -> list[str]:
    """The collectives of the engine's transport that give a wrong result."""
    groups = Groups.create(stage=2, device_type=device.type, comm=CommConfig(timeout_s=_TIMEOUT_S))
    transport = choose_transport(groups, device, _TIMEOUT_S)
    found = [f"{name} on rank {rank}" for name, is_right in _tried(transport, rank, world_size, device) if not is_right]
    return sorted({each for theirs in transport.exchange(found) for each in theirs})


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
    transport.meet("a trial", _TIMEOUT_S)
    return tried


def _label(kind: str) -> Label:
    return Label(kind=kind, subject="a trial")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
