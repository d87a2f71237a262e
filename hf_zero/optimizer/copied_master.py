"""Masters of fp32 parameters on a device, copied from the parameters for each step in host memory."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..buckets.bucket import Bucket, Row
from ..pinned_memory import passing_host_bytes
from .bucket_state import MasterAway, Placeholders, Regions


class CopiedMaster(MasterAway):
    """Copies a bucket's parameters to host memory for a step there, and back afterwards.

    A file with the master would hold the same values as the parameters, and each step would read and write 4 more bytes per
    parameter.
    """

    def __init__(self, bucket: Bucket, placeholders: Placeholders):
        super().__init__(bucket, placeholders.of((), bucket.precision.master))

    def _fetched(self, regions: Regions) -> torch.Tensor:
        own = self._bucket.own
        # Memory of torch's allocator, because the copy back to the device may still run when the next bucket asks for memory.
        memory = passing_host_bytes(own.nbytes, self._bucket.device)
        return memory.view(own.dtype).copy_(own)

    @contextmanager
    def _in_memory(self) -> Iterator[None]:
        self._bucket.fetch(self._bucket.own.to("cpu", copy=True))
        # A caller may edit the master, the parameters or both. Unedited masters must not undo edits of the parameters.
        before = self._bucket.master._version
        try:
            yield
        finally:
            if self._bucket.master._version != before:
                self._bucket.write_back()
            self._leave()

    @torch.no_grad()
    def put(self, row: Row, values: torch.Tensor) -> None:
        self._part_of(row).copy_(values.reshape(-1))

    def view(self, row: Row, tensor: torch.Tensor) -> torch.Tensor:
        return self._part_of(row).view(row.tensor.shape)

    def _part_of(self, row: Row) -> torch.Tensor:
        cut = row.layout.in_shard
        return (self._bucket.own if self._bucket.is_away else self._bucket.master)[cut.start : cut.stop]
