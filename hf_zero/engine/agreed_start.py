"""The agreements at the start: all ranks train the same model with the same settings, and all use kernels or none does."""

import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from ..arithmetic.flat import give_up_triton, runs_triton
from ..buckets.packed import shapes_of_scales
from ..buckets.unread_weights import wanted_dtype
from ..comm.all_or_none import Exchange, first_difference
from ..comm.groups import Groups, with_time_limits
from ..comm.transport import Transport
from ..config import AUTO, ConfigError, ZeroConfig
from ..config.zero import by_name
from ..device import with_index
from ..extras import extra
from ..optimizer.shared_settings import SharedSettings
from .buffers import ignored_parameters
from .models import models_in
from .split_model import Mesh, SplitModel

_START = "start of an engine"

FILES_ATTRIBUTE = "_hf_zero_files"
"""Attribute of a model whose weights are still in files: a description of the files."""


def agree_to_start(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    config: ZeroConfig,
    device: torch.device | None,
    split: SplitModel,
) -> tuple[ZeroConfig, torch.device, Mesh]:
    """Connects the ranks, before anything of the model moves. Collective.

    Args:
        device: the training device; None for the device of the model.

    Returns:
        The config with the time limits and kernels of this run, the training device with its index, and the ranks' mesh.

    Raises:
        ValueError: the ranks' models, optimizers or configs differ. Without this check, the ranks would hang in their first
            collective.
        ConfigError: some rank cannot launch kernels, and the config has `kernels: always`.
    """
    facts = describe(model, optimizers, config)
    device = with_index(device or next(model.parameters()).device)
    config = replace(config, comm=with_time_limits(config.comm, device.type))
    mesh = Mesh.create(split, config, device)
    # All ranks compare only settings, because parts of a split model have different shapes.
    if not split.is_empty:
        refuse_disagreement(_settings(config), partial(mesh.world.exchange, purpose=_START))
    refuse_disagreement(facts, partial(mesh.dp.all_transport.exchange, purpose=_START))
    return with_kernels_that_run(config, mesh.dp.all_groups, mesh.dp.all_transport, device), device, mesh


def describe(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    config: ZeroConfig,
) -> dict[str, str]:
    """Returns everything on which the ranks must agree, as a dict from subject to a readable value."""
    facts = _settings(config)
    files = [each.__dict__.get(FILES_ATTRIBUTE, "none") for each in models_in(model)]
    facts["files of the weights"] = ", ".join(files)
    named_parameters = list(model.named_parameters())
    ignored = ignored_parameters(model)
    # Parameters left to each rank may differ even in shape and dtype.
    facts["parameters that DDP would ignore"] = repr([name for name, p in named_parameters if p in ignored])
    for name, p in ((name, p) for name, p in named_parameters if p not in ignored):
        held = "trained" if p.requires_grad else "frozen"
        facts[f"parameter {name}"] = f"shape {tuple(p.shape)}, {wanted_dtype(p)}, {held}"
    # A hash instead of all names, because an error shows the value, and a model has thousands of names.
    facts["order of parameters"] = hashlib.sha256(json.dumps([n for n, _ in named_parameters]).encode()).hexdigest()[
        :16
    ]
    facts["scales of packed weights"] = hashlib.sha256(repr(shapes_of_scales(model)).encode()).hexdigest()[:16]
    for index, optimizer in enumerate(optimizers):
        sizes = [sum(p.numel() for p in group["params"] if p not in ignored) for group in optimizer.param_groups]
        facts[f"optimizer {index}"] = f"{type(optimizer).__name__} over groups of {sizes} elements"
    settings = SharedSettings(optimizers)
    settings.digest()
    return facts | settings.facts() | dict(_module_settings(model))


def _settings(config: ZeroConfig) -> dict[str, str]:
    """Returns the config setting by setting, because errors show a single fact."""
    return {f"the setting `{name}`": str(value) for name, value in by_name(config).items()}


def _module_settings(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yields settings of modules: all float attributes of torch's modules (eps, p), and dropout probabilities of other modules.

    Other float attributes of other modules may differ between ranks, for example a time.
    """
    for name, module in model.named_modules():
        is_of_torch = type(module).__module__.startswith("torch.nn.")
        for attribute, value in vars(module).items():
            if isinstance(value, float) and (is_of_torch or "drop" in attribute):
                yield f"{attribute} of {name or 'the model'} ({type(module).__name__})", repr(value)


def refuse_disagreement(facts: dict[str, str], exchange: Exchange) -> None:
    """Raises `ValueError` on every rank if the facts differ, with the first difference from rank 0. Collective."""
    difference = first_difference(exchange, facts)
    if difference is not None:
        raise ValueError(
            f"hf_zero: the ranks do not train the same model with the same settings. {difference}. Build model, optimizer and "
            "config the same way on every rank (seed, config, data and settings)."
        )


def with_kernels_that_run(config: ZeroConfig, groups: Groups, transport: Transport, device: torch.device) -> ZeroConfig:
    """Returns the config with `kernels: never` if any rank cannot launch kernels. Collective.

    Kernels add in a different order than torch, so all ranks must use them, or none.

    Raises:
        ConfigError: some rank cannot launch kernels, and the config has `kernels: always`.
    """
    faults = transport.exchange(extra("kernels", "launch_fault")(device) if runs_triton(device) else None)
    found = [(rank, fault) for rank, fault in enumerate(faults) if fault is not None]
    if not found:
        return config
    rank, fault = found[0]
    what = f"triton cannot launch a kernel on rank {rank} ({fault})"
    remedy = "Triton compiles at the first launch and needs a C compiler, Python's headers (python3-dev) and a writable cache"
    if config.kernels == "always":
        raise ConfigError(f"hf_zero: `kernels: always`, but {what}. {remedy}; or use `kernels: auto`.")
    give_up_triton(device)
    if groups.is_first_of_run:
        print(f"hf_zero: {what}; torch's operations replace the kernels. {remedy}.", file=sys.stderr, flush=True)
    return replace(config, kernels="never") if config.kernels == AUTO else config
