"""The stand-in device's process group keeps to NCCL's rules, and shows what breaks them."""

import pytest
import standin_device
import torch
import torch.distributed as dist
from shared_ranks import on_ranks

from hf_zero.comm.collective import all_gather_flat, reduce_scatter_flat

pytestmark = [pytest.mark.timeout(400), standin_device.needs_compiler]

LIMIT_S = 4.0
"""Of those that run into it."""


def there(*values: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype).to(standin_device.NAME)


def sums_and_moves(rank: int, compiled) -> None:
    total, flat, part = there(rank + 1.0), there(0, 0, 0, 0), there(7, 7)
    dist.all_reduce(total)
    flat[2 * rank : 2 * rank + 2].copy_(there(rank, rank + 0.5))
    all_gather_flat(flat, flat[2 * rank : 2 * rank + 2])
    reduce_scatter_flat(part, flat)
    root = there(rank, dtype=torch.int64)
    dist.broadcast(root, src=1)
    swapped = there(0, 0)
    dist.all_to_all_single(swapped, there(10 * rank, 10 * rank + 1))
    found = [each.tolist() for each in (total, flat, part, root, swapped)]
    assert found == [[3], [0, 0.5, 1, 1.5], [2, 3] if rank else [0, 1], [1], [rank, 10 + rank]]
    assert compiled.hazards() == compiled.crossings() == []
    host = torch.ones(2)
    dist.all_reduce(host)
    dist.barrier()
    assert host.tolist() == [2, 2], "the host's tensors have gloo"


def holds_up_the_stream_alone(rank: int, compiled) -> None:
    ours = there(1, 2)
    if rank == 0:
        work = dist.all_reduce(ours, async_op=True)
        # The host goes on, though the peer comes only when it has been told to.
        work.wait()
        dist.send(torch.ones(1), dst=1)
    else:
        dist.recv(torch.ones(1), src=0)
        dist.all_reduce(ours)
    assert ours.tolist() == [2, 4]


def shows_who_does_not_wait(rank: int, compiled) -> None:
    flat, own = there(0, 0), there(rank + 1)
    work = all_gather_flat(flat, own, async_op=True)
    assert flat.isnan().all(), "a result that nobody waited for is there"
    own.zero_()
    work.wait()
    assert flat.tolist() == [1, 2]
    assert len(compiled.hazards()) == 1 and "an input was written before the end: all-gather" in compiled.hazards()[0]
    stream = torch.Stream(device=torch.device(standin_device.NAME, rank))
    work = all_gather_flat(flat, there(rank + 3), async_op=True)
    with torch.get_device_module(standin_device.NAME).stream(stream):
        work.wait()
    assert flat.isnan().all(), "another stream has waited"
    stream.synchronize()
    assert flat.tolist() == [3, 4]


def refuses(rank: int, compiled) -> None:
    with pytest.raises(RuntimeError, match="there is no dtype Short"):
        dist.broadcast(there(1, dtype=torch.int16), src=0)
    with pytest.raises(RuntimeError, match="there is no dtype UInt16"):
        dist.all_reduce(there(1, dtype=torch.uint16))
    with pytest.raises(RuntimeError, match="contiguous"):
        dist.all_reduce(there(1, 2, 3, 4).view(2, 2).t())
    with pytest.raises(RuntimeError, match="all-to-all: 3 elements are not equal parts for 2 ranks"):
        dist.all_to_all_single(there(0, 0, 0), there(1, 2, 3))
    with pytest.raises(RuntimeError, match="all-to-all: sizes or dtypes"):
        dist.all_to_all_single(there(0, 0, 0, 0), there(1, 2))
    alone = dist.new_group(backend=standin_device.BACKEND)
    with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
        dist.all_reduce(torch.ones(1), group=alone)
    dist.all_reduce(there(1))
    with pytest.raises(RuntimeError, match="this communicator is of device"):
        dist.all_reduce(torch.ones(1, device=f"{standin_device.NAME}:3"))


def hangs_and_names(rank: int, compiled) -> None:
    ours = there(1, 2)
    work = dist.all_reduce(ours, async_op=True) if rank else dist.broadcast(ours, src=0, async_op=True)
    work.wait()
    mine, other = ["broadcast", "all-reduce"][:: 1 - 2 * rank]
    named = f"rank {rank} was in {mine} of 2 Float .*rank {1 - rank} in {other} of 2 Float .*the time limit of 4 s"
    with pytest.raises(RuntimeError, match=named):
        ours.tolist()


def names_who_comes_alone(rank: int, compiled) -> None:
    if rank == 0:
        ours = there(1, 2)
        dist.all_reduce(ours)
        with pytest.raises(RuntimeError, match=r"rank 0 was alone in all-reduce of 2 Float .*the time limit of 4 s"):
            ours.tolist()
    # The peer stays that long.
    host = torch.ones(1)
    dist.all_reduce(host, group=dist.new_group(backend="gloo"))


def reports_crossed_orders(rank: int, compiled) -> None:
    other = dist.new_group(backend=standin_device.BACKEND)
    first, second = there(1), there(2)
    order = [(None, first), (other, second)] if rank else [(other, second), (None, first)]
    works = [dist.all_reduce(ours, group=group, async_op=True) for group, ours in order]
    for work in works:
        work.wait()
    assert (first + second).tolist() == [6]
    assert len(compiled.crossings()) == 1 and compiled.crossings()[0].count("all-reduce of 1 Float") == 2


CHECKS = {
    "sums and moves": sums_and_moves,
    "wait holds the stream up, and not the host": holds_up_the_stream_alone,
    "results and inputs before the wait are shown": shows_who_does_not_wait,
    "other dtypes and devices are refused": refuses,
    "other collectives hang and are named": hangs_and_names,
    "who comes alone is named": names_who_comes_alone,
    "crossed orders of two communicators are reported": reports_crossed_orders,
}

HANGING = ("other collectives hang and are named", "who comes alone is named")


@pytest.mark.short_cells(
    "sums and moves",
    "wait holds the stream up, and not the host",
    "results and inputs before the wait are shown",
    "other dtypes and devices are refused",
    "crossed orders of two communicators are reported",
)
@pytest.mark.parametrize("check", CHECKS)
@on_ranks(2)
def test_collectives_keep_to_nccls_rules(rank, world_size, check, library, tmp_path):
    folder = str(tmp_path)
    compiled = standin_device.register(library)
    torch.get_device_module(standin_device.NAME).set_device(rank)
    with standin_device.process_group(rank, world_size, folder, timeout_s=LIMIT_S if check in HANGING else 60.0):
        CHECKS[check](rank, compiled)
