"""Plan, reports and parity of models that are split over ranks."""

import json
from pathlib import Path

import pytest
import torch
from cells import slow
from ranks import run_ranks
from shared_ranks import four_ranks
from split_runs import SplitJob, batches, load, local_of, save_models
from typer.testing import CliRunner

import hf_zero
from hf_zero.cli.app import app
from hf_zero.engine.engine import ZeroEngine
from hf_zero.engine.split_model import CopyChecks


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    save_models(folder)
    return folder


def reports(rank: int, world_size: int, folder: Path, tp: int, ep: int) -> dict:
    """One step, what the engine reports of it, and where the rank says that it is."""
    job = SplitJob(folder=str(folder), kind="mixtral", tp=tp, ep=ep, steps=1)
    model = load(job)
    # As Trainer groups them, and so the plan.
    groups = [[p for p in model.parameters() if (p.dim() > 1) is matrix] for matrix in (True, False)]
    optimizer = torch.optim.AdamW([{"params": group} for group in groups], lr=1e-2)
    engine = ZeroEngine(model, [optimizer], {"stage": 2})
    [[batch]] = batches(job, engine.groups.rank, engine.groups.world_size)
    model(**batch).loss.backward()
    optimizer.step()
    memory, comm = engine.memory_report(), engine.comm_report()
    found = {
        "state": sum(row.bytes for row in memory.rows if row.kind.startswith("optimizer state")),
        "sent": comm.bytes_by_verb(),
        "table": comm.table(),
        "place": engine.transport.ledger.watch.log.place,
    }
    engine.close()
    return found | {"local": sum(values.size for values in local_of(model).values())}


def test_plan_and_reports_tell_the_local_part_over_the_copies(folder):
    everyone = four_ranks.run(reports, folder=folder, tp=2, ep=1)
    plan = plan_of(folder, "--tp-size", 2)
    assert plan["held"] == everyone[0]["local"] and plan["activations"] is None
    assert "what the ranks of a copy send each other are left out" in plan["warnings"][0]
    planned = next(each["device"] for each in plan["set_ups"] if each["name"] == "stage 2")
    assert [each["place"].partition(", ")[2] for each in everyone] == [
        f"step 1, dp {data}, tp {part}" for data in (0, 1) for part in (0, 1)
    ]
    for rank, found in enumerate(everyone):
        # The first of two copies has the larger half, and the plan the padding of shards too.
        assert found["state"] + everyone[(rank + 2) % 4]["state"] == 8 * found["local"]
        assert found["state"] <= planned["optimizer state"] <= 1.03 * found["state"]
        # Half of the gradients and half of the parameters to the other copy.
        assert found["sent"]["reduce-scatter"] == pytest.approx(4 * found["local"] / 2, rel=0.1)
        assert found["sent"]["all-gather"] == pytest.approx(4 * found["local"] / 2, rel=0.1)
        first = rank // 2 * 2
        assert f"What ranks [{first}, {first + 1}] send each other in forward and backward" in found["table"]


def plan_of(folder: Path, *options: object) -> dict:
    words = ("plan", folder / "mixtral", "--gpus", 4, "--cpu", "--gpu-memory", "4GB", *options, "--json")
    done = CliRunner().invoke(app, [*map(str, words)])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.mark.parametrize("sizes", [(1, 2), slow((1, 4)), slow((2, 4))])
def test_a_plan_tells_the_state_of_experts_over_the_ranks_that_have_the_same(folder, sizes):
    tp, ep = sizes
    everyone = four_ranks.run(reports, folder=folder, tp=tp, ep=ep)
    plan = plan_of(folder, "--tp-size", tp, "--ep-size", ep)
    assert plan["held"] == everyone[0]["local"]
    planned = next(each["device"] for each in plan["set_ups"] if each["name"] == "stage 2")
    most = max(found["state"] for found in everyone)
    assert most <= planned["optimizer state"] <= 1.03 * most


def test_a_split_that_cannot_be_planned_is_refused_by_name(folder):
    def said(*words: object) -> str:
        done = CliRunner().invoke(app, ["plan", *map(str, words)])
        assert done.exit_code == 1
        return " ".join(done.output.split())

    assert "`tp_size` is 3; allowed: a number that divides the 4 ranks" in said(
        folder / "llama", "--gpus", 4, "--tp-size", 3
    )
    assert "`ep_size` is 3; allowed: 1, a multiple of tp_size (1) that divides the 4 ranks" in said(
        folder / "mixtral", "--gpus", 4, "--ep-size", 3
    )
    assert (
        "ep_size is 8; allowed: a number that divides the 4 experts of 'model.layers.0.mlp.experts.gate_up_proj'"
        in (said(folder / "mixtral", "--gpus", 8, "--ep-size", 8))
    )
    assert "transformers has no ep_plan for LlamaForCausalLM" in said(folder / "llama", "--gpus", 4, "--ep-size", 2)
    config = json.loads((folder / "llama" / "config.json").read_text())
    (folder / "bert").mkdir()
    (folder / "bert" / "config.json").write_text(
        json.dumps({"model_type": "bert", "architectures": ["BertForMaskedLM"], "vocab_size": config["vocab_size"]})
    )
    assert "transformers has no tp_plan for BertForMaskedLM" in said(folder / "bert", "--gpus", 4, "--tp-size", 2)


def compares(rank: int, world_size: int, folder: Path) -> list:
    job = SplitJob(folder=str(folder), kind="mixtral", steps=3)
    model = load(job)
    before = local_of(model)
    rows = [batch for [batch] in batches(job, rank // 2, 2)]
    good = hf_zero.parity(model, rows, {"stage": 3}, max_norm=0.5, tolerance=1e-5)
    counted = CopyChecks.counted
    try:
        CopyChecks.counted = lambda self, row: True
        bad = hf_zero.parity(model, rows, {"stage": 2}, max_norm=0.5, tolerance=1e-5, steps=1)
    finally:
        CopyChecks.counted = counted
    unchanged = all((local_of(model)[name] == values).all() for name, values in before.items())
    return [good, bad, unchanged, next(type(p).__name__ for p in model.parameters())]


@pytest.mark.slow
def test_parity_is_with_the_models_own_split_and_a_plain_all_reduce(folder):
    everyone = run_ranks(compares, world_size=4, time_limit_s=100, keyword_arguments={"folder": folder})
    for good, bad, unchanged, kind in everyone:
        assert good.passed and good.world_size == 4 and good.steps == 3 and len(good.gradients) == 21, str(good)
        assert not bad.passed and bad.norm > 1e-4 > 100 * good.norm, str(bad)
        assert unchanged and kind == "DTensor"
