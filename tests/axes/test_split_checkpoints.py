"""Checkpoints of models that are split over ranks: saved in one layout, resumed in another, bit for bit."""

from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from cells import slow
from ranks import run_ranks
from shared_ranks import four_ranks
from split_runs import SplitJob, batches, load, save_models, whole_of
from transformers import LlamaForCausalLM, MixtralForCausalLM

from hf_zero.engine.engine import ZeroEngine
from hf_zero.integrations.file_weights import load_weights_into
from hf_zero.integrations.state_io import ZERO_FOLDER, load_engine, seal_state, write_state
from hf_zero.integrations.weights import consolidate


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
    engine.world.meet("the model is saved", 60)
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
        ("mixtral", {"stage": 3}, "tp2 ep4", ["one", "ep2"]),
        slow("llama", {"stage": 2}, "tp2 x dp2", ["one", "dp4", "tp4"]),
        slow("mixtral", {"stage": 3}, "tp2 ep2", ["dp4", "tp4 ep4", "one", "ep2"]),
        slow("mixtral", {"stage": 0}, "ep2", ["ep4", "one", "tp2 ep4"]),
        slow("mixtral", {"stage": 2}, "tp2 ep4", ["ep2", "dp4", "tp2 x dp2"]),
        slow("mixtral", {"stage": 3}, "ep4", ["tp2 ep4", "one"]),
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
        return run_ranks(save, world_size=world_size, time_limit_s=120, keyword_arguments=arguments)

    first = tmp_path / start
    [saved, *_] = run(start, first, None)
    for layout in layouts:
        away = tmp_path / layout
        for kept in run(layout, away, first):
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
