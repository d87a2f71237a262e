"""New memory holds anything on an accelerator, and is mostly zeros on the host: here it is filled with NaN before use."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from cells import slow
from shared_ranks import on_ranks
from training import Job, train

from hf_zero import device

pytestmark = pytest.mark.timeout(180)

IN_BLOCKS = {"weights": "int8", "gradients": "int8"}
CASES = [
    {},
    {"param_dtype": "bfloat16"},
    {"comm": IN_BLOCKS},
    {"comm": IN_BLOCKS, "param_dtype": "bfloat16"},
    {"comm": {"gradients": "int4"}, "kernels": "always"},
    {"kernels": "always", "moments": "8bit"},
]


@contextmanager
def memory_that_holds_anything() -> Iterator[None]:
    """Every byte of `device.allocate` is 0xff, and every element of `torch.empty` is NaN or the greatest integer."""
    make_arena = device._HostArena.__init__

    def make_filled(arena: device._HostArena, *arguments, **keyword_arguments) -> None:
        make_arena(arena, *arguments, **keyword_arguments)
        arena.bytes.fill_(0xFF)

    device._HostArena.__init__ = make_filled
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.empty(1).isnan() and device.allocate(1, torch.float32, torch.device("cpu")).isnan()
        yield
    finally:
        device._HostArena.__init__ = make_arena
        torch.use_deterministic_algorithms(False)


# Each stage that shards, and each setting of the cases but 8-bit moments.
SOME = list(zip([CASES[1], *CASES[3:5]], (3, 1, 2), strict=True))
EVERY = [(settings, stage) for settings in CASES for stage in range(4) if stage or "comm" not in settings]


@pytest.mark.parametrize(
    ("world_size", "cells"), [(2, SOME), slow(2, EVERY), slow(3, EVERY)], ids=["2", "2-every", "3-every"]
)
@on_ranks(time_limit_s=170)
def test_what_memory_held_before_reaches_no_loss(rank, world_size, cells):
    for settings, stage in cells:
        job = Job(steps=2, accumulation=2, max_norm=0.5, settings={"stage": stage, "bucket_bytes": "20KiB", **settings})
        defined = train(rank, world_size, job)
        with memory_that_holds_anything():
            anything = train(rank, world_size, job)
        assert anything.equals(defined) and anything.norms == defined.norms, (stage, settings, anything.losses)
