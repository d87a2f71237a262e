"""How large buckets are, and how many of their buffers there are at a time."""

from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hf_zero.buckets.precision import choose_sizes, cost_of
from hf_zero.comm.groups import Groups, RankGroup
from hf_zero.config import ZeroConfig
from hf_zero.engine.gradient_store import BufferPool
from hf_zero.layout.slots import ParameterSpec, plan_buckets, pool_numel
from hf_zero.offload.copies import landing_in, widen_in_place

MIB = 2**20
HOST, DEVICE = torch.device("cpu"), torch.device("meta")


def groups(ranks: int, nodes: int = 1) -> Groups:
    everyone = RankGroup(ranks=tuple(range(ranks)), place=0)
    alone = RankGroup(ranks=(0,), place=0)
    made = Groups(backend="fake", world=everyone, shard=everyone, replicate=alone, gather=everyone)
    return replace(made, nodes=tuple(rank * nodes // ranks for rank in range(ranks)))


def model_of(megabytes: int) -> nn.Module:
    with DEVICE:
        return nn.ModuleList([nn.Linear(MIB // 4, 1, bias=False) for _ in range(megabytes)])


def auto_mib(megabytes: int, made: Groups, device: torch.device, stage: int = 2, **settings) -> float:
    return choose_sizes(model_of(megabytes), ZeroConfig(stage=stage, **settings), made, device).numel * 4 / MIB


def test_the_host_keeps_its_sizes_and_so_does_one_gpu():
    for made, device in ((groups(8), HOST), (groups(1), DEVICE)):
        assert [auto_mib(n, made, device) for n in (1, 80, 400)] == [1, 10, 25]
        assert auto_mib(400, made, device, stage=3) == 32


def test_on_gpus_sizes_grow_with_the_model_and_the_ranks():
    assert auto_mib(800, groups(8), DEVICE) == pytest.approx(75.9, rel=0.01)
    sizes = [auto_mib(n, groups(8), DEVICE) for n in (1, 100, 400, 1600)]
    assert sizes == sorted(sizes) and sizes[0] >= 1
    assert auto_mib(1600, groups(64, nodes=8), DEVICE) > auto_mib(1600, groups(8), DEVICE)
    assert auto_mib(400, groups(64, nodes=8), DEVICE) == 50, "an eighth"
    assert choose_sizes(model_of(4), ZeroConfig(stage=3), groups(8), DEVICE).layer_numel > 10**15
    said = choose_sizes(model_of(4), ZeroConfig(stage=3, bucket_bytes="2MiB"), groups(8), DEVICE)
    assert said.layer_numel == said.numel == MIB // 2


@given(total=st.integers(10**6, 10**11), ranks=st.sampled_from([2, 8, 16, 64, 512]), nodes=st.sampled_from([1, 2, 8]))
def test_no_other_number_of_buckets_costs_less(total, ranks, nodes):
    cost = cost_of(ranks=ranks, nodes=min(nodes, ranks))

    def seconds(bucket: float) -> float:
        return total / bucket * cost.latency_s + bucket / cost.bytes_a_second

    best = cost.bucket_bytes(total)
    assert all(seconds(best) <= seconds(best * factor) * (1 + 1e-9) for factor in (0.5, 0.9, 1.1, 2))
    assert seconds(2 * best) == pytest.approx(1.25 * seconds(best), rel=1e-3)


some_buckets = given(
    sizes=st.lists(st.integers(1, 5000), min_size=1, max_size=40),
    bucket=st.integers(50, 3000),
    limit=st.integers(1, 4),
)


@some_buckets
def test_oversize_buffers_count_as_the_others_do(sizes, bucket, limit):
    specs = [ParameterSpec(name=str(i), numel=numel, key="k") for i, numel in enumerate(sizes)]
    buckets = plan_buckets(specs, bucket_numel=bucket, shards=2)
    largest = max(each.numel for each in buckets)
    small = sum(each.numel for each in buckets if not each.oversize)
    assert pool_numel(buckets, limit) <= limit * largest + small
    assert pool_numel(buckets, limit) <= pool_numel(buckets, limit + 1)


@some_buckets
def test_buffers_taken_in_the_order_of_buckets_are_at_most_as_large_as_planned(sizes, bucket, limit):
    specs = [ParameterSpec(name=str(i), numel=numel, key="k") for i, numel in enumerate(sizes)]
    layouts = plan_buckets(specs, bucket_numel=bucket, shards=2)
    buckets = [Mock(layout=layout, precision=Mock(reduce=torch.float32)) for layout in layouts]
    pool, in_use = BufferPool(buckets, limit, DEVICE), []
    for each in buckets:
        while pool.exhausted_for(each):
            pool.give_back(*in_use.pop(0))
        in_use.append((each, pool.take(each)))
    assert pool.most_bytes <= 4 * pool_numel(layouts, limit)


def test_embeddings_at_both_ends_of_a_model_are_not_planned_at_the_same_time():
    numels = [8192, *([512] * 20), 8192]
    specs = [ParameterSpec(name=str(i), numel=numel, key="k") for i, numel in enumerate(numels)]
    assert pool_numel(plan_buckets(specs, bucket_numel=512, shards=2), 3) == 8192 + 512 + 512


def test_one_large_bucket_does_not_set_the_size_of_all_buffers():
    specs = [ParameterSpec(name=str(i), numel=numel, key="k") for i, numel in enumerate([*([768] * 8), 1024])]
    layouts = plan_buckets(specs, bucket_numel=1024, shards=2)
    assert [each.numel for each in layouts] == [1024, *([768] * 8)] and pool_numel(layouts, 3) == 1024 + 768 + 768


@given(numel=st.integers(1, 40_000), narrow=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]))
def test_values_are_widened_in_the_memory_that_they_have_come_to(numel, narrow):
    wide = torch.float64 if narrow == torch.float32 else torch.float32
    values = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(narrow)
    target = torch.full((numel,), float("nan"), dtype=wide)
    landing_in(target, narrow).copy_(values)
    widen_in_place(target, narrow)
    assert torch.equal(target, values.to(wide))
