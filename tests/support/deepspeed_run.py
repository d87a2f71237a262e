"""Writes the folders in tests/support/deepspeed_files with DeepSpeed itself. No other code of this repository needs DeepSpeed.

    python tests/support/deepspeed_run.py

Each folder contains a checkpoint after three steps of a small run on gloo, and `expected.safetensors`: the masters and the
optimizer state as read by DeepSpeed's own ds_to_universal, under `kind/name`. The files in the repository were written by
DeepSpeed 0.19.8 and torch 2.13.
"""

import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

FOLDER = Path(__file__).resolve().parent / "deepspeed_files"
RUNS = {
    # folder: (stage, ranks, bf16, settings of zero_optimization)
    "stage1-3ranks": (1, 3, False, {"round_robin_gradients": True}),
    "stage2-2ranks-bf16": (2, 2, True, {}),
    "stage2-3ranks-aligned": (2, 3, False, {"parameter_alignment": True}),
    "stage3-3ranks-bf16": (3, 3, True, {"sub_group_size": 40, "stage3_param_persistence_threshold": 0}),
    "stage2-2ranks-untied": (2, 2, False, {}),
    "stage3-2ranks": (3, 2, False, {"stage3_param_persistence_threshold": 0}),
}
UNTIED = "stage2-2ranks-untied"
"""The losses of its ranks are stored as well. With tied weights, DeepSpeed 0.19.8 makes steps different from torch's."""
KINDS = {"fp32": "master", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}


class Tiny(nn.Module):
    """Odd sizes, a tied weight, a frozen layer and a buffer."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.inner = nn.Linear(5, 5)
        self.norm = nn.LayerNorm(5)
        self.register_buffer("scale", torch.full((5,), 0.5))
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.head = nn.Linear(5, 7, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        normed = self.norm(self.inner(self.embed(ids)))
        return self.head(self.frozen(normed * self.scale.to(normed.dtype)))


def ids_of(step: int, rank: int) -> torch.Tensor:
    return torch.randint(0, 7, (4,), generator=torch.Generator().manual_seed(10 * step + rank))


def run(rank: int, world_size: int, port: int, name: str) -> None:
    os.environ.update(DS_ACCELERATOR="cpu", RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ.update(
        LOCAL_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo"
    )
    import deepspeed

    stage, _, bf16, settings = RUNS[name]
    torch.manual_seed(0)
    model = Tiny(tied=name != UNTIED)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    groups = [
        {"params": [p for p in trained.values() if p.dim() > 1], "weight_decay": 0.01},
        {"params": [p for p in trained.values() if p.dim() == 1], "weight_decay": 0.0},
    ]
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(groups, lr=1e-2, betas=(0.8, 0.99)),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "zero_allow_untested_optimizer": True,
            "bf16": {"enabled": bf16},
            "zero_optimization": {"stage": stage, **settings},
        },
    )
    losses = []
    for step in range(6):
        if step == 3:
            engine.save_checkpoint(str(FOLDER / name))
        ids = ids_of(step, rank)
        loss = nn.functional.cross_entropy(engine(ids).float(), ids)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    if name == UNTIED:
        (FOLDER / name / f"losses-{rank}.json").write_text(json.dumps(losses))
    torch.distributed.barrier()


def write_expected(folder: Path) -> None:
    """Writes the result of DeepSpeed's ds_to_universal for a checkpoint to one file."""
    [step_folder] = folder.glob("global_step*")
    with tempfile.TemporaryDirectory() as universal:
        arguments = ["--input_folder", step_folder, "--output_folder", universal, "--inject_missing_state"]
        arguments += ["--num_extract_workers", "1", "--num_merge_workers", "1"]
        subprocess.run([sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", *map(str, arguments)], check=True)
        expected = {}
        for path in sorted(Path(universal, "zero").glob("*/*.pt")):
            if path.stem in KINDS:
                saved = torch.load(path, weights_only=True)
                value = saved["param"] if isinstance(saved, dict) else saved
                expected[f"{KINDS[path.stem]}/{path.parent.name}"] = value.detach().clone().contiguous()
    save_file(expected, folder / "expected.safetensors")


def main() -> None:
    context = multiprocessing.get_context("spawn")
    for number, (name, (_, world_size, *_)) in enumerate(RUNS.items()):
        shutil.rmtree(FOLDER / name, ignore_errors=True)
        (FOLDER / name).mkdir(parents=True)
        ranks = [
            context.Process(target=run, args=(rank, world_size, 29700 + number, name)) for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            raise SystemExit(f"{name}: a rank failed")
        write_expected(FOLDER / name)
        for script in (FOLDER / name).glob("*.py"):
            script.unlink()


if __name__ == "__main__":
    main()
