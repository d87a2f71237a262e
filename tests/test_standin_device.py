"""What runs on an accelerator only, run on a stand-in for one: see standin_device.cpp for how it misbehaves."""

import os
import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest
import standin_device
import torch
import torch.distributed as dist
from ranks import run_ranks
from training import fused_adamw, gpt2, gpt2_batch

from hf_zero.engine.engine import ZeroEngine

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        shutil.which(os.environ.get("CXX", "c++")) is None or shutil.which("ninja") is None,
        reason="the stand-in device needs a C++ compiler and ninja",
    ),
]

MAX_NORM = 100.0
FILES, HOST = {"optimizer": "nvme"}, {"optimizer": "cpu"}
IN_BLOCKS = {"weights": "int8", "gradients": "int8"}

# Settings that change no digit, by name: each trains as a plain loop does.
EXACT = {
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3},
    "state in host memory": {"stage": 2, "offload": HOST},
    "half of it": {"stage": 2, "offload": HOST | {"ratio": 0.5}},
    "early steps": {"stage": 3, "offload": HOST | {"speculate_bytes": "1MiB"}},
    "state in files": {"stage": 2, "offload": FILES | {"speculate_bytes": 0}},
    "early steps in files": {"stage": 3, "offload": FILES | {"speculate_bytes": "1MiB"}},
    **{
        f"parameters in {params}, state in {state}": {"stage": 3, "offload": {"params": params, "optimizer": state}}
        for params in ("cpu", "nvme")
        for state in ("none", "cpu", "nvme")
    },
    "activations in host memory": {"stage": 3, "offload": {"activations": "cpu"}},
}

# Settings that do, and others that change none from there.
INEXACT = {
    "bf16": ({"stage": 1, "param_dtype": "bfloat16"}, {"stage": 3, "offload": HOST}),
    "blocks on the wire": ({"stage": 1, "comm": IN_BLOCKS}, {"stage": 2, "offload": HOST}),
    "8-bit moments": ({"stage": 2, "moments": "8bit"}, {"offload": HOST}),
    "a step late": ({"stage": 2, "offload": HOST | {"delay": 1, "delay_warmup": 1}}, {"stage": 3}),
}


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Path:
    return standin_device.build(tmp_path_factory.mktemp("standin"))


def train(rank: int, world_size: int, settings: dict | None) -> list[torch.Tensor]:
    """Losses of three steps on the device and the weights behind them, in host memory. Without settings, a plain loop's."""
    torch.manual_seed(0)
    model = gpt2().to(standin_device.NAME)
    optimizer = fused_adamw(model)
    engine = None if settings is None else ZeroEngine(model, [optimizer], settings)
    generator = torch.Generator().manual_seed(100 + rank)
    losses = []
    for _ in range(3):
        batch = {name: values.to(standin_device.NAME) for name, values in gpt2_batch(generator, 2).items()}
        loss = model(**batch).loss
        loss.backward()
        losses.append(loss.detach().cpu())
        if engine is None:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad.div_(world_size)
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        else:
            engine.clip_grad_norm_(MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    with nullcontext() if engine is None else engine.gathered():
        return losses + [parameter.detach().cpu() for parameter in model.parameters()]


def on_the_device(rank: int, world_size: int, library: Path, folder: str) -> None:
    compiled = standin_device.register(library)

    def run(settings: dict | None) -> list[torch.Tensor]:
        return train(rank, world_size, settings and _placed(settings, folder))

    with standin_device.process_group(rank, world_size, folder):
        plain = run(None)
        for name, settings in EXACT.items():
            assert all(map(torch.equal, run(settings), plain)), name
        for name, (settings, elsewhere) in INEXACT.items():
            found = run(settings)
            assert all(map(torch.equal, run(settings | elsewhere), found)), name
            assert torch.stack(found[:3]).tolist() == pytest.approx(torch.stack(plain[:3]).tolist(), rel=0.02), name
    assert compiled.deferred() > 0
    assert compiled.hazards() == 0


def _placed(settings: dict, folder: str) -> dict:
    offload = settings.get("offload", {})
    files = {"nvme_path": folder} if "nvme" in offload.values() else {}
    return {"bucket_bytes": "20KiB", **settings, "offload": offload | files}


@pytest.mark.parametrize("world_size", [1, 2])
def test_training_on_a_device_that_does_everything_late(world_size, library, tmp_path):
    arguments = {"library": library, "folder": str(tmp_path)}
    run_ranks(on_the_device, world_size=world_size, time_limit_s=300, keyword_arguments=arguments)


def misbehaves(rank: int, world_size: int, library: Path) -> None:
    compiled = standin_device.register(library)
    there, here = torch.ones(8, device=standin_device.NAME), torch.empty(8)
    assert torch.empty(1, device=standin_device.NAME).isnan().item()
    here.copy_(there, non_blocking=True)
    assert here.isnan().all(), "a copy that nobody waited for has been made"
    event = torch.Event(device=standin_device.NAME)
    event.record()
    event.synchronize()
    assert (here == 1).all()
    stream = torch.Stream(device=standin_device.NAME)
    torch.accelerator.set_stream(stream)
    here.copy_(there, non_blocking=True)
    assert compiled.hazards() == 0
    del there
    assert compiled.hazards() == 1, "memory of a copy under way was freed"
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(2, device=standin_device.NAME) + torch.ones(2)


def test_the_stand_in_shows_what_would_go_wrong_on_a_gpu(library):
    run_ranks(misbehaves, world_size=1, time_limit_s=120, keyword_arguments={"library": library})
