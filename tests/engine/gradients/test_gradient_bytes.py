"""Gradient bytes of models too large for this machine: what lives at a time is what the plan says."""

import pytest
from cells import slow
from gradient_bytes import Measured, measure, over_plan
from ranks import run_alone

pytestmark = pytest.mark.timeout(300)


def measured(shape: str, dtype: str, ranks: int, stage: int, **more) -> Measured:
    arguments = {"shape": shape, "dtype": dtype, "ranks": ranks, "stage": stage, **more}
    return run_alone(measure, time_limit_s=250, keyword_arguments=arguments)


@pytest.mark.parametrize(
    ("stage", "bucket_bytes", "more"),
    [(2, "25MiB", {"layers": 16}), slow(2, "25MiB", {}), slow(3, "auto", {})],
    ids=["half of its layers", "all of them", "all of them at stage 3"],
)
def test_a_7b_models_gradients_pass_in_a_few_buffers(stage, bucket_bytes, more):
    """At 25 MiB every matrix is larger than a bucket should be."""
    found = measured("llama-7b", "bfloat16", 8, stage, bucket_bytes=bucket_bytes, **more)
    assert not over_plan([found]), found
    # The shard that waits for the step, and a tenth of the whole.
    assert found.live_bytes <= found.gradient_bytes * (1 / 8 + 1 / 10)


SHAPES = ("llama-7b", "llama-3-8b", "gpt2-xl", "bert-large")
RANKS = ((8, "bfloat16"), (64, "float32"))
EACH_STAGE = [(shape, *RANKS[(row + stage) % 2], stage) for row, shape in enumerate(SHAPES) for stage in range(4)]
"""Of each model, with one of the numbers of ranks in turn; of the first one also with the other."""
OTHERS = [("llama-7b", *RANKS[(stage + 1) % 2], stage) for stage in range(4)]


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "ranks", "dtype", "stage"), [*EACH_STAGE, *OTHERS])
def test_live_gradients_are_within_the_plan(shape, ranks, dtype, stage):
    found = measured(shape, dtype, ranks, stage)
    assert not over_plan([found]), found
    # The plan takes every shared buffer for the largest; most are made for smaller buckets.
    assert found.planned_bytes <= 1.05 * found.live_bytes, "the plan is far from what lives"


def test_an_accelerator_gathers_and_reduces_a_layer_at_a_time():
    found = measured("gpt2-xl", "bfloat16", 8, 3, layers=6)
    # Of each layer and of what is behind them matrices and the rest, which are in two groups; of the root its embeddings.
    assert len(found.bucket_sizes) <= 2 * 6 + 1 + 2
    assert len(found.collectives["reduce-scatter gradients"]) == len(found.bucket_sizes)
