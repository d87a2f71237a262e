"""Stage 3 under bf16 mixed precision: bfloat16 in forward and backward, float32 in the shard and in everything that is kept."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cells import slow
from ranks import run_alone
from safetensors.torch import load_file
from shared_ranks import on_ranks, run_on_ranks
from torch import nn
from trainer_job import as_launched, make_trainer
from training import (
    Answer,
    Job,
    Unruly,
    adamw_in_two_groups,
    bert,
    bert_batch,
    compare_with_ddp,
    gpt2,
    gpt2_batch,
    llama,
    train,
)

import hf_zero
from hf_zero import engine_of
from hf_zero.engine.engine import ZeroEngine

pytestmark = pytest.mark.timeout(180)
SMALL_BUCKETS = {"bucket_bytes": "20KiB"}
GATHERED = {"stage": 3, "gather_dtype": "bfloat16", **SMALL_BUCKETS}
WITH_COPIES = {"param_dtype": "bfloat16", **SMALL_BUCKETS}
AUTOCAST = {"stage": 3, **SMALL_BUCKETS}
GPT2 = Job(autocast=True, max_norm=1.0)


def rounded(tensors: dict) -> dict[str, list]:
    return {name: torch.as_tensor(value).bfloat16().float().tolist() for name, value in tensors.items()}


def as_in_copies(pairs: list) -> None:
    """The first variant's run is each of the others', which keep 16-bit parameters beside the master, and near DDP's."""
    (ddp, gathered), *others = pairs
    assert gathered.loss_error(ddp) < 5e-3
    for _, other in others:
        assert (gathered.losses, gathered.norms) == (other.losses, other.norms)
        assert rounded(gathered.tensors) == rounded(other.tensors)
    # What is handed out has the digits of the master.
    assert rounded(gathered.tensors) != {name: value.tolist() for name, value in gathered.tensors.items()}


JOBS = {
    # Without a clip: stages add up the norm in another order.
    "gpt2": (replace(GPT2, max_norm=None), [{"stage": stage, **WITH_COPIES} for stage in (1, 2, 3)]),
    "bert, accumulation": (
        replace(GPT2, make_model=bert, make_batch=bert_batch, accumulation=2),
        [{"stage": 3, **WITH_COPIES}],
    ),
}


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.short_cells("gpt2")
def test_training_is_bitwise_that_of_bf16_parameters_with_a_master(name):
    job, others = JOBS[name]
    for pairs in run_on_ranks(compare_with_ddp, job=job, variants=[GATHERED, *others]):
        as_in_copies(pairs)


def test_one_rank_that_fetches_its_parameters_gathers_bf16():
    offload = {"offload": {"params": "cpu", "optimizer": "cpu"}}
    found = [
        run_alone(train, time_limit_s=60, keyword_arguments={"rank": 0, "world_size": 1, "job": job})
        for job in (replace(GPT2, settings=s | offload) for s in (GATHERED, {"stage": 3, **WITH_COPIES}))
    ]
    assert found[0].losses == found[1].losses
    assert rounded(found[0].tensors) == rounded(found[1].tensors)


PLACES = {
    "parameters on the host": {"offload": {"params": "cpu"}},
    "state on the host": {"offload": {"optimizer": "cpu"}},
    "all in files": {"offload": {"params": "nvme", "optimizer": "nvme"}},
    "kept until the step": {"reshard_after_forward": False},
}


@pytest.mark.slow
def test_no_place_changes_a_digit(tmp_path):
    places = json.loads(json.dumps(PLACES))
    places["all in files"]["offload"]["nvme_path"] = str(tmp_path)
    pairs = run_on_ranks(
        compare_with_ddp, job=GPT2, variants=[GATHERED, *(GATHERED | more for more in places.values())]
    )[0]
    for name, (_, outcome) in zip(places, pairs[1:], strict=True):
        assert outcome.equals(pairs[0][1]), name
        assert outcome.norms == pairs[0][1].norms, name


class Wavy(nn.Module):
    """A float32 buffer beside the embedding, so that layer and group norms get float32 from bfloat16 weights."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(211, 24)
        self.register_buffer("waves", torch.linspace(0, 9, 16 * 24).sin().view(16, 24))
        self.norm, self.groups, self.head = nn.LayerNorm(24), nn.GroupNorm(4, 24), nn.Linear(24, 211)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Answer:
        hidden = self.groups(self.norm(self.embed(input_ids) + self.waves).mean(1))
        return Answer(nn.functional.cross_entropy(self.head(hidden).float(), labels[:, 0]))


class Strict(Wavy):
    _keep_in_fp32_modules_strict = ("embed",)


@pytest.mark.parametrize("make_model", [Unruly, Wavy, slow(Strict)], ids=lambda model: model.__name__)
def test_odd_models_train_as_under_autocast(make_model):
    job = replace(GPT2, make_model=make_model, find_unused=True)
    (ddp, gathered), (_, autocast) = run_on_ranks(compare_with_ddp, job=job, variants=[GATHERED, AUTOCAST])[0]
    assert gathered.loss_error(ddp) < 1e-2
    assert gathered.losses != autocast.losses


def dtypes_in_a_forward(rank: int, world_size: int, make_model: type) -> dict[str, str]:
    torch.manual_seed(0)
    model, found = make_model(), {}
    ZeroEngine(model, [adamw_in_two_groups(model)], GATHERED)
    for name, module in model.named_children():
        module.register_forward_pre_hook(
            lambda module, _args, name=name: found.update({name: str(module.weight.dtype)[6:]})
        )
    with torch.autocast("cpu", torch.bfloat16):
        model(**gpt2_batch(torch.Generator().manual_seed(0), 2))
    return found


def test_batch_norms_and_what_transformers_keeps_in_float32_stay_float32():
    unruly, strict = (run_on_ranks(dtypes_in_a_forward, make_model=make)[0] for make in (Unruly, Strict))
    assert unruly["norm"] == "float32"
    assert {dtype for name, dtype in unruly.items() if name != "norm"} == {"bfloat16"}
    assert strict == {"embed": "float32", "norm": "bfloat16", "groups": "bfloat16", "head": "bfloat16"}


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> float:
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(**gpt2_batch(torch.Generator().manual_seed(seed), 2)).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def bytes_of_a_step(rank: int, world_size: int, settings: dict) -> dict[str, int]:
    """What is sent, and what a forward leaves of weights cast to bfloat16 outside of the buffers that come and go."""
    torch.manual_seed(0)
    model = llama()
    optimizer = adamw_in_two_groups(model)
    engine = ZeroEngine(model, [optimizer], settings)
    one_step(model, optimizer, 0)
    before = {row.kind: row.bytes_sent for row in engine.comm_report().rows}
    one_step(model, optimizer, 1)
    sent = {row.kind: row.bytes_sent - before.get(row.kind, 0) for row in engine.comm_report().rows}
    weights = {tuple(p.shape) for p in model.parameters() if p.dim() == 2}
    weights |= {shape[::-1] for shape in weights}
    passing = {b.flat.untyped_storage().data_ptr() for unit in engine.sharded.schedule.units for b in unit.buckets}
    casts: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        place = tensor.untyped_storage().data_ptr()
        if tensor.dtype == torch.bfloat16 and tuple(tensor.shape) in weights and place not in passing:
            casts[place] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**gpt2_batch(torch.Generator().manual_seed(2), 2)).loss
    loss.backward()
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2 and "embed_tokens" not in name)
    report = {row.kind: row.bytes for row in engine.memory_report().rows}
    return {"casts": sum(casts.values()), "matrices": matrices, "parameters": report["parameters"]} | sent


def test_no_cast_weights_live_between_forward_and_backward_and_half_the_bytes_travel():
    autocast, gathered = (
        run_on_ranks(bytes_of_a_step, settings=settings)[0]
        # Elements a bucket are the same.
        for settings in (AUTOCAST | {"bucket_bytes": "40KiB"}, GATHERED)
    )
    assert autocast["casts"] == 2 * autocast["matrices"]
    assert gathered["casts"] == 0
    for kind in ("all-gather of parameters", "reduce-scatter of gradients"):
        assert gathered[kind] * 2 == autocast[kind] > 0, kind
    # One float32 copy over the ranks, and no other.
    assert gathered["parameters"] == autocast["parameters"]


@pytest.mark.parametrize("more", [{}, slow(PLACES["parameters on the host"])], ids=["device", "host"])
@on_ranks(2)
def test_outside_of_passes_parameters_are_float32_to_the_last_digit(rank, world_size, more):
    settings = GATHERED | more
    torch.manual_seed(0)
    model = gpt2()
    loaded = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = adamw_in_two_groups(model)
    engine = ZeroEngine(model, [optimizer], settings)
    first = model.state_dict()
    found = {"as loaded": all(torch.equal(first[name], value) for name, value in loaded.items())}
    for seed in range(2):
        one_step(model, optimizer, seed)
    trained = model.state_dict()
    with hf_zero.gathered(model):
        found["gathered"] = all(torch.equal(trained[name], p) for name, p in model.named_parameters())
        inside = model.state_dict()
        found["state dict inside"] = all(torch.equal(trained[name], inside[name]) for name in trained)
        penalty = sum(p.square().sum() for p in model.transformer.h[0].parameters())
    with hf_zero.gathered(model, writeback=True), torch.no_grad():
        # Less than a bfloat16's last digit.
        model.transformer.wte.weight[3] += 1e-4
    change = model.state_dict()["transformer.wte.weight"] - trained["transformer.wte.weight"]
    found["edited"] = bool((change[3] - 1e-4).abs().max() < 1e-6) and int(change.abs().sum(1).count_nonzero()) == 1
    penalty.backward()
    found["penalty"] = bool(engine.clip_grad_norm_(1e9) > 0)
    optimizer.zero_grad()
    model.load_state_dict(trained)
    found["loaded again"] = all(torch.equal(trained[name], value) for name, value in model.state_dict().items())
    found["float() changes nothing"] = model.float() is model
    with hf_zero.gathered(model):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**gpt2_batch(torch.Generator().manual_seed(3), 2)).loss
        loss.backward()
    found["trained inside"] = bool(engine.clip_grad_norm_(1e9) > 0)
    optimizer.step()
    optimizer.zero_grad()
    trained = model.state_dict()
    engine.close()
    found["handed back"] = all(torch.equal(p, trained[name]) for name, p in model.named_parameters())
    assert all(found.values()), found


def with_frozen_base(rank: int, world_size: int, dtype: torch.dtype) -> dict[str, object]:
    torch.manual_seed(0)
    model = gpt2().to(dtype)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("ln_" in name)
        if "ln_" in name:
            parameter.data = parameter.data.float()
    loaded = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = adamw_in_two_groups(model)
    engine = ZeroEngine(model, [optimizer], GATHERED)
    losses = [one_step(model, optimizer, seed) for seed in range(3)]
    frozen = {name: value for name, value in loaded.items() if "ln_" not in name}
    state, report = model.state_dict(), {row.kind: row for row in engine.memory_report().rows}
    base = report["frozen parameters and buffers"]
    return {
        "losses": losses,
        "kept": all(torch.equal(state[name], value) for name, value in frozen.items()),
        "bytes an element": base.bytes * world_size / sum(value.numel() for value in frozen.values()),
        "a whole one": base.ddp_bytes / sum(value.numel() for value in frozen.values()),
        "master": report["fp32 master"].bytes,
        "dtype": str(model.transformer.wte.weight.dtype),
    }


@pytest.mark.slow
def test_a_frozen_base_is_gathered_in_bf16_and_kept_as_it_was_loaded():
    wide, narrow = (run_on_ranks(with_frozen_base, dtype=dtype)[0] for dtype in (torch.float32, torch.bfloat16))
    assert wide["kept"] and narrow["kept"]
    # No difference to forward and backward.
    assert wide["losses"] == narrow["losses"]
    assert wide["dtype"] == narrow["dtype"] == "torch.bfloat16"
    assert wide["bytes an element"] == pytest.approx(4, rel=0.1) and wide["a whole one"] == pytest.approx(4)
    assert narrow["bytes an element"] == pytest.approx(2, rel=0.1)
    assert wide["master"] == narrow["master"] == 0


def through_trainer(
    rank: int, world_size: int, folder: str, zero: str, resume: str | None = None, **overrides: object
) -> dict[str, object]:
    as_launched(rank, world_size)
    settings = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3, "dropout": 0.0, "bf16": True, **overrides}
    trainer = make_trainer(f"flag {zero}", "gpt2", folder, **settings)
    trainer.train(resume_from_checkpoint=resume)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    engine = engine_of(trainer.model)
    trainer.save_model(f"{folder}/model")
    return {"losses": losses, "row": engine.dtype_report().rows[0], "eval": trainer.evaluate()["eval_loss"]}


def in_trainer(folder: str, zero: str, **more: object) -> dict[str, object]:
    return run_on_ranks(through_trainer, folder=folder, zero=zero, **more)[0]


@pytest.mark.slow
def test_trainers_checkpoints_go_both_ways_between_autocast_and_gathered_bf16(tmp_path):
    new, old = str(tmp_path / "new"), str(tmp_path / "old")
    autocast = in_trainer(old, "stage=3,param_dtype=float32")
    whole = in_trainer(new, "3", bf16_full_eval=True)
    assert (autocast["row"].parameter, autocast["row"].reduce) == ("float32", "float32")
    row = whole["row"]
    assert (row.parameter, row.gradient, row.reduce, row.step, row.master) == (*["bfloat16"] * 3, *["float32"] * 2)
    assert whole["losses"] == pytest.approx(autocast["losses"], rel=5e-3)
    for folder in (f"{new}/checkpoint-3", f"{new}/model", f"{old}/checkpoint-3"):
        weights = load_file(f"{folder}/model.safetensors")
        assert {value.dtype for value in weights.values()} == {torch.float32}
        assert json.loads(Path(folder, "config.json").read_text())["dtype"] == "float32"
    digits = load_file(f"{new}/checkpoint-3/model.safetensors")["transformer.wte.weight"]
    assert not torch.equal(digits, digits.bfloat16().float())
    resumed = in_trainer(new, "3", resume=f"{new}/checkpoint-3")
    assert resumed["losses"][-3:] == whole["losses"][-3:]
    # As the version before saved it, where bf16 was autocast at stage 3; and back.
    for zero, checkpoint in (("3", f"{old}/checkpoint-3"), ("stage=3,param_dtype=float32", f"{new}/checkpoint-3")):
        crossed = in_trainer(str(tmp_path / "crossed"), zero, resume=checkpoint)
        assert crossed["losses"][-3:] == pytest.approx(autocast["losses"][-3:], rel=5e-3)


def through_accelerate(rank: int, world_size: int, settings: dict, folder: str) -> dict[str, object]:
    as_launched(rank, world_size)
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, mixed_precision="bf16", parallelism_config=hf_zero.ZeroPlugin(**settings))
    torch.manual_seed(0)
    model = gpt2()
    model, optimizer = accelerator.prepare(model, adamw_in_two_groups(model))
    losses = []
    for seed in range(4):
        loss = model(**gpt2_batch(torch.Generator().manual_seed(seed), 2)).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 100.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if seed == 1:
            accelerator.save_state(folder)
    accelerator.load_state(folder)
    engine = engine_of(accelerator.unwrap_model(model))
    again = [model(**gpt2_batch(torch.Generator().manual_seed(2), 2)).loss.item()]
    saved = accelerator.get_state_dict(model)
    dtypes = {str(value.dtype) for value in saved.values()}
    # Which takes out of the dict what it has written.
    saver = accelerator.unwrap_model(model)
    saver.save_pretrained(f"{folder}/saved", is_main_process=accelerator.is_main_process, state_dict=saved)
    return {"losses": losses, "again": again, "parameter": engine.dtype_report().rows[0].parameter, "saved": dtypes}


@pytest.mark.parametrize("stages_of_copies", [(2,), slow((1, 2, 3))], ids=["some", "every"])
def test_accelerates_bf16_gathers_bf16_and_goes_with_param_dtype_bfloat16(tmp_path, stages_of_copies):
    runs = {"gathered": {"stage": 3}, **{f"copies {stage}": {"stage": stage} for stage in stages_of_copies}}
    found = {}
    for name, settings in runs.items():
        more = {"param_dtype": "bfloat16"} if name != "gathered" else {}
        found[name] = run_on_ranks(through_accelerate, settings=settings | more, folder=str(tmp_path / name))[0]
        assert found[name]["losses"] == found["gathered"]["losses"], name
        assert found[name]["again"] == found[name]["losses"][2:3], name
        assert found[name]["parameter"] == "bfloat16"
    assert found["gathered"]["saved"] == {"torch.float32"}
    assert json.loads((tmp_path / "gathered" / "saved" / "config.json").read_text())["dtype"] == "float32"
    assert found["copies 2"]["saved"] == {"torch.bfloat16"}


GATHERED_SMALL = {"stage": 3, "gather_dtype": "bfloat16", "bucket_bytes": "20KiB"}
CLIPPED = Job(autocast=True, steps=4, max_norm=1.0)
# ---- beside what else gathers parameters ----

NEAR = {"comm": {"secondary_shard": "node", "node_size": 2}}


def reading(name: str, before: str) -> Callable[[nn.Module], None]:
    """Prepares a model to read a whole parameter in its forward, before a module of it runs."""

    def prepare(model: nn.Module) -> None:
        parameter = model.get_parameter(name)

        def read(_module: nn.Module, _args: tuple) -> None:
            if torch.is_grad_enabled():
                with hf_zero.gathered(parameter):
                    assert parameter.dtype == torch.float32 and parameter.isfinite().all()

        model.get_submodule(before).register_forward_pre_hook(read)

    return prepare


READS = {
    "of a layer to come": ("transformer.h.2.mlp.c_fc.weight", "transformer.h.0.mlp"),
    "of a layer that has run": ("transformer.h.0.mlp.c_fc.weight", "transformer.h.2.mlp"),
    "of the layer that runs": ("transformer.h.1.attn.c_attn.weight", "transformer.h.1.mlp"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "more"),
    [(2, {}), pytest.param(4, {}, marks=pytest.mark.slow), pytest.param(4, NEAR, marks=pytest.mark.slow)],
    ids=["2 ranks", "4 ranks", "4 ranks with secondary shards"],
)
@on_ranks()
def test_whole_parameters_read_inside_a_forward_leave_it_in_bf16(rank, world_size, more):
    job = replace(CLIPPED, steps=2, settings={**GATHERED_SMALL, **more})
    plain = train(rank, world_size, job)
    for place, (name, before) in READS.items():
        found = train(rank, world_size, replace(job, prepare=reading(name, before)))
        assert found.equals(plain), f"{place}: {found.losses} for {plain.losses}"
    # With another dtype in between, autograd no longer adds up in bf16 the gradients of a weight's two uses, embedding and
    # head: each comes by itself, and they are added in float32.
    found = train(rank, world_size, replace(job, prepare=reading("transformer.wte.weight", "transformer.h.1")))
    assert found.losses == pytest.approx(plain.losses, rel=1e-4)


@pytest.mark.slow
@on_ranks(4)
def test_secondary_shards_of_bf16_gathers_train_to_the_same_bits(rank, world_size):
    job = replace(CLIPPED, steps=3, accumulation=2)
    plain, near = (train(rank, world_size, replace(job, settings={**GATHERED_SMALL, **more})) for more in ({}, NEAR))
    assert near.equals(plain), f"{near.losses} for {plain.losses}"
