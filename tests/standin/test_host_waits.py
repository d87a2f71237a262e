"""What a step makes the host wait for, and what it asks of the device besides, counted on the stand-in device."""

import pytest
import standin_device
import torch
from ranks import run_ranks
from shared_ranks import on_ranks
from standin_counts import SETTINGS, StepCounts, count_events, counted_steps
from standin_runs import own_device
from torch import nn

from hf_zero.comm.ledger import Label, Ledger
from hf_zero.comm.transport import Handle
from hf_zero.device import clock
from hf_zero.engine.engine import ZeroEngine

pytestmark = [pytest.mark.timeout(200), standin_device.needs_compiler]

# Steps whose parameters are looked at for edits that nothing counts.
FIRST_STEPS = 4


@pytest.fixture(scope="module")
def counted(library, tmp_path_factory) -> list[dict[str, list[StepCounts]]]:
    """Of each rank, by settings."""
    arguments = {
        "library": library,
        "folder": str(tmp_path_factory.mktemp("counted")),
        "settings": SETTINGS,
        "n_steps": FIRST_STEPS + 3,
        "n_asked": 1,
    }
    return run_ranks(counted_steps, world_size=2, time_limit_s=100, keyword_arguments=arguments)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_step_stops_the_host_once_and_one_of_the_first_steps_twice(name, counted):
    for found in counted:
        waits = [step.waits.total() for step in found[name]]
        # For the norm of the step before, to see whether it was finite.
        assert max(waits[:FIRST_STEPS]) <= 2, found[name]
        assert max(waits[FIRST_STEPS:]) <= 1, found[name]


@pytest.mark.parametrize("name", SETTINGS)
def test_no_event_is_timed_before_somebody_asks(name, counted):
    for found in counted:
        *steps, asked = found[name]
        assert sum(step.events for step in steps) == 0
        # A wait's begin and end, and the first start of those of a kind that are under way.
        assert 0 < asked.events < 2.5 * asked.collectives, found[name]
        assert {step.timed_from for step in steps} == {None} and asked.timed_from == len(steps)


@on_ranks(1)
def test_events_are_used_again_when_their_times_have_been_read(rank, world_size, library):
    standin_device.register(library)
    events = count_events(torch.get_device_module(standin_device.NAME))
    ledger = Ledger(clock(torch.device(standin_device.NAME)))
    label = Label(kind="all-gather parameters", subject="bucket 0")
    for _ in range(20):
        ledger.count(label, 1, 0)
        Handle(label, ledger, lambda: None).finish()
    assert events == {"recorded": 60, "made": 3}


class Halving(nn.Linear):
    """Edits its weight in each forward, where autograd does not see it."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.weight.data.mul_(0.5)
        return super().forward(hidden)


@on_ranks(2)
def test_an_edit_that_nothing_counts_is_refused_before_the_step_or_at_the_next_evaluation(
    rank, world_size, library, tmp_path
):
    folder = str(tmp_path)
    standin_device.register(library)
    with standin_device.process_group(rank, world_size, folder):
        for trains in (True, False):
            model = nn.Sequential(nn.Linear(16, 16), Halving(16, 2)).to(own_device())
            optimizer = torch.optim.AdamW(model.parameters())
            ZeroEngine(model, [optimizer], {"stage": 3, "unit_bytes": 0})
            batch = torch.ones(2, 16, device=own_device())
            with torch.set_grad_enabled(trains):
                loss = model(batch).sum()
            if trains:
                loss.backward()
            with (
                pytest.raises(RuntimeError, match=r"a forward has edited '1\.weight' through `\.data`"),
                torch.no_grad(),
            ):
                optimizer.step() if trains else model(batch)
