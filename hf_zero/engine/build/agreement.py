"""What ranks agree on at the start: that all train the same model with the same settings, and whether by kernels."""

import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

from ...buckets.mapped_parameters import wanted_dtype
from ...comm.groups.groups import Groups
from ...comm.transport import Transport
from ...config import AUTO, ConfigError, ZeroConfig
from ...kernels.choose import give_up_triton
from ...kernels.trial import launch_fault
from ..travel.buffers import ignored_parameters

FILES_ATTRIBUTE = "_hf_zero_files"
"""Of a model whose weights still lie in files: what these are, in words."""


def describe(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    config: ZeroConfig,
) -> dict[str, str]:
    """Everything on which the ranks must agree: subject → value, in words."""
    facts = {"config": json.dumps(config.to_dict(), sort_keys=True)}
    facts["files of the weights"] = model.__dict__.get(FILES_ATTRIBUTE, "none")
    named_parameters = list(model.named_parameters())
    ignored = ignored_parameters(model)
    # Left to each rank, they may differ in shape and dtype, too.
    facts["parameters that DDP would ignore"] = repr([name for name, p in named_parameters if p in ignored])
    for name, p in ((name, p) for name, p in named_parameters if p not in ignored):
        held = "trained" if p.requires_grad else "frozen"
        facts[f"parameter {name}"] = f"shape {tuple(p.shape)}, {wanted_dtype(p)}, {held}"
    facts["order of parameters"] = hashlib.sha256(json.dumps([n for n, _ in named_parameters]).encode()).hexdigest()[
        :16
    ]
    for index, optimizer in enumerate(optimizers):
        sizes = [sum(p.numel() for p in group["params"] if p not in ignored) for group in optimizer.param_groups]
        facts[f"optimizer {index}"] = f"{type(optimizer).__name__} over groups of {sizes} elements"
    return facts


def refuse_disagreement(facts: dict[str, str], transport: Transport) -> None:
    """Collective. Raises `ValueError` on every rank, naming the first difference to rank 0."""
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    digests = transport.exchange(digest)
    if len(set(digests)) == 1:
        return
    everyone = transport.exchange((dist.get_rank() if dist.is_initialized() else 0, facts))
    first, reference = everyone[0]
    for rank, theirs in everyone:
        for subject in [*reference, *(s for s in theirs if s not in reference)]:
            here, there = reference.get(subject, "absent"), theirs.get(subject, "absent")
            if here != there:
                raise ValueError(
                    f"hf_zero: the ranks do not train the same thing. {subject}: {here} on rank {first}, {there} on rank {rank}. "
                    "Build model, optimizer and config the same way on every rank (the same seed, config and data vocabulary)."
                )
    raise ValueError(
        "hf_zero: the ranks list the same facts in different orders; build the model the same way on each."
    )


def with_kernels_that_run(config: ZeroConfig, groups: Groups, transport: Transport, device: torch.device) -> ZeroConfig:
    """`kernels: never` where a rank cannot launch any. Collective.

    Kernels round sums in another order than torch, so all ranks follow.

    Raises:
        ConfigError: with `kernels: always`.
    """
    faults = transport.exchange(launch_fault(device))
    found = [(rank, fault) for rank, fault in enumerate(faults) if fault is not None]
    if not found:
        return config
    rank, fault = found[0]
    what = f"triton cannot launch a kernel on rank {rank} ({fault})"
    remedy = (
        "Triton compiles at the first launch, with a C compiler, Python's headers (python3-dev) and a cache to write to"
    )
    if config.kernels == "always":
        raise ConfigError(f"hf_zero: `kernels: always`, but {what}. {remedy}; or use `kernels: auto`.")
    give_up_triton(device)
    if groups.is_first_of_run:
        print(f"hf_zero: {what}; torch's operations do what kernels would. {remedy}.", file=sys.stderr, flush=True)
    return replace(config, kernels="never") if config.kernels == AUTO else config
