"""A step's bytes, memory and calls beside DDP's and FSDP2's, against what they were when the baseline was written."""

import guard
import pytest
import torch
import torch.distributed as dist
from engines import ENGINES, Engine

WASTEFUL = "hf_zero2, wasteful"
PART_WASTED = 0.2


def make_wasteful(make_model, optimizer_arguments) -> Engine:
    """An engine that sends, holds and calls a fifth more in each step."""
    usual = guard.Costs(**guard.read_baseline()["costs"]["hf_zero2"])
    engine = ENGINES["hf_zero2"](make_model, optimizer_arguments)
    held = torch.ones(int(PART_WASTED * usual.peak_bytes), dtype=torch.uint8)
    # Of two ranks, each sends as much as it reduces.
    sent, clip = torch.ones(int(PART_WASTED * usual.sent_bytes), dtype=torch.uint8), engine.clip

    def wasteful(max_norm: float) -> torch.Tensor:
        dist.all_reduce(sent)
        for _ in range(int(PART_WASTED * usual.calls)):
            len(())
        clip(max_norm)
        return held

    engine.clip = wasteful
    return engine


@pytest.fixture(scope="module")
def costs() -> dict[str, guard.Costs]:
    return guard.measure_costs(guard.engines())


def test_a_step_costs_no_tenth_more_beside_its_peers_than_at_the_baseline(costs):
    baseline = guard.read_baseline()
    complaint = guard.grown(guard.ratios_of(costs), baseline)
    if complaint and guard.versions() != baseline["versions"]:
        pytest.skip(f"the baseline is of other releases of what is compared. {complaint}")
    assert not complaint, complaint


@pytest.mark.slow
def test_a_step_that_wastes_bytes_memory_and_calls_is_found():
    costs = guard.measure_costs(guard.engines() | {WASTEFUL: make_wasteful})
    complaint = guard.grown(guard.ratios_of(costs | {"hf_zero2": costs[WASTEFUL]}), guard.read_baseline())
    assert all(f"{words} of hf_zero2 / ddp: was" in complaint for words in guard.KINDS.values()), complaint
    assert "hf_zero1" not in complaint and "hf_zero3" not in complaint


@pytest.mark.parametrize("kind", guard.KINDS.values())
def test_an_eighth_more_of_one_ratio_names_it_and_how_to_renew_the_baseline(kind):
    baseline = guard.read_baseline()
    name = f"{kind} of hf_zero3 / fsdp2"
    was = baseline["ratios"][name]
    assert guard.grown(baseline["ratios"] | {name: 1.09 * was}, baseline) == ""
    complaint = guard.grown(baseline["ratios"] | {name: 1.12 * was}, baseline)
    assert f"{name}: was {was:.3f}, is {1.12 * was:.3f} (+12.0%)" in complaint
    assert complaint.count(": was") == 1 and "guard.py --renew" in complaint


def test_another_release_of_torch_is_named_as_a_possible_cause():
    baseline = guard.read_baseline()
    twice = {name: 2 * ratio for name, ratio in baseline["ratios"].items()}
    assert "torch 0.1" not in guard.grown(twice, baseline)
    older = baseline | {"versions": baseline["versions"] | {"torch": "0.1"}}
    assert "then 0.1" in guard.grown(twice, older)


def test_a_ratio_without_a_baseline_is_not_passed_over():
    baseline = guard.read_baseline()
    assert "other ratios" in guard.grown(baseline["ratios"] | {"bytes sent of hf_zero4 / ddp": 1.0}, baseline)
