"""Runs with a log, for the tests of reports."""

import json
from pathlib import Path
from typing import Any

import torch
from accelerate_job import Texts, TextsModel, make_accelerator
from torch.utils.data import DataLoader
from trainer_job import as_launched, make_trainer, run
from training import gpt2, gpt2_batch

from hf_zero import RunRecorder, ZeroEngine
from hf_zero.checkpoint.structure import LOG_NAME


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / LOG_NAME).read_text().splitlines()]


def of_kind(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [line for line in lines_of(folder) if line["kind"] == kind]


def trains(rank: int, world_size: int, folder: str, reported: bool = True, **overrides: Any) -> list[float]:
    """Runs Trainer at stage 2 with an evaluation and a save; returns the losses."""
    door = "flag stage=2,report=true" if reported else "flag 2"
    saving = {"max_steps": 8, "save_strategy": "steps", "save_steps": 4, "eval_strategy": "steps", "eval_steps": 4}
    return run(rank, world_size, door, "gpt2", folder, **saving | overrides)["losses"]


def fails_at(rank: int, world_size: int, folder: str, step: int) -> str:
    """Runs a Trainer whose script raises after a step; returns the error's text."""

    def lets_go(model: torch.nn.Module) -> torch.nn.Module:
        def count(*_args: object) -> None:
            lets_go.calls += 1
            if lets_go.calls == step:
                raise ValueError("the data is gone")

        lets_go.calls = 0
        model.register_forward_pre_hook(count)
        return model

    as_launched(rank, world_size)
    trainer = make_trainer("flag stage=2,report=true", "gpt2", folder, adapt=lets_go)
    try:
        trainer.train()
    except ValueError as error:
        return str(error)
    return "nothing"


def loops(rank: int, world_size: int, folder: str, tracked: bool = True, load: bool = False) -> dict[str, Any]:
    """Runs a loop of accelerate with six steps. With `load`, the loop resumes from an earlier state after the third step."""
    as_launched(rank, world_size)
    accelerator = make_accelerator("plugin stage=2,report=true", cpu=True, project_dir=folder)
    torch.manual_seed(0)
    model = TextsModel(2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(Texts(6 * 4 * world_size), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if load:
        accelerator.load_state(f"{folder}/state")
    for done, batch in enumerate(loader, 1):
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if tracked:
            accelerator.log({"train_loss": loss.item(), "epoch": 0, "name": "first"}, step=done)
        if done == 3 and not load:
            accelerator.save_state(f"{folder}/state")
    is_open = accelerator.zero_recorder is not None and accelerator.zero_recorder.is_open
    # Keep the group, because the test still needs it.
    accelerator.state.destroy_process_group = lambda *_: None
    accelerator.end_training()
    return {"is_open": is_open, "open_after": accelerator.zero_recorder is not None}


def plain_loop(rank: int, world_size: int, folder: str, steps: int = 6) -> list[str]:
    """Runs a loop with ZeroEngine; returns the folder's files as seen by the other ranks before their end."""
    torch.manual_seed(0)
    model = gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine = ZeroEngine(model, [optimizer], 2)
    with RunRecorder(engine, folder) as recorder:
        for step in range(steps):
            model(**gpt2_batch(torch.Generator().manual_seed(step), 2)).loss.backward()
            engine.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
    return [type(recorder).__name__, str(recorder.step)]
