"""Models that are split over ranks, through accelerate and Trainer."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from cells import slow
from ranks import run_ranks
from split_runs import LENGTH, VOCABULARY, SplitJob, load, save_models, whole_of
from trainer_job import as_launched, history
from transformers import LlamaForCausalLM, MixtralForCausalLM, Trainer

from hf_zero import ConfigError, ZeroPlugin, ZeroTrainingArguments, engine_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    save_models(folder)
    return str(folder)


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
def test_accelerate_trains_saves_and_resumes(folder, tmp_path, kind, sizes, copies):
    def run(world_size: int, sizes: tuple, saved: str | None = None, resumed: str | None = None) -> dict:
        return run_ranks(
            accelerated,
            world_size=world_size,
            time_limit_s=120,
            keyword_arguments={
                "folder": folder,
                "kind": kind,
                "sizes": sizes,
                "saved": None if saved is None else tmp_path / saved,
                "resumed": None if resumed is None else tmp_path / resumed,
            },
        )[0]

    split, plain = run(4, sizes, saved="split"), run(copies, (1, 1), saved="plain")
    assert split["losses"] == pytest.approx(plain["losses"], rel=1e-5)
    onward = run(copies, (1, 1), resumed="split"), run(4, sizes, resumed="plain")
    assert onward[0]["losses"] == pytest.approx(onward[1]["losses"], rel=1e-3)


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


@pytest.mark.parametrize(
    ("kind", "sizes", "copies", "is_resumed"),
    [
        ("llama", (2, 1), 2, False),
        slow("llama", (2, 1), 2, True),
        slow("mixtral", (1, 2), 4, True),
        slow("mixtral", (2, 4), 2, True),
    ],
)
def test_trainer_trains_saves_and_resumes(folder, tmp_path, kind, sizes, copies, is_resumed):
    def run(world_size: int, sizes: tuple, name: str, resume: str | None = None) -> dict:
        output = str(tmp_path / name)
        arguments = {"folder": folder, "kind": kind, "sizes": sizes, "output": output, "resume": resume}
        return run_ranks(trained, world_size=world_size, time_limit_s=200, keyword_arguments=arguments)[0]

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
    assert "tp_size is 3, which does not divide the 2 ranks" in run_ranks(refused, world_size=2, time_limit_s=60)[0]
