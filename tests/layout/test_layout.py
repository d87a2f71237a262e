"""Layout properties: every element has one place, every shard is aligned, every saved element is found once."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_zero.layout.boxes import pieces_for
from hf_zero.layout.slots import (
    BLOCK_NUMEL,
    IN_BLOCKS,
    SHARD_ALIGN_NUMEL,
    SLOT_ALIGN_NUMEL,
    Interval,
    ParameterSpec,
    doubly_covered,
    plan_buckets,
    rows_of_shard,
    uncovered,
)

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
