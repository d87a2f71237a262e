"""Parts of whole tensors, as tensor parallelism cuts them."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_zero.layout.boxes import Box
from hf_zero.layout.slots import Interval

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
