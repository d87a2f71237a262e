"""A job under DDP and under the engine, compared to the last bit or closely."""

import numpy as np
from ranks import run_ranks
from shared_ranks import shared_ranks
from torch import nn
from training import (
    Job,
    compare_with_ddp,
)


def outcomes(job: Job, variants: list[dict], world_size: int = 2):
    """(DDP's, the engine's) for every rank and variant; asserts that the ranks end with identical parameters."""
    arguments = {"job": job, "variants": variants}
    if world_size == 2:
        by_rank = shared_ranks.run(compare_with_ddp, **arguments)
    else:
        by_rank = run_ranks(compare_with_ddp, world_size=world_size, time_limit_s=150, keyword_arguments=arguments)
    for variant in range(len(variants)):
        first = by_rank[0][variant][1].tensors
        for pairs in by_rank[1:]:
            outcome = pairs[variant][1]
            for name in outcome.parameter_names:
                assert np.array_equal(outcome.tensors[name], first[name]), (
                    f"{name} differs between ranks with {variants[variant]}"
                )
    return [(variants[v], *pair) for pairs in by_rank for v, pair in enumerate(pairs)]


def assert_bitwise(job: Job, variants: list[dict]) -> None:
    for settings, ddp, engine in outcomes(job, variants):
        assert engine.equals(ddp), f"{settings}: losses differ by {engine.loss_error(ddp)}"


def assert_close(job: Job, variants: list[dict], world_size: int = 2) -> None:
    for settings, ddp, engine in outcomes(job, variants, world_size):
        assert engine.loss_error(ddp) <= 1e-5, settings
        if job.max_norm is not None:
            assert engine.norm_error(ddp) <= 1e-6, settings


def checkpoint_activations(model: nn.Module, reentrant: bool) -> None:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
