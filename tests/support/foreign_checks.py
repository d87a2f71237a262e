"""Shared code for tests of foreign checkpoints."""

import os
from pathlib import Path

import pytest
import torch
from ranks import run_ranks

from hf_zero.checkpoint.faults import CheckpointError
from hf_zero.checkpoint.origin import is_foreign
from hf_zero.checkpoint.verify import checkpoint_faults
from hf_zero.foreign.convert import open_foreign

KINDS = ("exp_avg", "exp_avg_sq")


def on_ranks(target, world_size: int = 2, **arguments) -> list:
    return run_ranks(target, world_size=world_size, time_limit_s=170, keyword_arguments=arguments)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(
        one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)
    )


def refusal(folder: Path) -> str:
    """Returns the error when a folder is opened; a search for good checkpoints must report the same."""
    assert is_foreign(folder)
    with pytest.raises(CheckpointError) as refused:
        open_foreign(folder)
    message = str(refused.value)
    assert message.startswith("hf_zero: ")
    assert message.removeprefix("hf_zero: ").rstrip(".") in checkpoint_faults(folder, "zero")
    return message


class Harm:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path):
        self.folder = str(folder)

    def __reduce__(self):
        return os.mkdir, (self.folder,)
