"""The interface of a code for elements that have been divided by the scale of their block."""

from abc import ABC, abstractmethod

import torch

from ..arithmetic.flat import runs_triton
from ..kernels.base import Kernel


class Code(ABC):
    """A code for elements that have been divided by their block's scale.

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
        """Rounds to the nearest value of the code, ties to even, in place too, and writes the code.

        Args:
            values: (blocks, B) float32, from -largest to largest.
            code_rows: (blocks, B * bits / 8) uint8.
        """

    @abstractmethod
    def read(self, code_rows: torch.Tensor, values: torch.Tensor) -> None:
        """Reads the values of a code that `write` has written, into `values`."""

    def runs_triton(self, device: torch.device) -> bool:
        """Whether the Triton forms run on tensors of `device`."""
        return runs_triton(device)

    def __repr__(self) -> str:
        return self.name
