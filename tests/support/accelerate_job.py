"""A plain accelerate loop with DDP or the engine, for tests that start ranks themselves, and as a script."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, Dataset
from training import VOCABULARY, Answer, adamw_in_two_groups, bert, bert_batch, gpt2, gpt2_batch

from hf_zero import ZeroPlugin, engine_of


class Texts(Dataset):
    """Random tokens, the same on every rank."""

    def __init__(self, size: int, make_batch: Callable = gpt2_batch):
        generator = torch.Generator().manual_seed(7)
        self._rows = [{key: value[0] for key, value in make_batch(generator, 1).items()} for _ in range(size)]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self._rows[index]


class TextsModel(nn.Module):
    """A minimal model of texts: blocks of parameters, biases and a loss."""

    def __init__(self, layers: int):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 24)
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(layers))
        self.head = nn.Linear(24, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Answer:
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return Answer(nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten()))


MODELS = {"gpt2": gpt2, "texts": TextsModel, "bert": lambda layers: bert()}


def make_accelerator(door: str, **arguments) -> Accelerator:
    """Makes an Accelerator: "ddp", or a way in and a stage: "plugin 2" (or settings), "attach 1", "variable 2", "yaml 3"."""
    kind, _, stage = door.partition(" ")
    if kind == "ddp":
        return Accelerator(**arguments)
    if kind == "plugin":
        return Accelerator(parallelism_config=ZeroPlugin(stage), **arguments)
    if kind == "attach":
        plugin = ZeroPlugin(int(stage))
        return plugin.attach(Accelerator(**arguments))
    path = Path(__file__).resolve().parents[2] / "configs" / f"zero{stage}.yaml"
    if kind == "yaml":
        return Accelerator(parallelism_config=ZeroPlugin(str(path)), **arguments)
    os.environ["HF_ZERO_CONFIG"] = str(path)
    return Accelerator(parallelism_config=ZeroPlugin(), **arguments)


def run(
    rank: int,
    world_size: int,
    door: str,
    order: str = "together",
    accumulation: int = 1,
    max_norm: float = 100.0,
    steps: int = 8,
    plain_backward: bool = False,
    save_to: str | None = None,
    load_from: str | None = None,
    compile_model: bool = False,
    layers: int = 3,
    model: str = "gpt2",
    cpu: bool = True,
    **passed: object,
) -> dict:
    """Trains for `steps` optimizer steps; returns losses, norms, and the accelerator's state dict.

    Other arguments are passed to the Accelerator.
    """
    arguments = passed | ({"dynamo_backend": "eager"} if compile_model else {})
    accelerator = make_accelerator(door, gradient_accumulation_steps=accumulation, cpu=cpu, **arguments)
    torch.manual_seed(0)
    make_batch = bert_batch if model == "bert" else gpt2_batch
    model = MODELS[model](layers=layers)
    optimizer = adamw_in_two_groups(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    rows = Texts(4 * world_size * accumulation * steps, make_batch)
    loader = DataLoader(rows, batch_size=4)
    if order == "together":
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    elif order == "optimizer first":
        optimizer, scheduler, loader, model = accelerator.prepare(optimizer, scheduler, loader, model)
    elif order == "one by one":
        loader = accelerator.prepare(loader)
        model = accelerator.prepare(model)
        optimizer = accelerator.prepare(optimizer)
        scheduler = accelerator.prepare(scheduler)
    elif order == "by their methods":
        optimizer, model = accelerator.prepare_optimizer(optimizer), accelerator.prepare_model(model)
        scheduler, loader = accelerator.prepare_scheduler(scheduler), accelerator.prepare_data_loader(loader)
    else:
        optimizer = accelerator.prepare(optimizer)
        model, loader, scheduler = accelerator.prepare(model, loader, scheduler)
    if load_from is not None:
        accelerator.load_state(load_from)
        loader = accelerator.skip_first_batches(loader, accumulation * steps // 2)
    losses, norms, done = [], [], 0
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            if plain_backward:
                (loss / accumulation).backward()
            else:
                accelerator.backward(loss)
            losses.append(loss.item())
            if accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), max_norm).item())
                done += 1
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if save_to is not None and accelerator.sync_gradients and done == steps // 2:
            accelerator.save_state(save_to)
            save_to = None
    unwrapped = accelerator.unwrap_model(model)
    state = accelerator.get_state_dict(model)
    outcome = {
        "door": door,
        "losses": losses,
        "norms": norms,
        "state": {name: value.float().tolist() for name, value in state.items()},
        "class": type(accelerator).__mro__[1].__name__,
        "model": type(unwrapped).__name__,
        "sent": 0 if door == "ddp" else engine_of(model).comm_report().bytes_sent,
    }
    accelerator.free_memory()
    return outcome


if __name__ == "__main__":
    door, folder = sys.argv[1:3]
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    outcome = run(rank, world, door, **json.loads((sys.argv[3:] or ["{}"])[0]))
    Path(folder, f"outcome-{rank}.json").write_text(json.dumps(outcome))
