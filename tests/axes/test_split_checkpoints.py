"""Split models: checkpoints from one layout to another bit for bit, plan and reports, and the doors of accelerate and Trainer."""

import json
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from cells import slow
from shared_ranks import four_ranks, run_on_ranks
from split_runs import LENGTH, VOCABULARY, SplitJob, batches, load, local_of, save_models, whole_of
from trainer_job import as_launched, history
from transformers import LlamaForCausalLM, MixtralForCausalLM, Trainer
from typer.testing import CliRunner

import hf_zero
from hf_zero import ConfigError, ZeroPlugin, ZeroTrainingArguments, engine_of
from hf_zero.checkpoint.verify import checkpoint_faults
from hf_zero.cli.app import app
from hf_zero.engine.engine import ZeroEngine
from hf_zero.engine.split_model import CopyChecks
from hf_zero.integrations.init import load_weights_into
from hf_zero.integrations.state_io import ZERO_FOLDER, load_engine, seal_state, write_state
from hf_zero.integrations.weights import consolidate

pytestmark = pytest.mark.usefixtures("splits_models")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    save_models(folder)
    return folder


def trained_engine(job: SplitJob, lr: float = 1e-2):
    model = load(job)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    return model, optimizer, ZeroEngine(model, [optimizer], job.settings)


def run_step(job: SplitJob, model, optimizer, engine) -> None:
    for [batch] in batches(job, engine.groups.rank, engine.groups.world_size):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def moments(engine, model) -> dict[str, np.ndarray]:
    """Whole moments of each parameter. Collective."""
    split = engine._parts.mesh.split
    found = {}
    for name, parameter in model.named_parameters():
        for kind, value in engine.full_state(parameter).items():
            if torch.is_tensor(value) and value.dim():
                whole = torch.zeros(split.box_of(parameter).shape)
                for box, values in engine._parts.mesh.model_parallel.exchange((split.box_of(parameter), value.numpy())):
                    for there, here in box.slices():
                        whole[there] = torch.from_numpy(values)[here]
                found[f"{kind} of {name}"] = whole.numpy()
    return found


def save(rank: int, world_size: int, job: SplitJob, checkpoint: Path, resumed: Path | None = None) -> dict:
    """Trains, saves, and returns everything that a checkpoint keeps; with `resumed`, that is what is saved."""
    model, optimizer, engine = trained_engine(job)
    if resumed is None:
        run_step(job, model, optimizer, engine)
    else:
        load_weights_into(engine, resumed)
        load_engine(engine, resumed / ZERO_FOLDER)
    manifest = write_state(engine, checkpoint / ZERO_FOLDER)
    if not engine.state.is_split:
        with engine.gathered() if engine.config.stage == 3 else nullcontext():
            if rank == 0:
                # A mixture's files have a tensor for each expert.
                model.save_pretrained(checkpoint)
    engine.world.barrier("the model is saved", 60)
    seal_state(engine, checkpoint, manifest)
    kept = moments(engine, model)
    engine.close()
    return kept | whole_of(model)


LAYOUTS = {
    "tp2 x dp2": (4, 2, 1),
    "dp4": (4, 1, 1),
    "tp4": (4, 4, 1),
    "one": (1, 1, 1),
    "tp2 ep2": (4, 2, 2),
    "tp4 ep4": (4, 4, 4),
    # Experts over more ranks than compute a batch together.
    "ep2": (4, 1, 2),
    "ep4": (4, 1, 4),
    "tp2 ep4": (4, 2, 4),
}


@pytest.mark.parametrize(
    ("kind", "settings", "start", "layouts"),
    [
        pytest.param(
            *("mixtral", {"stage": 3, "comm": {"gradients": "int8"}}, "tp2 ep4", ["one", "ep2"]),
            marks=pytest.mark.extra("wire"),
        ),
        slow("llama", {"stage": 2}, "tp2 x dp2", ["one", "dp4", "tp4"]),
        slow("mixtral", {"stage": 3}, "tp2 ep2", ["dp4", "tp4 ep4", "one", "ep2"]),
        slow("mixtral", {"stage": 0}, "ep2", ["ep4", "one", "tp2 ep4"]),
        slow("mixtral", {"stage": 2}, "tp2 ep4", ["ep2", "dp4", "tp2 x dp2"]),
        slow("mixtral", {"stage": 3}, "ep4", ["tp2 ep4", "one"]),
        slow("mixtral", {"stage": 3}, "tp2 ep4", ["one", "ep2"]),
        slow("mixtral", {"stage": 2, "comm": {"gradients": "int8"}}, "tp2 ep4", ["ep2", "one"]),
        slow("llama", {"stage": 3, "comm": {"gradients": "int8", "weights": "int8"}}, "tp2 x dp2", ["tp4", "dp4"]),
    ],
)
def test_saved_split_and_resumed_elsewhere_and_back_bit_for_bit(folder, tmp_path, kind, settings, start, layouts):
    def run(layout: str, checkpoint: Path, resumed: Path | None) -> list[dict]:
        world_size, tp, ep = LAYOUTS[layout]
        job = SplitJob(folder=str(folder), kind=kind, tp=tp, ep=ep, settings=settings, steps=2)
        arguments = {"job": job, "checkpoint": checkpoint, "resumed": resumed}
        if world_size == 4:
            return four_ranks.run(save, **arguments)
        return run_on_ranks(save, world_size=world_size, **arguments)

    first = tmp_path / start
    [saved, *_] = run(start, first, None)
    for layout in layouts:
        away = tmp_path / layout
        for kept in run(layout, away, first):
            assert checkpoint_faults(away, ZERO_FOLDER) == []
            assert kept.keys() == saved.keys()
            assert all(np.array_equal(kept[name], saved[name]) for name in saved)
    for kept in run(start, tmp_path / "back", tmp_path / layouts[0]):
        assert all(np.array_equal(kept[name], saved[name]) for name in saved)
    (first / "config.json").write_text((folder / kind / "config.json").read_text())
    consolidate(first, tmp_path / "whole")
    make = LlamaForCausalLM if kind == "llama" else MixtralForCausalLM
    model = make.from_pretrained(tmp_path / "whole")
    for name, parameter in model.named_parameters():
        assert np.array_equal(parameter.detach().numpy(), saved[name]), name


# ---- plan and reports ----


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
        "place": engine.transport.ledger.watch.log.phase,
    }
    engine.close()
    return found | {"local": sum(values.size for values in local_of(model).values())}


@pytest.mark.extra("planner")
def test_plan_and_reports_tell_the_local_part_over_the_copies(folder):
    everyone = four_ranks.run(reports, folder=folder, tp=2, ep=1)
    plan = plan_of(folder, "--tp-size", 2)
    assert plan["held"] == everyone[0]["local"] and plan["activations"] is None
    assert "the traffic inside a copy" in plan["warnings"][0]
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
        assert f"between ranks [{first}, {first + 1}] in forward and backward" in found["table"]


def plan_of(folder: Path, *options: object) -> dict:
    words = ("plan", folder / "mixtral", "--gpus", 4, "--cpu", "--gpu-memory", "4GB", *options, "--json")
    done = CliRunner().invoke(app, [*map(str, words)])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.mark.extra("planner")
@pytest.mark.parametrize("sizes", [(1, 2), slow((1, 4)), slow((2, 4))])
def test_a_plan_tells_the_state_of_experts_over_the_ranks_that_have_the_same(folder, sizes):
    tp, ep = sizes
    everyone = four_ranks.run(reports, folder=folder, tp=tp, ep=ep)
    plan = plan_of(folder, "--tp-size", tp, "--ep-size", ep)
    assert plan["held"] == everyone[0]["local"]
    planned = next(each["device"] for each in plan["set_ups"] if each["name"] == "stage 2")
    most = max(found["state"] for found in everyone)
    assert most <= planned["optimizer state"] <= 1.03 * most


@pytest.mark.extra("planner")
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
    is_first_with = CopyChecks.is_first_with
    try:
        # Then a parameter that all ranks of a copy hold counts once for each rank in the norm.
        CopyChecks.is_first_with = lambda self, name: True
        bad = hf_zero.parity(model, rows, {"stage": 2}, max_norm=0.5, tolerance=1e-5, steps=1)
    finally:
        CopyChecks.is_first_with = is_first_with
    unchanged = all((local_of(model)[name] == values).all() for name, values in before.items())
    return [good, bad, unchanged, next(type(p).__name__ for p in model.parameters())]


@pytest.mark.slow
def test_parity_is_with_the_models_own_split_and_a_plain_all_reduce(folder):
    everyone = run_on_ranks(compares, world_size=4, folder=folder)
    for good, bad, unchanged, kind in everyone:
        assert good.passed and good.world_size == 4 and good.steps == 3 and len(good.gradients) == 21, str(good)
        assert not bad.passed and bad.norm > 1e-4 > 100 * good.norm, str(bad)
        assert unchanged and kind == "DTensor"


@pytest.fixture(scope="module")
def folder_name(tmp_path_factory):
    folder_name = tmp_path_factory.mktemp("models")
    save_models(folder_name)
    return str(folder_name)


# ---- accelerate and Trainer ----


def texts(count: int = 48) -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(0, VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(3))
    return [{"input_ids": row, "labels": row} for row in ids]


def accelerated(
    rank: int, world_size: int, folder: str, kind: str, sizes: tuple, saved: Path | None, resumed: Path | None
) -> dict:
    as_launched(rank, world_size)
    tp, ep = sizes
    plugin = ZeroPlugin(stage=2, tp_size=tp)
    accelerator = Accelerator(parallelism_config=plugin, cpu=True)
    model = load(SplitJob(folder=folder, kind=kind, tp=tp, ep=ep))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = torch.utils.data.DataLoader(texts(), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if resumed is not None:
        accelerator.load_state(str(resumed))
    losses = []
    for step, batch in enumerate(loader):
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean().item())
        if step == 2:
            break
    if saved is not None:
        accelerator.save_state(str(saved))
    whole = accelerator.get_state_dict(model)
    engine_of(model).close()
    by_layer = whole_of(model)
    assert sizes == (1, 1) or (len(whole) > 0) == (rank == 0)
    assert all(np.array_equal(whole[name].numpy(), by_layer[name]) for name in by_layer if whole)
    return {"losses": losses, "whole": by_layer}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "sizes", "copies"), [("llama", (2, 1), 2), ("mixtral", (1, 2), 4), ("mixtral", (2, 4), 2)]
)
def test_accelerate_trains_saves_and_resumes(folder_name, tmp_path, kind, sizes, copies):
    def run(world_size: int, sizes: tuple, saved: str | None = None, resumed: str | None = None) -> dict:
        return run_on_ranks(
            accelerated,
            world_size=world_size,
            folder=folder_name,
            kind=kind,
            sizes=sizes,
            saved=None if saved is None else tmp_path / saved,
            resumed=None if resumed is None else tmp_path / resumed,
        )[0]

    split, plain = run(4, sizes, saved="split"), run(copies, (1, 1), saved="plain")
    assert split["losses"] == pytest.approx(plain["losses"], rel=1e-5)
    onward = run(copies, (1, 1), resumed="split"), run(4, sizes, resumed="plain")
    assert onward[0]["losses"] == pytest.approx(onward[1]["losses"], rel=1e-3)


def with_two_models(
    rank: int,
    world_size: int,
    folder: str,
    models: list[tuple],
    saved: Path,
    resumed: Path | None = None,
    safe_serialization: bool = True,
) -> tuple[list, list]:
    """Whole parameters of two models as they were saved, and as they are behind a load over others."""
    as_launched(rank, world_size)
    accelerator = Accelerator(parallelism_config=ZeroPlugin(stage=1, tp_size=models[0][1]), cpu=True)
    prepared = []
    for number, (kind, tp, ep) in enumerate(models):
        model = load(SplitJob(folder=folder, kind=kind, tp=tp, ep=ep))
        # SGD without momentum has no state, and float32 no masters: nothing else would bring the values back.
        model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        prepared.append(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(number + 1)
    if resumed is None:
        accelerator.save_state(str(saved), safe_serialization=safe_serialization)
    before = [parts_of(model) for model in prepared]
    with torch.no_grad():
        for parameter in (p for model in prepared for p in model.parameters()):
            parameter.fill_(9)
    accelerator.load_state(str(resumed or saved))
    after = [parts_of(model) for model in prepared]
    for model in prepared:
        engine_of(model).close()
    return before, after


def parts_of(model) -> dict[str, np.ndarray]:
    return {name: p.detach().numpy().copy() for name, p in model.named_parameters()}


MIXTURE, ITS_EXPERTS_SPLIT = ("mixtral", 1, 1), ("mixtral", 1, 2)


@pytest.mark.parametrize(
    ("models", "resumed"),
    [
        ([ITS_EXPERTS_SPLIT, MIXTURE], None),
        # Of one kind: a file that is taken for the other model's fits.
        slow([ITS_EXPERTS_SPLIT, MIXTURE], [MIXTURE, ITS_EXPERTS_SPLIT]),
        slow([MIXTURE, ITS_EXPERTS_SPLIT], [ITS_EXPERTS_SPLIT, MIXTURE]),
        slow([MIXTURE, MIXTURE], [ITS_EXPERTS_SPLIT, MIXTURE]),
        slow([MIXTURE, MIXTURE], [MIXTURE, ITS_EXPERTS_SPLIT]),
        slow([("llama", 2, 1), ("llama", 2, 1)], [("llama", 1, 1), ("llama", 1, 1)]),
    ],
    ids=str,
)
def test_two_models_of_which_one_is_split_are_loaded_as_they_were_saved(folder_name, tmp_path, models, resumed):
    state = tmp_path / "state"
    outcomes = run_on_ranks(with_two_models, folder=folder_name, models=models, saved=state)
    if resumed is not None:
        outcomes += run_on_ranks(with_two_models, folder=folder_name, models=resumed, saved=state, resumed=state)
    for outcome in outcomes:
        for before, after in zip(*outcome):
            assert all(np.array_equal(after[name], before[name]) for name in before)


@pytest.mark.slow
def test_a_split_second_model_is_not_read_from_a_pickle_and_the_error_names_the_file(folder_name, tmp_path):
    how, state = {"folder": folder_name, "saved": tmp_path / "state"}, tmp_path / "state"
    run_on_ranks(with_two_models, models=[MIXTURE, MIXTURE], safe_serialization=False, **how)
    with pytest.raises(RuntimeError, match=r"holds no model_1\.safetensors, only pytorch_model_1\.bin") as raised:
        run_on_ranks(with_two_models, models=[MIXTURE, ITS_EXPERTS_SPLIT], resumed=state, **how)
    assert "safe_serialization=True" in str(raised.value)


def recorded(rank: int, world_size: int, folder: str, log: Path) -> tuple[bool, bool]:
    as_launched(rank, world_size)
    accelerator = Accelerator(parallelism_config=ZeroPlugin(stage=2, tp_size=2, report=str(log)), cpu=True)
    model = load(SplitJob(folder=folder))
    model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    with hf_zero.RunRecorder(engine_of(model), log / "loop") as recorder:
        records = accelerator.zero_recorder is not None, recorder.is_open
    accelerator.end_report()
    engine_of(model).close()
    return records


@pytest.mark.extra("report")
def test_one_rank_of_a_copy_writes_the_log(folder_name, tmp_path):
    assert run_on_ranks(recorded, folder=folder_name, log=tmp_path) == [(True, True), (False, False)]


def trained(rank: int, world_size: int, folder: str, kind: str, sizes: tuple, output: str, resume: str | None) -> dict:
    as_launched(rank, world_size)
    tp, ep = sizes
    model = load(SplitJob(folder=folder, kind=kind, tp=tp, ep=ep))
    arguments = ZeroTrainingArguments(
        zero="2",
        output_dir=output,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=2,
        logging_steps=1,
        save_steps=1,
        learning_rate=1e-2,
        max_grad_norm=0.5,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        seed=3,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=texts())
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model()
    engine_of(trainer.model).close()
    return {"whole": whole_of(trainer.model)} | history(trainer)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "sizes", "copies", "is_resumed"),
    [
        ("llama", (2, 1), 2, False),
        slow("llama", (2, 1), 2, True),
        slow("mixtral", (1, 2), 4, True),
        slow("mixtral", (2, 4), 2, True),
    ],
)
def test_trainer_trains_saves_and_resumes(folder_name, tmp_path, kind, sizes, copies, is_resumed):
    def run(world_size: int, sizes: tuple, name: str, resume: str | None = None) -> dict:
        output = str(tmp_path / name)
        return run_on_ranks(
            trained,
            world_size=world_size,
            time_limit_s=200,
            folder=folder_name,
            kind=kind,
            sizes=sizes,
            output=output,
            resume=resume,
        )[0]

    split, plain = run(4, sizes, "split"), run(copies, (1, 1), "plain")
    assert split["losses"] == pytest.approx(plain["losses"], rel=1e-5)
    assert split["norms"] == pytest.approx(plain["norms"], rel=1e-4)
    if is_resumed:
        again = run(4, sizes, "again", resume=str(tmp_path / "split" / "checkpoint-1"))
        assert all(np.array_equal(again["whole"][name], split["whole"][name]) for name in split["whole"])
    saved = (LlamaForCausalLM if kind == "llama" else MixtralForCausalLM).from_pretrained(tmp_path / "split")
    assert all(np.array_equal(p.detach().numpy(), split["whole"][name]) for name, p in saved.named_parameters())
    state = json.loads((tmp_path / "split" / "checkpoint-2" / "trainer_state.json").read_text())
    assert state["global_step"] == 2


def refused(rank: int, world_size: int) -> str:
    as_launched(rank, world_size)
    with pytest.raises(ConfigError) as error:
        Accelerator(parallelism_config=ZeroPlugin(stage=2, tp_size=3), cpu=True)
    return str(error.value)


def test_a_tp_size_that_does_not_divide_the_ranks_is_refused():
    assert "tp_size is 3, which does not divide the 2 ranks" in run_on_ranks(refused)[0]
