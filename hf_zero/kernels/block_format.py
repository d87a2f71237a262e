"""What a quantised tensor looks like: blocks of elements that share a scale, and a code that says how an element is written."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from .choose import runs_triton
from .lazy import Kernel, ceil_div


class Code(ABC):
    """How an element that has been divided by its block's scale is written.

    Attributes:
        name: as the config has it.
        bits: of an element.
        largest: the largest magnitude that can be written.
        quantise_kernel, sum_kernel: the Triton forms of `quantise` and `dequantise_sum`.
    """

    name: str
    bits: int
    largest: int
    quantise_kernel: Kernel
    sum_kernel: Kernel

    @abstractmethod
    def write(self, values: torch.Tensor, code_rows: torch.Tensor) -> None:
        """Rounds to what can be written, to the nearest, ties to even, in place too, and writes it.

        Args:
            values: (blocks, B) float32, from -largest to largest.
            code_rows: (blocks, B * bits / 8) uint8.
        """

    @abstractmethod
    def read(self, code_rows: torch.Tensor, values: torch.Tensor) -> None:
        """What `write` has written, into `values`."""

    def runs_triton(self, device: torch.device) -> bool:
        """Whether the Triton forms run on tensors of `device`."""
        return runs_triton(device)

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True, kw_only=True)
class BlockFormat:
    """How an element is written, and how many elements share a scale, a power of two from 32 to 4096."""

    code: Code
    block_numel: int = 256

    def __post_init__(self) -> None:
        if not 32 <= self.block_numel <= 4096 or self.block_numel & (self.block_numel - 1):
            raise ValueError(
                f"hf_zero: blocks of {self.block_numel} elements; a power of two from 32 to 4096 is allowed. Choose one of them."
            )

    def blocks(self, numel: int) -> int:
        """Blocks, and so scales, of a tensor of `numel` elements."""
        return ceil_div(numel, self.block_numel)

    def code_bytes(self, numel: int) -> int:
        """Bytes of the codes of a tensor of `numel` elements."""
        return self.blocks(numel) * self.block_numel * self.code.bits // 8
