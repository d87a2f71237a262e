"""`comm.gradients: auto` and `comm.weights: auto`: blocks of integers where a trial shows that training waits less for them."""

from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_ranks
from torch import nn
from wire_runs import go_on, resume, save, setting, start

import hf_zero.comm.trial
from hf_zero.comm.choose import choose_transport
from hf_zero.comm.groups.groups import Groups
from hf_zero.comm.point_to_point import PointToPointTransport
from hf_zero.comm.transport import Handle
from hf_zero.comm.trial import Trial, slowest_medians
from hf_zero.config import CommConfig, ConfigError, ZeroConfig
from hf_zero.engine.build import assemble
from hf_zero.engine.engine import ZeroEngine

pytestmark = pytest.mark.timeout(120)

AUTO_BOTH = {"gradients": "auto", "weights": "auto"}
IN_BLOCKS = {"gradients": "int8", "weights": "int8"}


class Clock:
    """In place of the machine's: time passes by what takes it here, and a little whenever it is looked at."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def pass_by(self, seconds: float) -> None:
        self._now_s += seconds

    def perf_counter(self) -> float:
        self._now_s += 1e-6
        return self._now_s


CLOCK = Clock()


class SlowLink(PointToPointTransport):
    """Each collective takes so long for a byte of its buffer."""

    NS_A_BYTE = 1500

    def start_reduce_scatter(self, flat, out, label):
        return self._slowed(flat.nbytes, super().start_reduce_scatter(flat, out, label), label)

    def start_all_reduce(self, flat, label):
        return self._slowed(2 * flat.nbytes, super().start_all_reduce(flat, label), label)

    def start_all_gather(self, flat, own, label, among=None):
        return self._slowed(flat.nbytes, super().start_all_gather(flat, own, label, among), label)

    def start_all_to_all(self, flat, out, label, among=None):
        return self._slowed(flat.nbytes, super().start_all_to_all(flat, out, label, among), label)

    def _slowed(self, nbytes, handle, label):
        def complete():
            handle.finish()
            CLOCK.pass_by(self.NS_A_BYTE * nbytes / 1e9)

        return Handle(label, self.ledger, complete)


class FreeLink(PointToPointTransport):
    """Collectives that take no time and bring nothing, for as long as a trial lasts."""

    def start_reduce_scatter(self, flat, out, label):
        return Handle(label, self.ledger, lambda: None)

    def start_all_gather(self, flat, own, label, among=None):
        return Handle(label, self.ledger, lambda: None)

    def start_all_to_all(self, flat, out, label, among=None):
        return Handle(label, self.ledger, lambda: None)


def over(link: type[PointToPointTransport] | None) -> None:
    """Engines of this rank are built over such a link from here on, and trials go by a clock that nothing else moves."""
    hf_zero.comm.trial.time = CLOCK
    assemble.choose_transport = (
        choose_transport if link is None else lambda groups, device, timeout_s, ledger: link(groups, timeout_s)
    )


def trial(exact_s: float, blocks_s: float, arithmetic_s: float) -> Trial:
    return Trial(kind="weights", bytes_sent=10**6, exact_s=exact_s, blocks_s=blocks_s, arithmetic_s=arithmetic_s)


def test_blocks_pay_where_the_link_is_slow_against_the_arithmetic():
    assert trial(1.0, 0.4, 0.1).pays
    # They come sooner, but half of the exact bucket's time is hidden, and none of the arithmetic.
    assert not trial(1.0, 0.75, 0.5).pays
    # The link costs as much for a quarter of the bytes: its latency is the price.
    assert not trial(0.001, 0.001, 0.00001).pays
    exposed = trial(1.0, 0.8, 0.1)
    assert (exposed.exposed_exact_s, exposed.exposed_blocks_s) == pytest.approx((0.5, 0.3))
    assert "1.0 MiB of weights take 1,000.0 ms as they are (0.001 GB/s) and 800.0 ms in int8" in str(exposed)


SECONDS = st.floats(1e-7, 100.0)


@given(exact=SECONDS, sent=SECONDS, arithmetic=SECONDS, less=st.floats(0.0, 1.0))
def test_a_slower_link_or_faster_arithmetic_never_turns_blocks_away(exact, sent, arithmetic, less):
    here = trial(exact, sent + arithmetic, arithmetic)
    if here.pays:
        assert trial(exact, sent + less * arithmetic, less * arithmetic).pays
        assert trial(exact * (1 + less), sent + arithmetic, arithmetic).pays
        # Never where they would come later with nothing hidden.
        assert here.blocks_s < here.exact_s


def timed(rank: int, world_size: int) -> dict[str, float]:
    groups = Groups.create(stage=2, device_type="cpu", comm=CommConfig())
    transport = PointToPointTransport(groups, 30)
    waits = iter([9, *range(1, 6)])
    hf_zero.comm.trial.time = CLOCK
    ways = {
        "by turns": lambda: CLOCK.pass_by(0.02 * (next(waits) if rank == 0 else 1)),
        "the same": lambda: CLOCK.pass_by(0.01),
    }
    settled = []
    seconds = slowest_medians(ways, transport, lambda: settled.append(None))
    # Before and after each way, in one turn that does not count and five that do.
    assert len(settled) == 2 * 2 * 6
    return seconds


def test_figures_are_medians_of_the_slowest_rank_and_the_same_on_all():
    first, second = run_ranks(timed, world_size=2, time_limit_s=60)
    assert first == second
    assert first == pytest.approx({"by turns": 0.06, "the same": 0.01}, abs=1e-4)


def decisions(rank: int, world_size: int) -> list[str]:
    """The lines that this rank prints."""
    with redirect_stderr(StringIO()) as printed:
        decides(world_size)
    return printed.getvalue().splitlines()


def decides(world_size: int) -> None:
    for link, stage, dtype in (
        (SlowLink, 2, torch.float32),
        (SlowLink, 3, torch.bfloat16),
        (FreeLink, 1, torch.float32),
        (None, 3, torch.float32),
    ):
        over(link)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(200, 200), nn.Linear(200, 200)).to(dtype)
        chance = torch.get_rng_state()
        engine = ZeroEngine(model, [torch.optim.SGD(model.parameters(), lr=0.1)], setting(stage, AUTO_BOTH))
        assert torch.equal(torch.get_rng_state(), chance)
        comm, trials = engine.config.comm, engine.comm_report().trials
        assert [each.kind for each in trials] == ["gradients", "weights"]
        for each in trials:
            assert getattr(comm, each.kind) == ("int8" if each.pays else "none")
            assert each.exact_s > 0 and each.blocks_s > 0 and each.arithmetic_s > 0
            assert str(each) in engine.comm_report().table()
        assert engine.transport.exchange((comm, trials)) == [(comm, trials)] * world_size
        if link is SlowLink:
            assert comm.gradients == comm.weights == "int8" and engine._parts.wire.weight_format is not None
            # 20 KiB in shards of whole blocks.
            nbytes = 20 * 1024 // world_size
            assert trials[0].bytes_sent == nbytes if dtype == torch.float32 else trials[0].bytes_sent >= nbytes
        if link is FreeLink:
            assert comm.gradients == comm.weights == "none" and engine._parts.wire.weight_format is None


def test_slow_links_get_blocks_and_fast_ones_do_not():
    lines, others = run_ranks(decisions, world_size=2, time_limit_s=60)
    assert len(lines) == 8 and not others
    assert lines[0].startswith("hf_zero: comm.gradients: auto is int8: ") and "GB/s" in lines[0]
    assert lines[4].startswith("hf_zero: comm.gradients: auto is none: ")


def says_itself(rank: int, world_size: int) -> None:
    over(SlowLink)
    for comm, expected in (
        ({"gradients": "none", "weights": "auto"}, ("none", "int8")),
        ({"gradients": "int4", "weights": "none"}, ("int4", "none")),
        ({"gradients": "auto"}, ("int8", "none")),
    ):
        model = nn.Linear(64, 64)
        engine = ZeroEngine(model, [torch.optim.SGD(model.parameters(), lr=0.1)], setting(2, comm))
        assert (engine.config.comm.gradients, engine.config.comm.weights) == expected
        assert [each.kind for each in engine.comm_report().trials] == [k for k, v in comm.items() if v == "auto"]
    double = nn.Linear(4, 4).double()
    engine = ZeroEngine(double, [torch.optim.SGD(double.parameters(), lr=0.1)], setting(2, AUTO_BOTH))
    assert engine.config.comm.gradients == engine.config.comm.weights == "none" and not engine.comm_report().trials
    frozen = nn.Linear(64, 64).requires_grad_(False)
    engine = ZeroEngine(frozen, [], setting(3, AUTO_BOTH))
    assert [each.kind for each in engine.comm_report().trials] == ["weights"]


def test_what_is_said_is_not_tried_and_what_cannot_be_quantised_is_not_either():
    run_ranks(says_itself, world_size=2, time_limit_s=60)
    model = nn.Linear(4, 4)
    engine = ZeroEngine(model, [torch.optim.SGD(model.parameters(), lr=0.1)], setting(2, AUTO_BOTH))
    assert engine.config.comm.gradients == engine.config.comm.weights == "none" and not engine.comm_report().trials
    with pytest.raises(ConfigError, match=r"`comm.gradients: auto` is of stages 1 to 3"):
        ZeroConfig.of("stage=0,comm.gradients=auto")
    with pytest.raises(ConfigError, match=r"`comm.weights` is 'int4'; allowed: none, auto, int8"):
        ZeroConfig.of("comm.weights=int4")


def between_groups(rank: int, world_size: int) -> None:
    over(SlowLink)
    model = nn.Linear(200, 200)
    comm = {"gradients": "auto", "shard_group_size": 2}
    engine = ZeroEngine(model, [torch.optim.SGD(model.parameters(), lr=0.1)], setting(2, comm))
    assert engine.config.comm.gradients == "int8"
    [found] = engine.comm_report().trials
    # Half of a bucket of 20 KiB inside a group; twice half of a shard of half of it between two.
    assert found.bytes_sent == 20 * 1024 // 2 + 2 * (20 * 1024 // 4)
    assert found.arithmetic_s < found.blocks_s < found.exact_s


def test_gradients_between_shard_groups_are_tried_both_ways():
    run_ranks(between_groups, world_size=4, time_limit_s=60)


def resumes_over_another_link(rank: int, world_size: int, root: str) -> None:
    for stage, before, after in ((2, SlowLink, FreeLink), (3, FreeLink, SlowLink)):
        decided, folder = {SlowLink: setting(stage, IN_BLOCKS), FreeLink: setting(stage, {})}, Path(root) / str(stage)
        over(None)
        model, optimizer, engine, _ = start(decided[before])
        save(engine, model, folder)
        expected = go_on(model, optimizer, range(3, 6))
        model, optimizer, engine = resume(decided[after], folder)
        went_on = go_on(model, optimizer, range(3, 6))
        assert went_on == pytest.approx(expected, rel=3e-3)
        assert bool(list(engine.state.residual_rows())) == (after is SlowLink)
    # What a trial chooses trains as if it had been said.
    over(SlowLink)
    model, optimizer, engine = resume(setting(3, AUTO_BOTH), folder)
    assert len(engine.comm_report().trials) == 2 and go_on(model, optimizer, range(3, 6)) == went_on


def test_a_run_goes_on_where_the_trial_comes_out_otherwise(tmp_path):
    run_ranks(resumes_over_another_link, world_size=2, time_limit_s=110, keyword_arguments={"root": str(tmp_path)})


def grows_its_vocabulary(rank: int, world_size: int) -> None:
    over(SlowLink)
    _, _, engine, _ = start(setting(2, {"gradients": "auto"}), steps=1)
    trials = engine.comm_report().trials
    over(FreeLink)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FreeLink, "start_all_gather", PointToPointTransport.start_all_gather)
        engine.resize_embeddings(240)
    assert engine.config.comm.gradients == "int8" and engine.comm_report().trials == trials


def test_a_decision_lasts_for_the_run():
    run_ranks(grows_its_vocabulary, world_size=2, time_limit_s=60)
