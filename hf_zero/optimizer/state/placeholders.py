"""What an optimizer's register has of state that is elsewhere."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...buckets.bucket import Row

_HOST = torch.device("cpu")

States = Mapping[Row, dict[str, Any]]
"""The state of some of a bucket's rows by name: the optimizer's register of them, or a copy of it."""


class Placeholders:
    """Tensors of any shape without memory: they read as NaN, or 0 where the dtype has none, until the state is back."""

    def __init__(self):
        self._absent: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}

    def of(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device = _HOST) -> torch.Tensor:
        """One for a tensor like that."""
        key = (dtype, device)
        if key not in self._absent:
            self._absent[key] = torch.full(
                (), float("nan") if dtype.is_floating_point else 0, dtype=dtype, device=device
            )
        return self._absent[key].expand(shape)

    def has(self, value: Any) -> bool:
        """Whether this is one of them."""
        absent = self._absent.get((value.dtype, value.device)) if torch.is_tensor(value) else None
        return absent is not None and value.data_ptr() == absent.data_ptr()
