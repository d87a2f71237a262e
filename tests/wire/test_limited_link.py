"""What a plan says about fewer bits on a link, and the steps of two ranks whose messages pass such a link."""

import re
from dataclasses import dataclass

import pytest
import torch
from cells import slow
from limited_link import RealClock, SimulatedClock, limited_link, slowed
from shared_ranks import run_on_ranks, shared_ranks
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

from hf_zero import ZeroConfig, make_plan
from hf_zero.engine.engine import ZeroEngine
from hf_zero.planner.layouts import Job, step_time
from hf_zero.planner.meta_models import optimizer_like_trainers
from hf_zero.planner.planner import Plan
from hf_zero.planner.search import SIMPLER, Machine

pytestmark = [pytest.mark.timeout(200), pytest.mark.extra("planner")]

ROWS, LENGTH, WORDS = 2, 64, 120
WAYS = (
    {},
    {"reduce_dtype": "bfloat16"},
    {"comm": {"gradients": "int8"}},
    {"comm": {"gradients": "int8", "weights": "int8"}},
)
SLOW_GBPS, T4_TFLOPS = 48, 8.1
"""6 GB/s, as doctor writes it for two cards without NVLink, and a T4 in float32."""


@dataclass(frozen=True)
class Case:
    """Settings and links, with what the plan says about them.

    Attributes:
        planned_s: time of a step by the plan, for each way.
        said: the plan's sentence on these links.
    """

    settings: dict
    machine: Machine
    planned_s: list[float]
    said: str


def small_bert() -> nn.Module:
    # Few words: the plan divides the work of a step among buckets by their elements, and a lookup has none.
    sizes = {"hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 512}
    config = BertConfig(
        vocab_size=WORDS,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        **sizes,
    )
    return BertForSequenceClassification(config)


def planned(settings: dict, node_gbps: float | None) -> Case:
    model = small_bert()
    given = {"gpus": 2, "node_gbps": node_gbps, "peak_tflops": T4_TFLOPS, "kept": settings}
    batch = {"input_ids": torch.zeros(ROWS, LENGTH, dtype=torch.long), "labels": torch.zeros(ROWS, dtype=torch.long)}
    plan: Plan = make_plan(model, batch=batch, **given)
    [said] = [line for line in plan.choice.why if line.startswith("Links of")]
    job = Job(
        model=model,
        optimizers=[optimizer_like_trainers(model)],
        device=torch.device("cuda"),
        world_size=2,
        ranks_a_node=2,
        activations=plan.activations,
    )
    machine = plan.request.machine
    layouts = [job.layout(ZeroConfig.from_dict({**settings, **way})) for way in WAYS]
    return Case(settings, machine, [step_time(each, machine, plan.activations, 1).step_s for each in layouts], said)


def measured(
    rank: int, world_size: int, cases: list[tuple[dict, Machine]], ways: tuple[dict, ...], clock_type: type
) -> list[list[float]]:
    """Returns the time of the third step on this rank, for each case and way."""
    found = []
    for settings, machine in cases:
        found.append([])
        for way in ways:
            torch.manual_seed(0)
            model, clock = small_bert(), clock_type()
            optimizer = torch.optim.AdamW(optimizer_like_trainers(model).param_groups, fused=True)
            engine = ZeroEngine(model, [optimizer], {**settings, **way})
            ids = torch.randint(0, WORDS, (ROWS, LENGTH))
            ends = []
            with limited_link(machine, clock):
                for _ in range(3):
                    model(input_ids=ids, labels=torch.zeros(ROWS, dtype=torch.long)).loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    ends.append(clock.now_s)
            engine.close()
            found[-1].append(ends[2] - ends[1])
    return found


def is_near(found_s: list[float], planned_s: list[float], machine: Machine) -> bool:
    """Returns whether steps are within 5 % and three latencies of the planned ones.

    The plan overlaps the first gather with work, although a first layer needs the parameters of both groups of the optimizer.
    """
    late_s = 3 * machine.latency_s(machine.ranks, machine.nodes)
    return all(abs(a - b) < 0.05 * b + late_s for a, b in zip(found_s, planned_s, strict=True))


def advised(said: str) -> int:
    """Returns the number of the way that a plan's sentence advises; 0 if fewer bits do not pay off."""
    if "do not pay off" in said:
        return 0
    names = [[name for name in ("reduce_dtype", "comm.gradients", "comm.weights") if f"`{name}: " in said]]
    return [[], ["reduce_dtype"], ["comm.gradients"], ["comm.gradients", "comm.weights"]].index(*names)


@pytest.mark.parametrize(("stage", "bucket_bytes"), [slow(1, "4MiB"), (2, "4MiB"), slow(2, "512KiB"), slow(3, "4MiB")])
def test_fewer_bits_pay_off_on_a_slow_link_where_the_plan_says_so(stage, bucket_bytes):
    cases = [planned({"stage": stage, "bucket_bytes": bucket_bytes}, rate) for rate in (SLOW_GBPS, None)]
    jobs = [(case.settings, case.machine) for case in cases]
    first, second = shared_ranks.run(measured, cases=jobs, ways=WAYS, clock_type=SimulatedClock)
    assert first == [pytest.approx(row, rel=0.01) for row in second]
    for case, steps in zip(cases, first, strict=True):
        assert is_near(steps, case.planned_s, case.machine), (case, steps)
        way, fastest = advised(case.said), min(steps)
        assert steps[way] < fastest * (1 + 2 * SIMPLER), (case, steps)
        if way:
            seconds = [float(each) / 1000 for each in re.findall(r"([\d.]+) ms", case.said)]
            assert is_near([steps[way], steps[0]], seconds, case.machine), (case, steps)
            assert steps[way] < steps[0] * (1 - SIMPLER)
    on_slow_links, on_fast_links = (advised(case.said) for case in cases)
    assert on_slow_links and "comm" not in WAYS[on_fast_links]


@pytest.mark.slow
def test_steps_on_the_real_clock_are_the_planned_ones_in_slow_motion():
    case, factor = planned({"stage": 2, "bucket_bytes": "4MiB"}, SLOW_GBPS), 1e4
    job = [(case.settings, slowed(case.machine, factor))]
    (steps,), _ = run_on_ranks(measured, cases=job, ways=WAYS, clock_type=RealClock)
    order = lambda seconds: sorted(range(len(WAYS)), key=lambda way: seconds[way])  # noqa: E731
    assert order(steps) == order(case.planned_s), (steps, case)
    # Sleeps end late on a machine with other work, and the work of the test itself is added.
    for found_s, planned_s in zip(steps, case.planned_s, strict=True):
        assert 0.9 < found_s / factor / planned_s < 1.3, (steps, case)
