"""At stage 3 a rank that runs out of memory takes part in the rest of the pass, and all ranks take the step again in parts."""

import numpy as np
import pytest
import torch
from ranks import RankFailedError, run_ranks
from test_rescue import HALVE, Run, rescued, runs_out

from hf_zero.config import ConfigError, ZeroConfig

pytestmark = pytest.mark.timeout(180)

# The layers of a small model would be one unit otherwise.
PLAIN = {"stage": 3, "unit_bytes": 0}
VARIANTS = [
    PLAIN,
    {**PLAIN, "reshard_after_forward": False, "grad_accumulation": "local"},
    {**PLAIN, "prefetch_units": 2, "offload": {"optimizer": "cpu", "params": "cpu"}},
]


@pytest.mark.short_cells("backward-2")
@pytest.mark.parametrize(
    ("when", "ranks", "variants"),
    [
        ("forward", 2, VARIANTS),
        ("backward", 2, [PLAIN, VARIANTS[2]]),
        ("backward", 2, [VARIANTS[1]]),
        ("forward", 3, [PLAIN]),
        ("backward", 3, [PLAIN]),
    ],
    ids=["forward-2", "backward-2", "backward-2-kept whole", "forward-3", "backward-3"],
)
def test_ranks_in_gathers_do_not_wait_for_the_one_that_fails(when, ranks, variants):
    run_ranks(rescued, world_size=ranks, time_limit_s=150, keyword_arguments={"variants": variants, "when": when})


class FailingRun(Run):
    """Raises once, before the collective of this number among those of forwards and backwards."""

    def __init__(self, rank: int, world_size: int, settings: dict, number: int, *, reentrant: bool | None = None):
        super().__init__(rank, world_size, settings)
        if reentrant is not None:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        self._left, self._is_inside = number if rank == 0 else -1, False
        if self.rescue is not None:
            self._ask = self.engine.transport._leaves_out
            self.engine.transport._leaves_out = self._before

    def part(self, inputs: dict, weight: float) -> torch.Tensor:
        self._is_inside = True
        try:
            return super().part(inputs, weight)
        finally:
            self._is_inside = False

    def _before(self) -> bool:
        if self._is_inside and self._left >= 0:
            self._left -= 1
            if self._left == -1:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return self._ask()


def at_each_collective(rank: int, world_size: int, *, variants: list[dict], reentrant: bool | None, every: int) -> list:
    """How many collectives the first step has, by variant: rank 0 has failed before each of them, or each some of them."""
    found = []
    for variant in variants:
        expected, number = {}, 0
        for parts in ((1, 2), (2, 2)):
            by_hand = FailingRun(rank, world_size, variant, -1, reentrant=reentrant)
            for step in range(2):
                by_hand.step(step, 4, 2, parts=parts[step])
            expected[parts] = by_hand.weights()
        while True:
            saved, parts = FailingRun(rank, world_size, {**HALVE, **variant}, number, reentrant=reentrant), []
            for step in range(2):
                saved.step(step, 4, 2)
                parts.append(saved.rescue.parts)
            if parts == [1, 1]:
                break
            theirs = expected[tuple(parts)]
            for name, values in saved.weights().items():
                assert np.array_equal(values, theirs[name]), (variant, number, name)
            number += every
        found.append(number)
    return found


@pytest.mark.slow
def test_a_failure_before_any_collective_of_two_steps_leaves_no_trace():
    arguments = {"variants": [PLAIN], "reentrant": None, "every": 1}
    [(number,), _] = run_ranks(at_each_collective, world_size=2, time_limit_s=150, keyword_arguments=arguments)
    # Four micro-batches, each with gathers of the root and of two layers, reductions, and an agreement.
    assert number >= 28


@pytest.mark.slow
@pytest.mark.parametrize(("reentrant", "ranks"), [(None, 2), (False, 3), (True, 2)])
@pytest.mark.timeout(1200)
def test_a_failure_before_every_third_collective_leaves_no_trace_in_all_variants(reentrant, ranks):
    """Kinds of collectives take turns by two, so that each is met."""
    variants = [*VARIANTS, {**PLAIN, "comm": {"weights": "int8"}}, {**PLAIN, "gather_dtype": "bfloat16"}]
    arguments = {"variants": variants, "reentrant": reentrant, "every": 3}
    run_ranks(at_each_collective, world_size=ranks, time_limit_s=1100, keyword_arguments=arguments)


def single_rows(rank: int, world_size: int) -> None:
    run = Run(rank, world_size, {**HALVE, **PLAIN})
    runs_out(run.model.transformer.h[0], 0, here=rank == 1)
    run.step(0, 2, 1)


def test_a_rank_without_memory_for_one_row_ends_the_run():
    with pytest.raises(RankFailedError, match=r"OutOfMemoryError|has ended"):
        run_ranks(single_rows, world_size=2, time_limit_s=90)


@pytest.mark.parametrize(
    "comm",
    [{"shard_group_size": 2}, {"secondary_shard": "node"}],
    ids=lambda comm: next(iter(comm)),
)
def test_gathers_that_cannot_be_repeated_are_refused(comm):
    with pytest.raises(ConfigError, match="out_of_memory: halve` does not go with `comm"):
        ZeroConfig.from_dict({**HALVE, **PLAIN, "comm": comm})
