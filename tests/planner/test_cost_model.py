"""The simulated step: bounds, directions, the published points, and one set of constants with buckets/precision.py."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from published import MOST_ERROR, POINTS, predict

from hf_zero import ZeroConfig
from hf_zero.buckets.precision import cost_of
from hf_zero.planner.search import Machine, Piece, Work, simulate

WORK = Work(forward_flops=1e12, backward_flops=2e12, model_flops=3e12)


def pieces(count: int, nbytes: int) -> list[Piece]:
    return [Piece(numel=nbytes // 4, reduce_bytes=nbytes, gather_bytes=nbytes)] * count


@pytest.mark.parametrize("point", POINTS, ids=lambda point: f"{point.group}, {point.name}, {point.gpus} GPUs")
def test_published_throughputs_come_out(point):
    assert abs(predict(point)["error"]) <= MOST_ERROR


@pytest.mark.parametrize(("ranks", "nodes"), [(2, 1), (8, 1), (16, 2), (2048, 256)])
def test_links_cost_what_bucket_sizes_are_chosen_by(ranks, nodes):
    machine, cost = Machine(nodes=nodes, ranks_a_node=ranks // nodes), cost_of(ranks=ranks, nodes=nodes)
    assert machine.latency_s(ranks, nodes) == pytest.approx(cost.latency_s)
    assert machine.bytes_a_second(ranks, nodes) == pytest.approx(cost.bytes_a_second)


@given(
    stage=st.integers(0, 3),
    count=st.integers(1, 30),
    nbytes=st.integers(4, 10**9),
    micro_batches=st.integers(1, 3),
    nodes=st.integers(1, 300),
)
def test_a_step_takes_its_work_and_no_more_than_work_and_traffic_in_a_row(stage, count, nbytes, micro_batches, nodes):
    machine = Machine(nodes=nodes)
    work = Work(
        forward_flops=1e12, backward_flops=2e12, model_flops=3e12, micro_batches=micro_batches, step_bytes=10**9
    )
    found = simulate(pieces(count, nbytes), ZeroConfig(stage=stage), machine, work, ranks=machine.ranks, nodes=nodes)
    assert found.compute_s + found.optimizer_s <= found.step_s * 1.0001
    assert found.step_s <= (found.compute_s + found.communication_s + found.optimizer_s) * 1.0001
    assert 0 <= found.mfu <= 1


def test_a_faster_link_is_never_slower_and_waits_less():
    times = [
        simulate(
            pieces(20, 10**8), ZeroConfig(stage=3), Machine(nodes=4, link_bytes_a_second=rate), WORK, ranks=32, nodes=4
        )
        for rate in (1e8, 1e9, 1e10, 1e11)
    ]
    assert [t.step_s for t in times] == sorted((t.step_s for t in times), reverse=True)
    assert times[0].exposed_s > 0 and times[-1].exposed_s < times[0].exposed_s / 100


def test_units_that_stay_whole_are_gathered_once():
    both = [
        simulate(
            pieces(20, 10**8),
            ZeroConfig(stage=3, reshard_after_forward=reshards),
            Machine(nodes=4),
            WORK,
            ranks=32,
            nodes=4,
        ).communication_s
        for reshards in (True, False)
    ]
    assert both[0] == pytest.approx(1.5 * both[1])
