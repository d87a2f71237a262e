"""An accelerate loop that knows nothing of hf_zero: `plain_loop.py LOSSES [accelerators]`."""

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from sizes import data, tiny_bert
from torch.utils.data import DataLoader


def train(accelerator: Accelerator) -> list[float]:
    set_seed(3)
    model = tiny_bert()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(data(40), batch_size=4, shuffle=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    losses = []
    model.train()
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 100.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).tolist())
    return losses


if __name__ == "__main__":
    [path, *built] = sys.argv[1:]
    accelerators = [Accelerator() for _ in built or ["one"]]
    losses = [train(accelerator) for accelerator in accelerators]
    if accelerators[0].is_main_process:
        Path(path).write_text(json.dumps(losses))
