"""Whether a run with the engine has to have DDP's bits, and how far it may be off where it need not."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..config import ZeroConfig
from ..kernels.choose import uses_kernels
from .recording import Facts, Recording

ROUNDING = 1e-3
"""Sums in another order."""

HALF_DIGITS = 5e-2
"""Parameters or gradients in 16 bits."""

INEXACT = 0.25
"""Settings that trade exactness for memory or traffic."""


@dataclass(frozen=True, kw_only=True)
class Reason:
    """Why two runs need not have the same bits.

    Attributes:
        tolerance: relative difference that is still as expected for this reason.
    """

    text: str
    tolerance: float

    def __str__(self) -> str:
        return self.text


def reasons_of(stock: Recording, engine: Recording) -> list[Reason]:
    """Every reason for other bits than DDP's; none where the two runs must be bitwise equal."""
    facts = engine.facts
    if facts is None or facts.config is None:
        return []
    config = ZeroConfig.from_dict(facts.config)
    return [*_of_the_run(facts, config, stock), *_of_settings(facts, config)]


def _of_the_run(facts: Facts, config: ZeroConfig, stock: Recording) -> Iterator[Reason]:
    accumulation = max((len(step) for step in stock.losses[0]), default=1) if stock.losses else 1
    if facts.world_size > 2:
        yield Reason(
            text=f"{facts.world_size} ranks: gradients of more than two are added in another order", tolerance=ROUNDING
        )
    if facts.world_size > 1 and accumulation > 1 and not config.accumulates_locally:
        yield Reason(
            text=f"`grad_accumulation: sharded` reduces each of {accumulation} micro-batches; DDP adds them up first "
            "(`grad_accumulation: local` does so too)",
            tolerance=ROUNDING,
        )
    if any(norm is not None for norm in stock.norms):
        yield Reason(
            text="gradients were clipped, by a norm whose squares are added in another order", tolerance=ROUNDING
        )
    sixteen = [dtype for dtype in facts.dtypes if dtype in ("bfloat16", "float16")]
    if sixteen:
        yield Reason(
            text=f"{' and '.join(sixteen)} parameters are trained through a float32 master, and DDP steps them as they are",
            tolerance=HALF_DIGITS,
        )
    if facts.device != "cpu":
        yield Reason(
            text=f"operations on {facts.device} may add in another order each time (torch.use_deterministic_algorithms)",
            tolerance=ROUNDING,
        )


def _of_settings(facts: Facts, config: ZeroConfig) -> Iterator[Reason]:
    comm, offload = config.comm, config.offload
    for name, value in (("param_dtype", config.param_dtype), ("reduce_dtype", config.reduce_dtype)):
        if value not in ("auto", "float32"):
            yield Reason(text=f"`{name}: {value}`", tolerance=HALF_DIGITS)
    if config.gather_dtype == "bfloat16":
        yield Reason(text="`gather_dtype: bfloat16` computes with rounded parameters", tolerance=HALF_DIGITS)
    if uses_kernels(config.kernels, torch.device(facts.device)):
        yield Reason(text=f"`kernels: {config.kernels}` add in another order than torch", tolerance=ROUNDING)
    if offload.moves_state and facts.device != "cpu":
        yield Reason(
            text=f"`offload.optimizer: {offload.optimizer}` steps on the host, whose arithmetic rounds otherwise",
            tolerance=ROUNDING,
        )
    inexact: dict[str, tuple[str | int, str | int]] = {
        "moments": (config.moments, "32bit"),
        "rounding": (config.rounding, "nearest"),
        "comm.weights": (comm.weights, "none"),
        "comm.gradients": (comm.gradients, "none"),
        "comm.sync_every": (comm.sync_every, 1),
    }
    for name, (chosen, exact) in inexact.items():
        if chosen != exact:
            yield Reason(text=f"`{name}: {chosen}` is not exact", tolerance=INEXACT)
