"""Exchanges of small values through the launcher's store, for threads beside training."""

import hmac
import pickle
import time
from typing import Any, cast

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from .groups.groups import Groups
from .transport import CommunicationError, Value

_GLANCE_S = 0.02
_SIGNATURE_BYTES = 32


class StoreExchange:
    """Exchanges by way of the store that the ranks were launched with, over a connection of their own.

    torch's store answers everyone who reaches its port, and an unpickled value may run code: values are signed.

    Args:
        name: the same on all ranks, and of this object alone.
        secret: the same on all ranks, which never had it from the store.
        timeout_s: how long an exchange waits for ranks that do not come.
    """

    def __init__(self, groups: Groups, name: str, secret: bytes, timeout_s: float):
        self._groups = groups
        self._secret = secret
        self._timeout_s = timeout_s
        self._count = 0
        if groups.world_size > 1:
            # A store's connection serves one call at a time: a wait on a shared one would hold training up.
            # Of more types than torch's stubs say.
            self._store: Any = dist.PrefixStore(
                f"hf_zero/store_exchange/{name}", cast(Any, _get_default_store()).clone()
            )

    def hurry(self, seconds: float) -> None:
        """From now on, waits no longer than this for other ranks: this process wants to end."""
        self._timeout_s = seconds

    def exchange(self, value: Value) -> list[Value]:
        """Every rank's picklable value, in rank order.

        Raises:
            CommunicationError: a rank has not come in time, or a value was written by none of the ranks.
        """
        if self._groups.world_size == 1:
            return [value]
        try:
            return self._exchange(value)
        except dist.DistNetworkError as error:
            raise CommunicationError(
                f"hf_zero: the launcher's store is gone, so the ranks cannot finish a checkpoint together ({error}). The host "
                "that kept it was lost or has ended; its own error is the reason."
            ) from error

    def _exchange(self, value: Value) -> list[Value]:
        self._count += 1
        key, data = self._key(self._groups.rank), pickle.dumps(value)
        self._store.set(key, self._signature(key, data) + data)
        values = [value if rank == self._groups.rank else self._take(rank) for rank in range(self._groups.world_size)]
        # All have come here, so all have read what was left at the place before.
        self._store.delete_key(f"{self._count - 1}/{self._groups.rank}")
        return values

    def _key(self, rank: int) -> str:
        return f"{self._count}/{rank}"

    def _take(self, rank: int) -> Any:
        began_s = time.monotonic()
        # Not the store's own wait: its connection could not be told meanwhile to give up sooner.
        while not self._store.check([self._key(rank)]):
            if time.monotonic() > began_s + self._timeout_s:
                raise CommunicationError(
                    f"hf_zero: rank {rank} did not come to finish a checkpoint. It ended, or was held up for more than "
                    f"{self._timeout_s:.0f} s; its own error is the reason."
                )
            time.sleep(_GLANCE_S)
        signed = self._store.get(self._key(rank))
        signature, data = signed[:_SIGNATURE_BYTES], signed[_SIGNATURE_BYTES:]
        if not hmac.compare_digest(signature, self._signature(self._key(rank), data)):
            raise CommunicationError(
                f"hf_zero: what the launcher's store has from rank {rank} was not written by that rank. Others write into "
                "the store: let only the run's own nodes reach MASTER_PORT."
            )
        return pickle.loads(data)

    def _signature(self, key: str, data: bytes) -> bytes:
        return hmac.digest(self._secret, key.encode() + b"\0" + data, "sha256")
