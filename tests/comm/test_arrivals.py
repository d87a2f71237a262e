"""Ranks that make process groups: one that ends, or does not come, is named by the others at once."""

import re
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from hf_zero.comm.groups import arrivals, own_groups
from hf_zero.comm.groups.arrivals import await_all_ranks
from hf_zero.comm.groups.groups import Groups
from hf_zero.comm.groups.processes import RankProcesses
from hf_zero.comm.transport import CommunicationError
from hf_zero.config import CommConfig

pytestmark = pytest.mark.timeout(120)


def on_two_ranks(target, **arguments) -> list:
    return run_ranks(target, world_size=2, time_limit_s=60, keyword_arguments=arguments)


def refusal(timeout_s: float = 1800.0) -> tuple[CommunicationError, float]:
    """The error with which groups are refused, and the seconds until then."""
    began_s = time.monotonic()
    with pytest.raises(CommunicationError) as caught:
        Groups.create(stage=2, device_type="cpu", comm=CommConfig(timeout_s=timeout_s))
    return caught.value, time.monotonic() - began_s


def one_ends(rank: int, world_size: int, when: str) -> None:
    RankProcesses().register()
    dist.barrier()
    if rank == 1:
        if when == "once all are there":
            await_all_ranks(60)
        return
    with mock.patch.multiple(own_groups, _MAKING_S=2.0, _MAKING_S_A_RANK=0.0):
        error, seconds = refusal()
    assert seconds < 10
    assert error.culprits == (1,)
    assert re.search("rank 1 ended", str(error)), error


@pytest.mark.parametrize("when", ["before it comes", "once all are there"])
def test_a_rank_that_ends_while_groups_are_made_ends_the_others_with_its_name(when):
    on_two_ranks(one_ends, when=when)


def one_is_late(rank: int, world_size: int) -> str | None:
    if rank == 1:
        # Not by a message: the one that gives up closes its connections.
        time.sleep(3)
        with pytest.raises(CommunicationError, match=r"rank 1 did not come within 1 s \(`comm.timeout_s`\)"):
            await_all_ranks(60)
        return
    with mock.patch.multiple(arrivals, _NOTICES_S=(0.2,), _LOOK_S=0.1), mock.patch("sys.stderr") as said:
        error, _ = refusal(timeout_s=1.0)
    assert error.culprits == (1,)
    assert "waited 0 s for rank 1." in said.write.call_args_list[0].args[0]
    time.sleep(3)


def test_a_rank_that_does_not_come_in_time_is_told_so_when_it_comes():
    on_two_ranks(one_is_late)


def is_slow_in_training(rank: int, world_size: int) -> float:
    with mock.patch.multiple(own_groups, _MAKING_S=1.0, _MAKING_S_A_RANK=0.0):
        group = Groups.create(stage=2, device_type="cpu", comm=CommConfig(timeout_s=30.0)).world.handle
    if rank == 1:
        time.sleep(2)
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    return total.item()


def test_the_limit_of_making_a_group_is_not_that_of_its_collectives():
    assert on_two_ranks(is_slow_in_training) == [2.0, 2.0]


def waits_for_a_late_one(rank: int, world_size: int) -> list[float]:
    group = Groups.create(stage=2, device_type="cpu", comm=CommConfig(timeout_s=1.0)).world.handle
    if rank == 1:
        time.sleep(3)
    with pytest.raises(RuntimeError):
        dist.all_reduce(torch.ones(1), group=group)


@pytest.mark.slow
def test_the_limit_of_a_groups_collectives_is_the_configs():
    on_two_ranks(waits_for_a_late_one)
