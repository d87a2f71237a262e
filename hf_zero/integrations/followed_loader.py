"""Data loaders: the point at which a plain loop stops, and workers protected from a launcher's signal."""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from accelerate.data_loader import DataLoaderAdapter

from ..hooks.mixins import mix_in
from ..hooks.weak import WeakHook

if TYPE_CHECKING:
    # Mixed into data loaders at run time; the type checker treats their methods as inherited.
    from torch.utils.data import DataLoader as _LoaderBase
else:
    _LoaderBase = object


class FollowedLoader(_LoaderBase):
    """A prepared data loader that notifies the Accelerator when the script asks for the next batch."""

    _zero_batch: WeakHook

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            followed = self._zero_batch()
            # The Accelerator was deleted, or the loader is a copy, which has no Accelerator.
            if followed is None:
                yield batch
                continue
            with followed:
                yield batch


def follow_loader(loader: Any, batch: WeakHook) -> None:
    """Turns one of accelerate's data loaders into a `FollowedLoader` and moves its workers to their own process groups.

    Other loaders are not changed: a loop without a followed loader stops at its next training forward.

    Args:
        loader: the data loader.
        batch: returns the context that is active while the script uses a batch.
    """
    if not isinstance(loader, DataLoaderAdapter):
        return
    mix_in(loader, FollowedLoader)
    loader._zero_batch = batch
    # accelerate's loaders forward reads of attributes to the inner loader, but not assignments.
    bare = loader.base_dataloader
    if bare.num_workers and not isinstance(bare.worker_init_fn, _Apart):
        bare.worker_init_fn = _Apart(bare.worker_init_fn)


class _Apart:
    """Moves a loader's worker out of the rank's process group: torchrun's signals to the group would end the worker.

    Args:
        then: the loader's own `worker_init_fn`.
    """

    def __init__(self, then: Callable[[int], None] | None):
        self._then = then

    def __call__(self, worker: int) -> None:
        os.setpgid(0, 0)
        if self._then is not None:
            self._then(worker)
