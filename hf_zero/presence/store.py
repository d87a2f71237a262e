"""Calls the ranks' store, always with a time limit, and keeps a store for torchrun's agents.

No other file uses torch's store directly. Other code gets a `Keys`, whose calls have a time limit.
"""

import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

# ---- Calls to the launcher's store, each with a time limit ----
#
# A store on a stopped host or behind a broken link does not answer, and torch's calls would then wait without limit.

T = TypeVar("T")

_GLANCE_S = 0.5
"""Interval at which a thread waiting for an answer checks whether the limit was shortened."""

_JOIN_S = 1.0

CALL_S = 10.0
"""Time limit of a single call to the store, and of the thread's other work before the call."""


class StoreSilentError(RuntimeError):
    """The store has not answered in time."""


class StoreThread:
    """Makes one store call after the other, in its own thread and over its own connection.

    Args:
        within_s: the time limit of a call without an explicit limit.

    Attributes:
        within_s: may be shortened while a call is running.
        is_closing: the current call must end soon.
    """

    def __init__(self, within_s: float):
        # If this process keeps the store, others need the store for longer than this one's process group exists.
        self._kept = _get_default_store()
        self._own: dist.Store | None = None
        self._each: Callable[[], bool] | None = None
        self._period_s = self._due_s = 0.0
        self.within_s = within_s
        self.is_closing = False
        self._calls: queue.SimpleQueue[tuple[Callable, Future] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="hf_zero store", daemon=True)
        self._thread.start()

    @property
    def keys(self) -> "Keys":
        return Keys(self)

    def ask(self, call: Callable[[], T], within_s: float | None = None) -> T:
        """Runs a call in the thread and returns its result.

        Raises:
            StoreSilentError: the call has not returned in time.
            dist.DistNetworkError: the store is gone.
        """
        if threading.current_thread() is self._thread:
            # This call is a part of another thread's call, and has its time limit.
            return call()
        answer: Future[T] = Future()
        began_s = time.monotonic()
        self._calls.put((call, answer))
        while True:
            limit_s = self.within_s if within_s is None else within_s
            left_s = began_s + limit_s - time.monotonic()
            try:
                return answer.result(max(0.0, min(left_s, _GLANCE_S)))
            except FutureTimeoutError:
                if left_s <= _GLANCE_S:
                    keeper = "the process that hosts the ranks' store (rank 0 or the launcher)"
                    raise StoreSilentError(f"{keeper} has not answered for {limit_s:.0f} s") from None

    def repeat(self, each: Callable[[], bool], period_s: float) -> None:
        """Calls a function in the thread every `period_s`, until a result of False."""
        self._each, self._period_s = each, period_s
        # Wake the thread.
        self._calls.put((lambda: None, Future()))

    @property
    def is_of_rank_0(self) -> bool:
        """Whether the store lives in rank 0's process, and ends with the process."""
        store: Any = self._kept
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
        by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
        return isinstance(store, dist.TCPStore) and not by_launcher

    def close(self, within_s: float = _JOIN_S) -> None:
        """Ends the thread after the queued calls, and waits for the end."""
        self.is_closing = True
        self._calls.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(within_s)

    # ---- in the thread ----

    def connection(self) -> dist.Store:
        """Returns the thread's own connection to the store. Only for calls inside the thread."""
        if threading.current_thread() is not self._thread:
            raise AssertionError(
                "hf_zero: bug: the store was called outside of its thread. Open an issue with this traceback."
            )
        if self._own is None:
            # A connection serves one call at a time, so a call here would block training on a shared connection. Connect in this
            # thread, because a silent store does not answer a new connection either.
            self._own = cast(Any, self._kept).clone()
        return self._own

    def _run(self) -> None:
        while True:
            if self._each is not None and time.monotonic() >= self._due_s:
                self._beat(self._each)
                self._due_s = time.monotonic() + self._period_s
            left_s = None if self._each is None else max(0.0, self._due_s - time.monotonic())
            try:
                pair = self._calls.get(timeout=left_s)
            except queue.Empty:
                continue
            if pair is None:
                return
            call, answer = pair
            try:
                answer.set_result(call())
            except Exception as error:
                answer.set_exception(error)
            # A call may reference the watchdog. Kept until the next call, the reference would keep the watchdog and this thread
            # alive.
            del pair, call, answer

    def _beat(self, each: Callable[[], bool]) -> None:
        try:
            is_wanted = each()
        except RuntimeError:
            # The store has ended. The next call of another thread raises an error.
            is_wanted = False
        if not is_wanted:
            self._each = None


class Keys:
    """The keys of the ranks' store below a prefix. Each call raises the errors of `StoreThread.ask`.

    Calls from the store's own thread run at once, within the time limit of the enclosing call.
    """

    def __init__(self, thread: StoreThread, prefix: str = "", within_s: float | None = None):
        self._thread = thread
        self._prefix = prefix
        self._within_s = within_s

    def below(self, prefix: str) -> "Keys":
        return Keys(self._thread, f"{self._prefix}{prefix}/", self._within_s)

    def within(self, seconds: float) -> "Keys":
        """Returns the same keys with another time limit of a call."""
        return Keys(self._thread, self._prefix, seconds)

    def check(self, key: str) -> bool:
        """Whether the key exists."""
        return self._ask(lambda store, name: store.check([name]), key)

    def find(self, key: str) -> str | None:
        """Returns a key's text; None without the key. Other ranks must not delete keys: torch's `get` would wait."""
        found = self.find_bytes(key)
        return None if found is None else found.decode()

    def find_bytes(self, key: str) -> bytes | None:
        return self._ask(lambda store, name: store.get(name) if store.check([name]) else None, key)

    def set(self, key: str, value: str | bytes) -> None:
        self._ask(lambda store, name: store.set(name, cast(str, value)), key)

    def add(self, key: str, amount: int) -> int:
        return self._ask(lambda store, name: store.add(name, amount), key)

    def delete(self, key: str) -> None:
        self._ask(lambda store, name: store.delete_key(name), key)

    def _ask(self, call: Callable[[dist.Store, str], T], key: str) -> T:
        return self._thread.ask(lambda: call(self._thread.connection(), self._prefix + key), self._within_s)


@contextmanager
def opened_store(within_s: float) -> Iterator[Keys]:
    """Opens a connection for a few calls. `within_s`: time limit of each call."""
    thread = StoreThread(within_s)
    try:
        yield thread.keys
    finally:
        thread.close()


# ---- A rendezvous store for torchrun's agents, kept by a process outside of the nodes at risk ----

LOOPBACK = "127.0.0.1"

PORT = 29400
"""torchrun's default port."""

_TIMEOUT_S = 60


def keep_store(port: int = PORT, host: str | None = None) -> dist.TCPStore:
    """Opens a store on one address of this host. The store exists as long as the returned object.

    Agents connect with `torchrun --rdzv-backend c10d --rdzv-endpoint HOST:PORT --rdzv-conf is_host=0 ...`. Without this store,
    one of the agents keeps the store, and the loss of its node ends all agents.

    Args:
        port: 0 selects a free port, which the store's `port` returns.
        host: name or address to listen on; by default this host's name. 0.0.0.0 means all addresses, and torch's store answers
            anybody who connects.

    Raises:
        OSError: the name has no address on this host, or the port is in use.
    """
    listening = _listening(host or socket.gethostname(), port)
    return dist.TCPStore(**listening, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=_TIMEOUT_S))


def _listening(host: str, port: int) -> dict[str, Any]:
    """Listens on one address. Returns the arguments with which a `TCPStore` uses the listener. Raises `OSError`."""
    family, _, _, _, found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    # Bind here instead of in torch, which would listen on all addresses of the host.
    listener = socket.create_server(found[:2], family=family)
    address, port = listener.getsockname()[:2]
    return {"host_name": address, "port": port, "master_listen_fd": listener.detach()}


# ---- The store of ranks on one machine, which no other machine reaches ----


class LoopbackStore(dist.TCPStore):
    """A `TCPStore` whose server only listens on the loopback address. Its arguments are the same."""

    def __init__(
        self,
        host_name: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,
        *args: Any,
        **kwargs: Any,
    ):
        if is_master:
            try:
                listening = _listening(LOOPBACK, port)
            except OSError as error:
                # The same error as torch's. torchrun then tries to reach the store of another agent.
                raise dist.DistNetworkError(f"hf_zero: cannot listen on port {port}: {error}") from error
            host_name, port = listening.pop("host_name"), listening.pop("port")
            kwargs |= listening
        super().__init__(host_name, port, world_size, is_master, *args, **kwargs)
