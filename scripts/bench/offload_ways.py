"""The ways of training that scripts/bench/offload.py compares, each behind one call a step.

    trainer = WAYS["cpu"].start(model, workload, nvme_path)
    loss = trainer.backward(input_ids)
    trainer.step()
    trainer.close()

hf_zero's own, plain torch, and where they are installed torchao's CPUOffloadOptimizer and DeepSpeed's ZeRO-Offload.
"""

from __future__ import annotations

import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from workload import DEFAULT_LEARNING_RATE, Workload, adamw_arguments

from hf_zero.engine.engine import ZeroEngine

TORCHAO_HOMES = ("torchao.optim", "torchao.prototype.low_bit_optim")
"""Where CPUOffloadOptimizer is, in newer and in older versions."""


class Trainer(ABC):
    """One model with its optimizer."""

    model: torch.nn.Module

    def backward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """A forward and a backward; returns the loss, which is not waited for."""
        loss = self.model(input_ids=input_ids, labels=input_ids).loss
        loss.backward()
        return loss.detach()

    @abstractmethod
    def step(self) -> None:
        """The optimizer's step, and no gradients afterwards."""

    def traffic(self) -> dict[str, Any]:
        """Bytes in files, where there are any."""
        return {"written_bytes_a_step": 0, "window_bytes": 0, "direct": None}

    def close(self) -> None:  # noqa: B027 (most have nothing to give back)
        """Ends what runs on."""


class Plain(Trainer):
    """A model and something with an optimizer's two methods."""

    def __init__(self, model: torch.nn.Module, optimizer: Any):
        self.model = model
        self._optimizer = optimizer

    def step(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()


class Ours(Plain):
    """The same on a ZeroEngine."""

    def __init__(self, model: torch.nn.Module, settings: dict[str, Any]):
        super().__init__(model, torch.optim.AdamW(model.parameters(), **adamw_arguments(fused=True)))
        self._engine = ZeroEngine(model, [self._optimizer], settings)

    def traffic(self) -> dict[str, Any]:
        traffic = self._engine.memory_report().traffic
        if traffic is None:
            return super().traffic()
        direct = all(shard.file.is_direct for shard in self._engine.tier.files.shards)
        return {
            "written_bytes_a_step": traffic.written_bytes_a_step,
            "window_bytes": traffic.window_bytes,
            "direct": direct,
        }

    def close(self) -> None:
        self._engine.close()


class DeepSpeed(Trainer):
    """ZeRO-2 with the optimizer in host memory, as DeepSpeed's tutorial on ZeRO-Offload sets it up."""

    def __init__(self, model: torch.nn.Module, workload: Workload):
        _be_alone()
        kind = "bf16" if next(model.parameters()).dtype == torch.bfloat16 else None
        config = {
            "train_micro_batch_size_per_gpu": workload.batch_size,
            "gradient_accumulation_steps": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": DEFAULT_LEARNING_RATE, "weight_decay": 0.01}},
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {"device": "cpu", "pin_memory": True},
                "overlap_comm": True,
                "contiguous_gradients": True,
            },
            **({kind: {"enabled": True}} if kind else {}),
        }
        deepspeed = import_module("deepspeed")
        self.model, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

    def backward(self, input_ids: torch.Tensor) -> torch.Tensor:
        loss = self.model(input_ids=input_ids, labels=input_ids).loss
        self.model.backward(loss)
        return loss.detach()

    def step(self) -> None:
        self.model.step()


@dataclass(frozen=True, kw_only=True)
class Way:
    """How one trains.

    Attributes:
        start: (model, workload, folder for files) → a trainer.
        is_exact: its losses are those of `none`, bit for bit.
        masters: what keeps a bfloat16 parameter's full digits.
        package: that it needs; None for what is always there.
        needs_gpu: it refuses to run on the CPU.
    """

    start: Callable[[torch.nn.Module, Workload, str], Trainer]
    is_exact: bool = False
    masters: str = "fp32"
    package: str | None = None
    needs_gpu: bool = False

    def hindrance(self, device: torch.device) -> str | None:
        """Why it cannot be measured here; None if it can."""
        if self.package is not None and find_spec(self.package) is None:
            return f"{self.package} is not installed"
        if self.needs_gpu and device.type == "cpu":
            return f"{self.package} does this on a GPU only"
        return None


def _ours(model: torch.nn.Module, _workload: Workload, nvme_path: str, *, stage: int = 2, **offload: Any) -> Trainer:
    if "nvme" in offload.values():
        offload["nvme_path"] = nvme_path
    return Ours(model, {"stage": stage, "offload": offload})


def _torch(model: torch.nn.Module, _workload: Workload, _nvme_path: str) -> Trainer:
    return Plain(model, torch.optim.AdamW(model.parameters(), **adamw_arguments(fused=True)))


def _torchao(model: torch.nn.Module, _workload: Workload, _nvme_path: str, *, offload_gradients: bool) -> Trainer:
    """torchao's optimizer in host memory: https://github.com/pytorch/ao/tree/main/torchao/optim."""
    kind = _first_of(TORCHAO_HOMES).CPUOffloadOptimizer
    arguments = adamw_arguments(fused=True)
    return Plain(model, kind(model.parameters(), torch.optim.AdamW, offload_gradients=offload_gradients, **arguments))


def _deepspeed(model: torch.nn.Module, workload: Workload, _nvme_path: str) -> Trainer:
    return DeepSpeed(model, workload)


def _first_of(modules: tuple[str, ...]) -> Any:
    *older, last = modules
    for name in older:
        try:
            return import_module(name)
        except ModuleNotFoundError:
            continue
    return import_module(last)


def _be_alone() -> None:
    """Tells DeepSpeed, which asks the launcher, that this is the only rank."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    os.environ |= {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


WAYS = {
    "none": Way(start=partial(_ours, optimizer="none"), is_exact=True),
    "cpu": Way(start=partial(_ours, optimizer="cpu"), is_exact=True),
    "nvme": Way(start=partial(_ours, optimizer="nvme"), is_exact=True),
    "torch": Way(start=_torch, masters="none"),
    "torchao": Way(start=partial(_torchao, offload_gradients=False), masters="none", package="torchao", needs_gpu=True),
    "torchao-gradients": Way(
        start=partial(_torchao, offload_gradients=True), masters="none", package="torchao", needs_gpu=True
    ),
    "deepspeed": Way(start=_deepspeed, package="deepspeed", needs_gpu=True),
}
"""All that can be named, in the order in which they are measured. The first three are hf_zero's, by `offload.optimizer`."""

OURS = ("none", "cpu", "nvme")
