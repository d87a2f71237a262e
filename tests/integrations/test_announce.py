"""The plan that rank 0 prints at the start: what is there is named, DDP and a forecast of activations beside it."""

import re
import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from training import gpt2

from hf_zero import ZeroEngine
from hf_zero.device import in_units
from hf_zero.integrations.announce import announce, ddp_state, state_plan
from hf_zero.optimizer.trial_step import state_itemsizes

pytestmark = pytest.mark.timeout(150)


@pytest.fixture
def two_ranks():
    """One process that takes itself for the first of two."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


def engine_of_adapters(stage: int, **settings) -> ZeroEngine:
    """A model of which two matrices are trained, as under LoRA."""
    model = gpt2().requires_grad_(False)
    model.transformer.h[0].attn.requires_grad_(True)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    return ZeroEngine(model, [optimizer], {"stage": stage, **settings})


def plan_rows(engine: ZeroEngine, capsys: pytest.CaptureFixture) -> dict[str, tuple[str, str]]:
    """The printed tables: row → what it says for a rank, and for DDP."""
    capsys.readouterr()
    announce(engine, "nobody")
    cells = [
        re.split("[│┃]", line)[1:-1] for line in capsys.readouterr().err.splitlines() if line.startswith(("│", "┃"))
    ]
    rows: dict[str, tuple[str, str]] = {}
    for name, here, ddp in ([*(cell.strip() for cell in row), ""][:3] for row in cells):
        # A cell that is too long goes on in the next line.
        name = name or list(rows)[-1]
        before = rows.get(name, ("", ""))
        rows[name] = (f"{before[0]} {here}".strip(), f"{before[1]} {ddp}".strip())
    return rows


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_frozen_parameters_are_in_the_plan_at_every_stage(stage, two_ranks, capsys):
    engine = engine_of_adapters(stage)
    whole = sum(p.nbytes for p in engine.model.parameters() if not p.requires_grad)
    whole += sum(buffer.nbytes for buffer in engine.model.buffers())
    here, ddp = plan_rows(engine, capsys)["frozen parameters and buffers"]
    assert ddp == in_units(whole)
    assert here == in_units(state_plan(engine).frozen)
    assert state_plan(engine).frozen == (whole if stage < 3 else pytest.approx(whole / 2, rel=0.1))


def test_a_plan_without_frozen_parameters_has_no_row_for_them(two_ranks, capsys):
    model = torch.nn.Linear(8, 8)
    engine = ZeroEngine(model, [torch.optim.SGD(model.parameters(), lr=0.1)], 2)
    assert not [name for name in plan_rows(engine, capsys) if name.startswith("frozen")]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_ddp_would_hold_is_what_the_memory_report_says_after_a_step(stage):
    model = gpt2()
    model.transformer.wte.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    engine = ZeroEngine(model, [optimizer], stage)
    model(torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
    optimizer.step()
    held: dict[str, int] = {}
    for row in engine.memory_report().rows:
        held[row.kind] = held.get(row.kind, 0) + row.ddp_bytes
    ddp = ddp_state(engine)
    assert ddp.parameters == held["parameters"] + held["parameters kept whole"]
    assert ddp.frozen == held["frozen parameters and buffers"]
    assert ddp.gradients == held["gradients"]
    assert ddp.optimizer == held["optimizer state"]
    # One rank reduces nothing.
    assert ddp.gradient_buckets == 0


def test_ddp_of_two_ranks_keeps_its_gradient_buckets(two_ranks, capsys):
    engine = engine_of_adapters(2)
    trained = sum(p.nbytes for p in engine.model.parameters() if p.requires_grad)
    rows = plan_rows(engine, capsys)
    assert rows["gradient buckets"][1] == rows["gradients"][1] == rows["parameters"][1] == in_units(trained)
    assert rows["optimizer state (AdamW)"][1] == in_units(2 * trained)
    assert rows["persistent total"][1] == in_units(ddp_state(engine).total)


@pytest.mark.parametrize("width", [80, 120])
def test_the_tables_fit_the_terminal_and_start_with_what_a_run_saves(width, two_ranks, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    engine = engine_of_adapters(3, param_dtype="bfloat16")
    announce(engine, "accelerate casts the forward to bfloat16 and its outputs to float32", "4 a rank x 2 ranks = 8")
    lines = capsys.readouterr().err.splitlines()
    assert max(map(len, lines)) <= width and "…" not in "".join(lines)
    names = [line.split("│")[1].strip() for line in lines if line.startswith("│")]
    assert names[:3] == ["stage", "saved", "rows a step"]
    saved = in_units(ddp_state(engine).total - state_plan(engine).total)
    assert any(f"{saved} of the" in line for line in lines)


def test_no_master_is_named_where_none_is_kept(two_ranks, capsys):
    rows = plan_rows(engine_of_adapters(2), capsys)
    assert "masters" not in rows
    assert rows["dtypes"][0] == "param float32, reduce float32, add float32, step float32, master none"
    rows = plan_rows(engine_of_adapters(2, param_dtype="bfloat16"), capsys)
    assert rows["dtypes"][0] == "param bfloat16, reduce bfloat16, add bfloat16, step float32, master float32"
    assert rows["masters"][0].endswith("KiB")


def test_state_is_told_beforehand_of_any_optimizer_that_can_be_tried(two_ranks, capsys):
    class Own(torch.optim.AdamW):
        pass

    model = torch.nn.Linear(64, 64)
    rows = plan_rows(ZeroEngine(model, [Own(model.parameters())], 2), capsys)
    assert rows["optimizer state (Own)"][1] == in_units(2 * sum(p.nbytes for p in model.parameters()))


def test_state_that_a_trial_does_not_tell_leaves_the_totals_open(two_ranks, capsys):
    model = torch.nn.Linear(64, 64)
    rows = plan_rows(ZeroEngine(model, [torch.optim.Adafactor(model.parameters())], 2), capsys)
    assert rows["optimizer state (Adafactor)"] == ("known after the first step",) * 2
    assert all(said.startswith("at least ") for said in rows["persistent total"])


@pytest.mark.parametrize(
    ("make", "values"),
    [
        (partial(torch.optim.SGD, lr=0.1), 0),
        (partial(torch.optim.SGD, lr=0.1, momentum=0.9), 1),
        (torch.optim.Adagrad, 1),
        (torch.optim.Adadelta, 2),
        (torch.optim.Adam, 2),
        (partial(torch.optim.AdamW, amsgrad=True), 3),
        (partial(torch.optim.AdamW, capturable=True, lr=torch.tensor(1e-3)), 2),
        (torch.optim.Adamax, 2),
        (torch.optim.NAdam, 2),
        (torch.optim.RAdam, 2),
        (torch.optim.RMSprop, 1),
        (partial(torch.optim.RMSprop, centered=True, momentum=0.9), 3),
        (torch.optim.Rprop, 2),
        (torch.optim.Muon, 1),
    ],
)
def test_a_trial_step_sees_the_values_of_state_an_element(make, values):
    optimizer = make([torch.nn.Parameter(torch.ones(3, 2))])
    settings, before = optimizer.param_groups[0], {p: dict(state) for p, state in optimizer.state.items()}
    assert state_itemsizes(optimizer, settings, torch.float32) == (4,) * values
    assert {p: dict(state) for p, state in optimizer.state.items()} == before


@pytest.mark.parametrize(("stage", "order", "is_told"), [(2, None, True), (2, "1", False), (0, None, False)])
def test_the_plan_tells_of_gathers_that_wait_behind_gradients(stage, order, is_told, two_ranks, capsys, monkeypatch):
    monkeypatch.setenv("NCCL_LAUNCH_ORDER_IMPLICIT", order or "0")
    engine = engine_of_adapters(stage)
    engine.groups = replace(engine.groups, backend="nccl")
    said, _ = plan_rows(engine, capsys)["transport"]
    assert ("one communicator: NCCL ran before hf_zero was imported" in said) is is_told
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in said
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    said, _ = plan_rows(engine, capsys)["transport"]
    assert "CUDA_DEVICE_MAX_CONNECTIONS=1 makes collectives wait for kernels" in said


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_small_models_plan_and_reports_never_say_0_mib(stage, two_ranks, capsys):
    engine = engine_of_adapters(stage)
    announce(engine, "nobody")
    said = capsys.readouterr().err + engine.memory_report().table() + engine.comm_report().table()
    assert not re.search(r"\b0\.0 (MiB|KiB)", said)


@pytest.mark.parametrize(
    ("nbytes", "said"),
    [
        (0, "0"),
        (5, "5 B"),
        (1024, "1.0 KiB"),
        (2**20 - 1, "1,024.0 KiB"),
        (2**20, "1.0 MiB"),
        (3 * 2**30, "3,072.0 MiB"),
    ],
)
def test_a_size_has_the_unit_that_leaves_it_digits(nbytes, said):
    assert in_units(nbytes) == said


TABLE_IN_A_NEW_PROCESS = """
import random, sys
from hf_zero.engine.report_tables import render
assert "rich.console" not in sys.modules
random.seed(0)
before = random.getstate()
print(render("plan", ("what", "bytes"), [("state", "1 MiB")]))
raise SystemExit(before != random.getstate())
"""


def test_a_printed_table_leaves_the_random_numbers_of_its_rank():
    """Only rank 0 prints one, and its numbers must stay those of DDP. A new process has not imported rich."""
    done = subprocess.run([sys.executable, "-c", TABLE_IN_A_NEW_PROCESS], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and "1 MiB" in done.stdout, done.stderr
