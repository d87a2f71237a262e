"""A training step with the engine is compared with a step without, and scripts and loops are recorded and run again."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import command_runs
import pytest
import torch
from cells import short_of
from launching import ROOT, own_environment, own_port, run_forked
from ranks import run_ranks
from torch import nn
from training import bert, bert_batch, gpt2, gpt2_batch

import hf_zero
from hf_zero import ZeroConfig
from hf_zero.buckets.bucket import Bucket, ParameterSlot
from hf_zero.config import ConfigError
from hf_zero.diagnose import recorded as recordings
from hf_zero.diagnose.parity import _adding_in_float32
from hf_zero.diagnose.parity_report import ParityError, ParityReport, Recording, compare
from hf_zero.step import training_step
from hf_zero.step.sharded_gradients import ShardedGradients

SECONDS = 90


def batches(rank: int, count: int, make_batch=gpt2_batch) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(11 + rank)
    return [make_batch(generator, 2) for _ in range(count)]


def at_stages(rank: int, world_size: int, settings: list[dict], dropout: float = 0.0, **kwargs) -> list[ParityReport]:
    torch.manual_seed(0)
    model = gpt2(dropout=dropout, layers=1)
    accumulation = kwargs.get("accumulation", 1)
    return [hf_zero.parity(model, batches(rank, 3 * accumulation), each, **kwargs) for each in settings]


def on_ranks(world_size: int, target=at_stages, **kwargs) -> list:
    return run_ranks(target, world_size=world_size, time_limit_s=SECONDS, keyword_arguments=kwargs)


@pytest.mark.parametrize("world_size", short_of([1, 2], [2]))
def test_every_stage_is_equal_bit_for_bit(world_size):
    settings = [{"stage": stage} for stage in range(4)]
    for reports in on_ranks(world_size, settings=settings, dropout=0.1):
        for report in reports:
            assert report.bitwise_expected and report.equal and report.passed, str(report)
            assert report.first is None and report.steps == 3 and report.world_size == world_size


@pytest.mark.slow
def test_local_accumulation_is_equal_and_sharded_within_rounding():
    settings = [{"stage": 2, "grad_accumulation": "local"}, {"stage": 2}]
    for local, sharded in on_ranks(2, settings=settings, accumulation=2):
        assert local.bitwise_expected and local.equal, str(local)
        assert not sharded.bitwise_expected and not sharded.equal and sharded.passed, str(sharded)
        assert "grad_accumulation: sharded" in sharded.reasons[0]


@pytest.mark.slow
def test_three_ranks_and_clipping_are_named_as_reasons():
    for reports in on_ranks(3, settings=[{"stage": 1}, {"stage": 3}], max_norm=0.5):
        for report in reports:
            assert report.passed and "3 ranks" in report.reasons[0] and "clipped" in report.reasons[1], str(report)


def test_8_bit_moments_pass_as_inexact_and_fail_a_tolerance_of_none():
    [report] = hf_zero_alone([{"stage": 2, "moments": "8bit"}])
    assert report.passed and not report.equal and "moments" in report.reasons[0], str(report)
    [strict] = hf_zero_alone([{"stage": 2, "moments": "8bit"}], tolerance=0.0)
    assert not strict.passed and strict.first.kind == "parameter", str(strict)


def hf_zero_alone(settings: list[dict], **kwargs) -> list[ParityReport]:
    return at_stages(0, 1, settings, **kwargs)


WRONG = "transformer.h.0.mlp.c_fc.weight"


def with_faults(rank: int, world_size: int) -> list[ParityReport]:
    """A gradient that is divided by half of what it should be, and a shard that rank 1 forgets to step in its second step."""
    put, end_step_of = ShardedGradients.put, training_step.end_step_of
    ShardedGradients.put = lambda self, slot, gradient: put(self, slot, gradient * (1 + (slot.name == WRONG)))
    [divided] = at_stages(rank, world_size, [{"stage": 2}])
    ShardedGradients.put = put
    kept = []

    def skip_in_second_step(buckets: Sequence[Bucket]) -> dict[Bucket, list[ParameterSlot]]:
        if rank == 1:
            [first] = [bucket.rows[-1].tensor.detach() for bucket in buckets if bucket.layout.index == 0]
            kept.append(first.clone())
            if len(kept) == 2:
                first.copy_(kept[0])
        return end_step_of(buckets)

    training_step.end_step_of = skip_in_second_step
    [skipped] = at_stages(rank, world_size, [{"stage": 1}])
    training_step.end_step_of = end_step_of
    return [divided, skipped]


def test_faults_are_found_with_their_parameter_and_step():
    for divided, skipped in on_ranks(2, target=with_faults):
        assert not divided.passed and divided.first.step == 0 and divided.first.kind == "gradient", str(divided)
        assert divided.first.where == WRONG and divided.first.relative == pytest.approx(1) and not divided.first.others
        assert not skipped.passed and (skipped.first.step, skipped.first.kind) == (1, "parameter"), str(skipped)
        assert skipped.first.others == 0 and skipped.first.relative > 0.1
        assert "NOT equal over 3 optimizer steps on 2 ranks" in str(skipped) and "step 1, parameter of" in str(skipped)


@pytest.mark.parametrize(("units", "tolerance", "passes"), [(1, 1e-3, True), (8, 1e-3, False), (1, 0.0, False)])
def test_a_small_step_of_a_weight_of_one_is_judged_beyond_the_rounding_of_its_value(units, tolerance, passes):
    """A step of 1e-5 is some hundred units in the last place: one of them is more than a thousandth of it."""
    made = []

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        made.append(torch.optim.AdamW(model.parameters(), lr=1e-5))
        if len(made) == 2:
            # The engine's: it rounds the norm's weight to another value.
            apart = units * torch.finfo(torch.float32).eps / 2
            made[1].register_step_post_hook(lambda *_: model.get_parameter("1.weight").detach().sub_(apart))
        return made[-1]

    report = hf_zero.parity(
        nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8)),
        [torch.randn(4, 6) for _ in range(2)],
        1,
        loss=lambda model, batch: (model(batch) * torch.arange(8.0)).square().mean(),
        optimizer=optimizer,
        tolerance=tolerance,
    )
    assert report.passed == passes and report.parameters["1.weight"] > 0, str(report)
    assert passes or report.first.where == "1.weight", str(report)


def test_a_loss_of_ones_own_plain_tensors_and_an_optimizer():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    report = hf_zero.parity(
        model,
        [torch.randn(4, 6) for _ in range(9)],
        1,
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        steps=4,
    )
    assert report.equal and report.steps == 4 and "equal bit for bit over 4 optimizer steps on 1 rank" in str(report)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_what_cannot_be_compared_is_said():
    with pytest.raises(ValueError, match="without a loss"):
        hf_zero.parity(nn.Linear(3, 3), [torch.randn(2, 3)], 1)
    with pytest.raises(ParityError, match="no optimizer step"):
        hf_zero.parity(bert(), batches(0, 1, bert_batch), 1, accumulation=2)


def test_a_report_is_plain_json():
    report = hf_zero.parity(bert(), batches(0, 2, bert_batch), 2)
    told = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert told["passed"] and told["bitwise_expected"] and told["first"] is None


@pytest.mark.parametrize(
    ("device", "settings", "added_in"),
    [
        ("meta", {"stage": 3, "gather_dtype": "bfloat16"}, "float32"),
        ("meta", {"reduce_dtype": "bfloat16"}, "bfloat16"),
        ("meta", {"comm": {"gradients": "int8"}}, "auto"),
        ("cpu", {"param_dtype": "bfloat16"}, "auto"),
    ],
)
def test_an_accelerators_gradients_are_compared_as_added_in_float32(device, settings, added_in):
    model = torch.nn.Linear(2, 2, device=device)
    assert _adding_in_float32(ZeroConfig.of(settings), model).reduce_dtype == added_in


# ---- scripts that know nothing of hf_zero, run without and with the engine ----

SCRIPTS = ROOT / "tests" / "run" / "scripts"


def recorded(folder: Path, zero: str | None, script: str, *arguments: object) -> Recording:
    folder.mkdir()
    options = ("--record", folder, "--steps", 3, *(("--stock",) if zero is None else ()), "--zero", zero or 2)
    environment = os.environ | {"ACCELERATE_USE_CPU": "true"}
    words = (*options, SCRIPTS / script, *arguments)
    done = run_forked("hf_zero.diagnose.recorded", words, environment=environment, processes=2)
    assert done.returncode == 0, done.stderr[-3000:]
    return Recording(folder)


def reports(tmp_path: Path, settings: list[str], script: str, *arguments: object) -> list[ParityReport]:
    stock = recorded(tmp_path / "stock", None, script, *arguments)
    return [compare(stock, recorded(tmp_path / f"{n}", zero, script, *arguments)) for n, zero in enumerate(settings)]


@pytest.mark.slow
def test_an_accelerate_loop_is_equal_but_for_the_norm(tmp_path):
    for report in reports(tmp_path, ["1", "3"], "plain_loop.py", tmp_path / "losses.json"):
        assert report.passed and report.steps == 3 and report.world_size == 2, str(report)
        # A clip that does not scale leaves all else as it is.
        assert report.loss == 0 and not report.gradients and not report.parameters, str(report)
        assert len(report.reasons) == 1 and "clipped" in report.reasons[0]


@pytest.mark.slow
def test_trainer_is_equal_and_inexact_settings_are_named(tmp_path):
    words = ("--output_dir", tmp_path / "out", "--max_steps", 4, "--report_to", "none", "--max_grad_norm", 100)
    exact, inexact = reports(tmp_path, ["2", "stage=2,comm.gradients=int8"], "trainers.py", *words)
    assert exact.passed and exact.loss == 0 and not exact.gradients, str(exact)
    assert inexact.passed and "comm.gradients" in str(inexact) and inexact.gradients, str(inexact)


def test_a_script_without_a_step_cannot_be_compared(tmp_path):
    stock = recorded(tmp_path / "stock", None, "odd_ends.py", "evaluates")
    with pytest.raises(ParityError, match="without the engine took no optimizer step"):
        compare(stock, stock)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_command_launches_the_script_twice_and_ends_with_0(tmp_path):
    words = [
        sys.executable,
        "-c",
        "from hf_zero.cli.app import main; main()",
        "parity",
        "--cpu",
        "--json",
        "--zero",
        "2",
    ]
    words += ["--num-processes", "2", "--port", str(own_port()), str(SCRIPTS / "plain_loop.py"), str(tmp_path / "l")]
    environment = own_environment(tmp_path)
    good = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert good.returncode == 0, good.stderr[-3000:]
    assert json.loads(good.stdout)["passed"]


LONG = """
import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
accelerator = Accelerator()
size = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
model = LlamaForCausalLM(LlamaConfig(**size, num_attention_heads=4))
rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(100, (16, 63))]
optimizer, loader = torch.optim.AdamW(model.parameters()), torch.utils.data.DataLoader(rows, batch_size=2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    accelerator.backward(model(**batch).loss)
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
def test_a_sequence_over_two_ranks_is_compared_with_one_rank(tmp_path):
    script = tmp_path / "long.py"
    script.write_text(LONG)
    report = recordings.parity_of_script(["--zero", "3", str(script)], processes=2, cpu=True, sp=2, port=own_port())
    assert report.passed and report.steps == 3 and report.loss < 1e-5, str(report)
    assert [reason for reason in report.reasons if "2 ranks compute a sequence" in reason]
    with pytest.raises(ConfigError, match="divides the 4 ranks"):
        recordings.parity_of_script(["--zero", "3", str(script)], processes=4, cpu=True, sp=3)


@pytest.mark.slow
def test_the_command_ends_with_1_where_a_run_differs(tmp_path, monkeypatch):
    stock, inexact = (
        recorded(tmp_path / f"{zero}", zero, "plain_loop.py", tmp_path / "losses.json")
        for zero in (None, "stage=2,comm.gradients=int8")
    )
    monkeypatch.setattr(recordings, "parity_of_script", lambda *_, tolerance, **__: compare(stock, inexact, tolerance))
    bad = command_runs.hf_zero("parity", "--json", "--tolerance", "0", "script.py")
    assert bad.exit_code == 1, bad.output
    assert json.loads(bad.stdout)["first"]["kind"] == "gradient"
