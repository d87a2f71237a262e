"""`stage: auto`: one choice on all ranks, what the user set is kept, and a run with it trains as with the stage chosen."""

import functools
import os
from dataclasses import replace
from pathlib import Path
from types import MethodType, SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import transformers
from accelerate_job import Texts
from hypothesis import given
from hypothesis import strategies as st
from published import MOST_ERROR, POINTS, predict
from ranks import run_ranks
from torch.utils.data import DataLoader
from training import LENGTH, VOCABULARY, gpt2
from transformers.modeling_outputs import CausalLMOutput

from hf_zero import ConfigError, ZeroConfig, ZeroEngine, ZeroPlugin
from hf_zero.buckets.sizes import cost_of
from hf_zero.forecast.fit import NothingFitsError
from hf_zero.planner import auto
from hf_zero.planner.auto import assume, choose_config
from hf_zero.planner.search import Machine, Piece, Work, simulate

pytestmark = pytest.mark.timeout(200)

CPU = torch.device("cpu")


def choices(rank: int, world_size: int, *, cases: list) -> list:
    """What each rank chooses, rank 0 with less memory than the others."""
    found = []
    for setting, least in cases:
        model = gpt2(layers=1)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        free = least if rank == world_size - 1 else 10**9
        with (
            patch.object(auto, "free_for_training", lambda device, free=free: free),
            patch("hf_zero.planner.layouts.RUNTIME_ON_HOST_BYTES", 0),
        ):
            try:
                chosen = choose_config(
                    ZeroConfig.of(setting),
                    model,
                    [optimizer],
                    device=CPU,
                    mixed_precision="no",
                    batch=assume(model, 1, 2),
                )
            except ConfigError as error:
                found.append(str(error))
            else:
                found.append((chosen.config, chosen.lines))
    return found


def test_all_ranks_choose_alike_by_the_one_that_has_least():
    numel = sum(p.numel() for p in gpt2(layers=1).parameters())
    cases = [
        ("auto", 10**9),
        ("auto", 26 * numel),
        ("auto", 1000),
        ("stage=auto,bucket_bytes=64KiB", 10**9),
        ("stage=auto,prefetch_units=3", 10**9),
    ]
    by_rank = run_ranks(choices, world_size=2, time_limit_s=120, keyword_arguments={"cases": cases})
    assert by_rank[0] == by_rank[1]
    roomy, tight, too_small, buckets, units = by_rank[0]
    assert roomy[0].stage in (0, 1) and tight[0].stage >= 1 and roomy[1] != tight[1]
    assert "fits" in roomy[1][0] and len(roomy[1]) == 5 and all(line.isprintable() for line in roomy[1])
    assert "Nothing fits" in too_small
    assert buckets[0].bucket_bytes == 64 * 1024
    # A setting of stage 3 leaves no other stage.
    assert (units[0].stage, units[0].prefetch_units) == (3, 3)


@pytest.mark.parametrize(
    ("name", "peak", "bandwidth"),
    [("NVIDIA H100 80GB HBM3", 989e12, 3350e9), ("NVIDIA H200", 989e12, 4800e9), ("NVIDIA L40S", 362e12, 864e9)],
)
def test_an_accelerators_rates_are_those_of_its_name(name, peak, bandwidth, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    machine = auto._machine(torch.device("cuda", 0), 4, True)
    assert machine.peak_flops == peak and machine.memory_bytes_a_second == pytest.approx(0.75 * bandwidth)
    assert auto._machine(torch.device("cuda", 0), 4, False).peak_flops < peak / 3


def test_what_libraries_take_behind_the_plan_is_counted_on_accelerators():
    one, several = (auto._still_to_come_bytes(torch.device("cuda", 0), ranks) for ranks in (1, 2))
    # Workspaces of cuBLAS alone are 32 MiB on Hopper; NCCL's buffers are there on several ranks.
    assert 32 * 2**20 < one < several
    assert auto._still_to_come_bytes(CPU, 2) is None


def test_an_error_names_the_part_with_which_something_would_fit():
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=24, n_layer=2, n_head=4, vocab_size=60000))
    batch = assume(model, 16, 1024)
    asked = {"device": CPU, "mixed_precision": "no", "batch": batch}
    with patch.object(auto, "free_for_training", lambda device: 10**10), pytest.raises(NothingFitsError) as refused:
        choose_config(ZeroConfig.of("auto"), model, [], **asked)
    assert "With the loss in chunks, " in str(refused.value) and 'loss_type="chunked_nll"' in str(refused.value)


def test_a_model_with_trls_loss_is_traced_with_it():
    model = gpt2()
    asked = []

    @functools.wraps(type(model).forward)
    def forward(self, *, fused_lm_head=False, labels=None, **batch):
        asked.append(fused_lm_head)
        hidden = self.transformer(**batch).last_hidden_state
        return CausalLMOutput(loss=hidden.sum() + self.lm_head.weight.sum())

    model.forward = MethodType(forward, model)
    batch = assume(model, 2, LENGTH)
    on_host, _ = auto._activations(model, batch, "no", "auto", CPU)
    assert asked == [True] and not on_host.has_logits
    # On an accelerator its kernels need values: the logits of the class's forward are left out.
    elsewhere, _ = auto._activations(model, batch, "no", "auto", torch.device("cuda", 0))
    assert asked == [True] and not elsewhere.has_logits and elsewhere.tile_bytes == 2 * LENGTH * VOCABULARY * 4


def trained(rank: int, world_size: int, *, flags: list[str]) -> list:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(world_size), "ACCELERATE_USE_CPU": "true"}
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, PartialState

    found = []
    for flag in flags:
        AcceleratorState._reset_state()
        PartialState._reset_state()
        accelerator = Accelerator(cpu=True, parallelism_config=ZeroPlugin(flag or found[0][0]))
        torch.manual_seed(3)
        model = gpt2()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Texts(16), batch_size=2))
        losses = []
        for batch in loader:
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        found.append((accelerator.zero_config.to_dict(), losses))
        accelerator.free_memory()
    return found


def test_a_loop_trains_with_auto_as_with_the_stage_that_it_chose():
    [(config, losses), (again, same)], _ = run_ranks(
        trained, world_size=2, time_limit_s=150, keyword_arguments={"flags": ["auto", ""]}
    )
    assert config == again and config["stage"] in (0, 1, 2, 3)
    assert losses == same


def test_an_engine_wants_a_stage():
    model = gpt2()
    with pytest.raises(ConfigError, match="Pass ZeroEngine a stage"):
        ZeroEngine(model, [torch.optim.AdamW(model.parameters())], "auto")


@pytest.mark.parametrize("text", ["auto", "stage=auto", "stage=auto,bucket_bytes=16MiB"])
def test_auto_is_a_stage_in_flags(text):
    config = ZeroConfig.of(text)
    assert config.is_open and config.may_shard_parameters
    assert ZeroConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize("text", ["stage=auto,bucket_bytes=0", "stage=automatic", "stage=auto,offload.optimizer=nvme"])
def test_what_no_stage_takes_is_refused_at_once(text):
    with pytest.raises(ConfigError):
        ZeroConfig.of(text)


@pytest.mark.parametrize(
    ("rows", "length", "expected"), [(4, 8, (4, 8)), (None, None, (8, LENGTH)), (2, 10**9, (2, LENGTH))]
)
def test_a_batch_that_is_not_known_is_assumed_and_said(rows, length, expected):
    batch = assume(gpt2(), rows, length)
    assert (batch.rows, batch.length) == expected
    assert ("assumed" in batch.source) is (rows is None)


def test_limits_of_the_process_are_memory_that_is_not_free():
    import resource

    from hf_zero.planner.trace import free_for_training

    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    lines = Path("/proc/self/status").read_text().splitlines()
    used = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData"))
    try:
        resource.setrlimit(resource.RLIMIT_DATA, (used + 10**8, hard))
        assert 0 < free_for_training(CPU) <= 10**8 + 2**25
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_chosen_set_up_fits_a_control_group_and_the_one_left_out_does_not(tmp_path):
    import json
    import subprocess
    import sys

    from launching import ROOT

    path = tmp_path / "auto.json"
    command = [sys.executable, str(ROOT / "scripts/bench/auto.py"), "--cases", "gpt2:705:bf16:2", "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr[-3000:]
    if "skipped" in done.stdout:
        pytest.skip(done.stdout.strip())
    [case] = json.loads(path.read_text())["cases"]
    assert case["is_right"] and case["rejected"].endswith("stage 0")


# ---- the simulated step: bounds, directions, the published points, and one set of constants with buckets/precision.py ----

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


def test_state_is_fetched_during_backward_as_far_as_backward_frees_memory():
    machine = Machine(ranks_a_node=1, flops=1e12, host_bytes_a_second=1e9)
    visits = replace(WORK, visiting_bytes=10**9, window_bytes=10**8)
    found = [
        simulate(
            pieces(20, 10**8),
            ZeroConfig(stage=2),
            machine,
            replace(visits, freed_bytes=freed),
            ranks=1,
            nodes=1,
        ).step_s
        for freed in (2 * 10**9, 4 * 10**8, 0)
    ]
    # One second of forward and two of backward, and the bytes without memory at the rate of the link.
    assert found == pytest.approx([3, 3.6, 4])


def test_units_that_stay_whole_are_gathered_once():
    layers = pieces(20, 10**8)
    root = replace(layers[0], in_layer=False)
    shards_all = ZeroConfig(stage=3)

    def communication_s(units: list[Piece], config: ZeroConfig) -> float:
        return simulate(units, config, Machine(nodes=4), WORK, ranks=32, nodes=4).communication_s

    once_s = communication_s(layers, replace(shards_all, reshard_after_forward=False)) / 40
    # Twenty gathers in the forward, and twenty reductions. The last layer stays for the backward.
    assert communication_s(layers, shards_all) == pytest.approx((20 + 19 + 20) * once_s)
    assert communication_s([root, *layers[1:]], shards_all) == pytest.approx((20 + 18 + 20) * once_s)


def test_texts_are_planned_with_the_longest_of_the_first_rows():
    rows = [{"text": "x" * (number % 7), "others": ["y"] * (number % 5), "label": 1.0} for number in range(40)]
    loader = SimpleNamespace(dataset=rows, collate_fn=list, batch_sampler=SimpleNamespace(batch_size=3))
    accelerator = SimpleNamespace(_dataloaders=[loader])
    assert auto._first_batch(accelerator) == rows[:3]
    assert auto._first_batch(accelerator, among=1000) == [rows[34], rows[13], rows[19]]
    assert auto._first_batch(accelerator, among=14) == [rows[13], rows[4], rows[6]]
