"""bf16 gathers of stage 3 beside what else gathers parameters: reads inside a forward, and secondary shards of a node."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from shared_ranks import on_ranks
from torch import nn
from training import Job, train

import hf_zero

pytestmark = pytest.mark.timeout(180)

GATHERED = {"stage": 3, "gather_dtype": "bfloat16", "bucket_bytes": "20KiB"}
GPT2 = Job(autocast=True, steps=4, max_norm=1.0)
NEAR = {"comm": {"secondary_shard": "node", "node_size": 2}}


def reading(name: str, before: str) -> Callable[[nn.Module], None]:
    """Prepares a model to read a whole parameter in its forward, before a module of it runs."""

    def prepare(model: nn.Module) -> None:
        parameter = model.get_parameter(name)

        def read(_module: nn.Module, _args: tuple) -> None:
            if torch.is_grad_enabled():
                with hf_zero.gathered(parameter):
                    assert parameter.dtype == torch.float32 and parameter.isfinite().all()

        model.get_submodule(before).register_forward_pre_hook(read)

    return prepare


READS = {
    "of a layer to come": ("transformer.h.2.mlp.c_fc.weight", "transformer.h.0.mlp"),
    "of a layer that has run": ("transformer.h.0.mlp.c_fc.weight", "transformer.h.2.mlp"),
    "of the layer that runs": ("transformer.h.1.attn.c_attn.weight", "transformer.h.1.mlp"),
}


@pytest.mark.parametrize(
    ("world_size", "more"),
    [(2, {}), pytest.param(4, {}, marks=pytest.mark.slow), pytest.param(4, NEAR, marks=pytest.mark.slow)],
    ids=["2 ranks", "4 ranks", "4 ranks with secondary shards"],
)
@on_ranks(time_limit_s=150)
def test_whole_parameters_read_inside_a_forward_leave_it_in_bf16(rank, world_size, more):
    job = replace(GPT2, steps=2, settings={**GATHERED, **more})
    plain = train(rank, world_size, job)
    for place, (name, before) in READS.items():
        found = train(rank, world_size, replace(job, prepare=reading(name, before)))
        assert found.equals(plain), f"{place}: {found.losses} for {plain.losses}"
    # With another dtype in between, autograd no longer adds up in bf16 the gradients of a weight's two uses, embedding and
    # head: each comes by itself, and they are added in float32.
    found = train(rank, world_size, replace(job, prepare=reading("transformer.wte.weight", "transformer.h.1")))
    assert found.losses == pytest.approx(plain.losses, rel=1e-4)


@pytest.mark.slow
@on_ranks(4, time_limit_s=150)
def test_secondary_shards_of_bf16_gathers_train_to_the_same_bits(rank, world_size):
    job = replace(GPT2, steps=3, accumulation=2)
    plain, near = (train(rank, world_size, replace(job, settings={**GATHERED, **more})) for more in ({}, NEAR))
    assert near.equals(plain), f"{near.losses} for {plain.losses}"
