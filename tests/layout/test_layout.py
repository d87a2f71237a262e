"""How parameters lie in buckets, how large buckets are, and how many of their buffers there are at a time."""

from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from hf_zero.buckets.sizes import choose_sizes, cost_of
from hf_zero.comm.groups import Groups, RankGroup
from hf_zero.config import ZeroConfig
from hf_zero.layout.blocks import BLOCK_NUMEL, IN_BLOCKS
from hf_zero.layout.boxes import Box
from hf_zero.layout.buckets import SHARD_ALIGN_NUMEL, SLOT_ALIGN_NUMEL, ParameterSpec, plan_buckets, rows_of_shard
from hf_zero.layout.gradient_buffers import pool_growth, pool_numel
from hf_zero.layout.intervals import Interval, doubly_covered, even_cuts, joined_cuts, uncovered, without_ranks
from hf_zero.layout.pieces import pieces_for
from hf_zero.offload.copies import landing_in, widen_in_place
from hf_zero.step.buffer_pool import BufferPool

parameters = st.lists(
    st.tuples(st.integers(0, 3000), st.sampled_from(["decay", "plain", "half"])), min_size=1, max_size=25
).map(lambda sizes: [ParameterSpec(name=f"p{i}", numel=n, key=k) for i, (n, k) in enumerate(sizes)])
worlds = st.sampled_from([1, 2, 3, 4, 7, 64])
caps = st.integers(1, 5000)
any_parameters = st.tuples(parameters, st.booleans()).map(
    lambda drawn: [replace(spec, intact=drawn[1]) for spec in drawn[0]]
)


@given(any_parameters, worlds, caps)
def test_every_parameter_has_one_slot_in_a_bucket_of_its_key(specs, shards, cap):
    buckets = plan_buckets(specs, bucket_numel=cap, shards=shards)
    slots = [(slot, bucket) for bucket in buckets for slot in bucket.slots]
    assert sorted(slot.name for slot, _ in slots) == sorted(spec.name for spec in specs)
    of_name = {spec.name: spec for spec in specs}
    for slot, bucket in slots:
        assert slot.interval.numel == of_name[slot.name].numel
        assert bucket.key == of_name[slot.name].key
        assert slot.interval.start % SLOT_ALIGN_NUMEL == 0
    for index, bucket in enumerate(buckets):
        assert bucket.index == index
        assert bucket.numel == bucket.shard_numel * shards
        assert bucket.shard_numel % SHARD_ALIGN_NUMEL == 0
        intervals = [slot.interval for slot in bucket.slots]
        assert not doubly_covered([interval for interval in intervals if interval.numel])
        assert sum(i.numel for i in intervals) + sum(gap.numel for gap in bucket.padding) == bucket.numel
        assert len(bucket.slots) == 1 or bucket.intact or bucket.slots[-1].interval.stop <= cap


@given(any_parameters, worlds, caps)
def test_rows_of_all_ranks_cover_every_parameter_once(specs, shards, cap):
    buckets = plan_buckets(specs, bucket_numel=cap, shards=shards)
    found: dict[str, list[Interval]] = {spec.name: [] for spec in specs}
    for bucket in buckets:
        for rank in range(shards):
            for row in rows_of_shard(bucket, rank):
                assert row.in_parameter.numel == row.in_shard.numel
                assert row.in_shard.stop <= bucket.shard_numel
                found[row.name].append(row.in_parameter)
    for spec in specs:
        assert not uncovered(Interval(0, spec.numel), found[spec.name])
        assert not doubly_covered(found[spec.name])


@given(any_parameters, worlds, caps)
def test_where_state_is_in_blocks_no_shard_cuts_one(specs, shards, cap):
    for bucket in plan_buckets(specs, bucket_numel=cap, shards=shards, align=IN_BLOCKS):
        for rank in range(shards):
            for row in rows_of_shard(bucket, rank):
                assert row.in_parameter.start % BLOCK_NUMEL == row.in_shard.start % BLOCK_NUMEL == 0


@given(any_parameters, caps)
def test_buckets_are_numbered_by_the_arrival_of_their_last_gradient(specs, cap):
    arrival = {spec.name: place for place, spec in enumerate(reversed(specs))}
    buckets = plan_buckets(specs, bucket_numel=cap, shards=2)
    last = [max(arrival[slot.name] for slot in bucket.slots) for bucket in buckets]
    assert last == sorted(last)


@given(parameters, worlds, caps)
def test_an_intact_parameter_lies_on_one_rank_and_padding_is_bounded(specs, shards, cap):
    numel_of = {spec.name: spec.numel for spec in specs}
    buckets = plan_buckets([replace(spec, intact=True) for spec in specs], bucket_numel=cap, shards=shards)
    for bucket in buckets:
        assert bucket.intact
        rows = [row for rank in range(shards) for row in rows_of_shard(bucket, rank)]
        assert {row.name: row.in_parameter for row in rows} == {
            slot.name: Interval(0, slot.interval.numel) for slot in bucket.slots if slot.interval.numel
        }
        # Greedy dealing: the fullest shard passes an even share by at most one parameter, and alignment.
        sizes = [numel_of[slot.name] for slot in bucket.slots]
        aligned = SLOT_ALIGN_NUMEL * len(sizes) + SHARD_ALIGN_NUMEL
        assert bucket.shard_numel <= sum(sizes) / shards + max(sizes) + aligned
        assert bucket.shard_numel >= max(sizes)
        assert len(sizes) == 1 or sum(sizes) <= max(cap, shards * max(sizes))


def test_a_large_intact_parameter_draws_others_in_to_fill_the_other_shards():
    specs = [ParameterSpec(name="embedding", numel=4096, key=0, intact=True)]
    specs += [ParameterSpec(name=f"layer {i}", numel=1024, key=0, intact=True) for i in range(8)]
    *rest, filled = plan_buckets(specs, bucket_numel=2048, shards=2)
    assert filled.numel == 2 * 4096
    assert {slot.name for slot in filled.slots} == {"embedding", *(f"layer {i}" for i in range(4))}
    assert not filled.padding
    assert filled.oversize
    assert [bucket.numel for bucket in rest] == [2048, 2048]


@settings(max_examples=60)
@given(any_parameters, any_parameters, worlds, worlds, caps, caps)
def test_any_layout_reads_what_any_other_wrote(specs, other, wrote, reads, cap_then, cap_now):
    saved: dict[str, list[tuple[Interval, list[int]]]] = {spec.name: [] for spec in specs}
    for bucket in plan_buckets(specs, bucket_numel=cap_then, shards=wrote):
        for rank in range(wrote):
            for row in rows_of_shard(bucket, rank):
                saved[row.name].append((row.in_parameter, list(range(*row.in_parameter))))
    now = [replace(spec, intact=other[0].intact) for spec in specs]
    for bucket in plan_buckets(now, bucket_numel=cap_now, shards=reads):
        for rank in range(reads):
            for row in rows_of_shard(bucket, rank):
                pieces = pieces_for(row.in_parameter, [(interval, (interval, v)) for interval, v in saved[row.name]])
                values = [v for piece in pieces for v in piece.source[1][piece.in_source.start : piece.in_source.stop]]
                assert values == list(range(*row.in_parameter))


@pytest.mark.parametrize(
    ("saved", "fault"),
    [
        ([(0, 4)], "elements 4 to 10 are saved nowhere"),
        ([(0, 6), (5, 10)], "elements 5 to 6 are saved more than once"),
        ([], "elements 2 to 10 are saved nowhere"),
    ],
)
def test_missing_and_doubled_elements_are_refused(saved, fault):
    with pytest.raises(ValueError, match=fault):
        pieces_for(Interval(2, 10), [(Interval(*interval), None) for interval in saved])


# ---- boxes ----

SHAPES = st.lists(st.integers(1, 7), min_size=1, max_size=3)


@given(SHAPES, st.data())
def test_runs_and_slices_of_all_parts_are_the_whole_once(shape, data):
    dim = data.draw(st.integers(0, len(shape) - 1))
    parts = data.draw(st.integers(1, 4))
    repeats = data.draw(st.sampled_from([1, 2])) if shape[dim] % (2 * parts) == 0 else 1
    whole = torch.arange(Box.whole(shape).numel).view(shape)
    boxes = [Box.whole(shape).split(dim, parts, place, repeats=repeats) for place in range(parts)]
    seen = []
    for box in boxes:
        local = torch.empty(box.local_shape, dtype=torch.int64)
        for there, here in box.slices():
            local[here] = whole[there]
        flat = local.reshape(-1)
        cut = data.draw(st.integers(0, box.numel))
        for interval in (Interval(0, cut), Interval(cut, box.numel)):
            covered = 0
            for run, start in box.runs(interval):
                assert flat[run.start : run.stop].tolist() == list(range(start, start + run.numel))
                covered += run.numel
            assert covered == interval.numel
        seen += flat.tolist()
    assert sorted(seen) == list(range(whole.numel()))
    for one in boxes:
        for other in boxes:
            assert one.shares_with(other) == (one is other and one.numel > 0) or one.numel == 0


def test_parts_are_those_of_torch_chunk():
    whole = torch.arange(49 * 2).view(49, 2)
    for place, chunk in enumerate(whole.chunk(4)):
        box = Box.whole(whole.shape).split(0, 4, place)
        [(there, _)] = box.slices()
        assert torch.equal(whole[there], chunk)


def test_packed_projections_are_cut_one_by_one():
    box = Box.whole((8, 3)).split(0, 2, 0, repeats=2)
    assert box.ranges[0] == (Interval(0, 2), Interval(4, 6))
    assert list(box.runs(Interval(4, 10))) == [(Interval(4, 6), 4), (Interval(6, 10), 12)]


# ---- sizes of buckets, and how many buffers live at a time ----

MIB = 2**20
HOST, DEVICE = torch.device("cpu"), torch.device("meta")


def groups(ranks: int, nodes: int = 1) -> Groups:
    everyone = RankGroup(ranks=tuple(range(ranks)), index=0)
    alone = RankGroup(ranks=(0,), index=0)
    made = Groups(backend="fake", world=everyone, shard=everyone, replicate=alone, gather=everyone)
    return replace(made, nodes=tuple(rank * nodes // ranks for rank in range(ranks)))


def model_of(megabytes: int) -> nn.Module:
    with DEVICE:
        return nn.ModuleList([nn.Linear(MIB // 4, 1, bias=False) for _ in range(megabytes)])


def auto_mib(megabytes: int, made: Groups, device: torch.device, stage: int = 2, **settings) -> float:
    return choose_sizes(model_of(megabytes), ZeroConfig(stage=stage, **settings), made, device).numel * 4 / MIB


def test_the_host_has_small_buckets_and_one_gpu_that_sends_nothing_large_ones():
    for made, device, most, layers in ((groups(8), HOST, 25, 32), (groups(1), DEVICE, 50, 50)):
        assert [auto_mib(n, made, device) for n in (1, 80, 400)] == [1, 10, most]
        assert auto_mib(400, made, device, stage=3) == layers
    assert auto_mib(4000, groups(1), DEVICE) == 256


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
    sizes=st.lists(st.integers(1, 5000), min_size=1, max_size=40), bucket=st.integers(50, 3000), limit=st.integers(1, 4)
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
    growth = pool_growth(layouts, limit)
    for number, each in enumerate(buckets, start=1):
        while pool.room_for(each) == 0:
            pool.release(*in_use.pop(0))
        in_use.append((each, pool.take(each)))
        assert pool.most_bytes <= 4 * max(growth[:number])
    assert max(growth) <= pool_numel(layouts, limit)


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


# Mostly parts of one size, without a gap, on the next rank.
often_even = st.tuples(
    st.sampled_from([0, 0, 0, 1]), st.sampled_from([3, 3, 3, 2, 0]), st.sampled_from([1, 1, 1, 2, -2])
)


@example([(0, 3, 1), (0, 3, 1), (0, 2, 1), (0, 2, 1)], 0, 9)
@given(st.lists(often_even, max_size=30), st.integers(0, 40), st.integers(0, 50))
def test_cuts_of_any_parts_have_exactly_these_parts(drawn, start, numel):
    parts, end, rank = [], 0, 60
    for gap, size, step in drawn:
        rank += step
        parts.append((Interval(end + gap, end + gap + size), rank))
        end += gap + size
    joined = even_cuts(reversed(parts))
    assert all(cuts.is_valid and cuts.count == len(ranks) for cuts, ranks in joined)
    assert sorted(parts) == sorted((cuts.interval(i), rank) for cuts, ranks in joined for i, rank in enumerate(ranks))
    wanted = Interval(start, start + numel)
    for cuts, ranks in joined:
        held = [index for index in range(len(ranks)) if cuts.interval(index).intersect(wanted)]
        assert list(cuts.about(wanted)) == held


@example([(0, 3, 1), (0, 3, 1), (0, 2, 1)], [1, 0, 0], Interval(61, 62))
@given(
    st.lists(often_even, max_size=30),
    st.lists(st.integers(0, 3), min_size=30, max_size=30),
    st.tuples(st.integers(58, 95), st.integers(0, 20)).map(lambda each: Interval(each[0], sum(each))),
)
def test_cuts_that_are_joined_in_any_groups_have_exactly_their_parts(drawn, group_of, gone):
    parts, end, rank = [], 0, 60
    for gap, size, step in drawn:
        rank += step
        parts.append((Interval(end + gap, end + gap + size), rank))
        end += gap + size
    groups = [[part for part, group in zip(parts, group_of) if group == each] for each in range(4)]
    joined = joined_cuts([cuts for group in groups for cuts in even_cuts(group)])
    assert all(cuts.is_valid and cuts.count == len(ranks) for cuts, ranks in joined)
    assert sorted(parts) == sorted((cuts.interval(i), rank) for cuts, ranks in joined for i, rank in enumerate(ranks))
    left = [part for each in joined for part in without_ranks(*each, [gone])]
    assert all(cuts.is_valid and cuts.count == len(ranks) for cuts, ranks in left)
    kept = sorted(part for part in parts if not gone.start <= part[1] < gone.stop)
    assert kept == sorted((cuts.interval(i), rank) for cuts, ranks in left for i, rank in enumerate(ranks))
