"""The interface of a code for elements divided by the scale of their block."""

from abc import ABC, abstractmethod

import torch

from ..arithmetic.flat import runs_triton
from ..kernels.base import Kernel


class Code(ABC):
    """A code for elements divided by the scale of their block.

    Attributes:
        name: name in the config.
        bits: bits of an element.
        largest: largest magnitude that the code can represent.
        quantise_kernel, sum_kernel: the Triton versions of `quantise` and `dequantise_sum`.
    """

    name: str
    bits: int
    largest: int
    quantise_kernel: Kernel
    sum_kernel: Kernel

    @abstractmethod
    def write(self, values: torch.Tensor, code_rows: torch.Tensor) -> None:
        """Rounds `values` in place to the nearest value of the code, ties to even, and writes the codes.

        Args:
            values: (blocks, B) float32, from -largest to largest.
            code_rows: (blocks, B * bits / 8) uint8.
        """

    @abstractmethod
    def read(self, code_rows: torch.Tensor, values: torch.Tensor) -> None:
        """Decodes `code_rows`, which `write` has written, into `values`."""

    def runs_triton(self, device: torch.device) -> bool:
        """Whether the Triton versions run on tensors of `device`."""
        return runs_triton(device)

    def __repr__(self) -> str:
        return self.name
