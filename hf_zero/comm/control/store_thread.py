"""Calls to the store that the ranks were launched with, which hold nobody up for longer than said.

A store whose host is stopped, or whose link is cut, does not answer, and torch's calls then wait without limit.
"""

import os
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

T = TypeVar("T")


class StoreSilentError(RuntimeError):
    """The store has not answered in time."""


class StoreThread:
    """A thread that makes one call after the other, over a connection of its own.

    Args:
        each: called with the store in every `period_s`, until it returns False.

    Attributes:
        is_closing: whether what it does has to end soon.
    """

    def __init__(self, each: Callable[[dist.Store], bool], period_s: float):
        # Where this process keeps the store, others need it longer than this one's process group lasts.
        self._kept = _get_default_store()
        # A connection serves one call at a time: on a shared one, a call here would hold training's up.
        self._store = cast(Any, self._kept).clone()
        self._each = each
        self._period_s = period_s
        self.is_closing = False
        self._calls: queue.SimpleQueue[tuple[Callable, Future] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="hf_zero store", daemon=True)
        self._thread.start()

    def ask(self, call: Callable[[dist.Store], T], within_s: float) -> T:
        """What a call with the store returns.

        Raises:
            StoreSilentError: it has not returned in time.
            dist.DistNetworkError: the store is gone.
        """
        answer: Future[T] = Future()
        self._calls.put((call, answer))
        try:
            return answer.result(within_s)
        except FutureTimeoutError:
            raise StoreSilentError(
                f"the process that keeps the ranks' store, rank 0's or the launcher's, has not answered for {within_s:.0f} s"
            ) from None

    @property
    def is_of_rank_0(self) -> bool:
        """Whether rank 0's process keeps the store, and takes it along when it ends."""
        store: Any = self._kept
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
        by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
        return isinstance(store, dist.TCPStore) and not by_launcher

    def close(self, within_s: float) -> None:
        """Ends the thread behind what it has been asked for, and waits for that."""
        self.is_closing = True
        self._calls.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(within_s)

    def _run(self) -> None:
        wanted, due_s = True, time.monotonic()
        while True:
            if wanted and time.monotonic() >= due_s:
                wanted = self._beat()
                due_s = time.monotonic() + self._period_s
            try:
                pair = self._calls.get(timeout=max(0.0, due_s - time.monotonic()) if wanted else None)
            except queue.Empty:
                continue
            if pair is None:
                return
            call, answer = pair
            try:
                answer.set_result(call(self._store))
            except Exception as error:
                answer.set_exception(error)
            del pair, call, answer

    def _beat(self) -> bool:
        try:
            return self._each(self._store)
        except RuntimeError:
            # The store has ended. Who needs it is told on its next call.
            return False
