"""Transports over torch.distributed: collectives for NCCL, sends and receives for gloo."""

import hmac
import pickle
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from ..arithmetic import sum_in_rank_order
from ..device import clock
from .arrivals import CommunicationError
from .control import GatherOrder, Transfers, control_of, finish_abandoned
from .groups import Groups, RankGroup
from .ledger import Label, Ledger
from .transport import DataParallelGroup, Handle, LocalTransport, Transport, Value, hidden_from_profiler, shown
from .watch import ENDED, Wait
from .watchdog import StoreSilentError, Watchdog, watch_over

# ---- A barrier with a time limit, which leaves the process group usable when some ranks do not come ----

_PAUSE_S = 0.02
_LOOK_S = 10.0
_STORE_S = 10.0
"""What a single call to the store may take, and what else its thread has to do meanwhile."""


class StoreBarrier:
    """A barrier of some ranks through the launcher's store.

    gloo's own monitored barrier keeps time on rank 0 alone, and its time limit closes the connections of the group.

    Args:
        world: the ranks that meet.
        name: the same on all ranks, and of this transport alone.
    """

    def __init__(self, world: RankGroup, watchdog: Watchdog, name: str):
        self._ranks = world.ranks
        self._own = self._ranks[world.index]
        self._watchdog = watchdog
        self._name = name
        self._count = 0

    def wait(self, purpose: str, timeout_s: float, alone: str = "") -> None:
        """Waits until every rank is here.

        Args:
            alone: what lets one rank do it by itself, for the error.

        Raises:
            CommunicationError: `timeout_s` have passed, a rank has ended or left without coming, or waits for this one in
                another collective; names those that did not come, and where they are.
        """
        self._count += 1
        with self._watchdog.inside(purpose) as wait:
            try:
                self._wait(wait, purpose, timeout_s, alone)
            except (dist.DistNetworkError, StoreSilentError) as error:
                silent = str(error) if isinstance(error, StoreSilentError) else None
                what = silent or "the process that keeps the ranks' store has ended, rank 0's or the launcher's"
                raise _came_alone(purpose, what, alone) from error

    def _wait(self, wait: Wait, purpose: str, timeout_s: float, alone: str) -> None:
        if self._watchdog.with_store(self._arrive, _STORE_S):
            raise _came_alone(purpose, "the others have given up waiting for this rank", alone)
        pause_s, look_s = 1e-3, _LOOK_S
        while missing := self._watchdog.with_store(self._missing, _STORE_S):
            # A store tells nobody that a rank has died: the missing ones are looked up.
            lost = self._watchdog.with_store(lambda store: self._watchdog.gone(store, missing), _STORE_S)
            if lost or wait.seconds >= timeout_s:
                # Before the raise: a rank that comes later must not wait for this one.
                self._give_up(purpose, missing)
                what = f"ranks {lost} have ended" if lost else f"waited {timeout_s:.0f} s for ranks {missing}"
                raise _came_alone(purpose, what, alone, self._watchdog.lines(wait, enough=lost[0] if lost else None))
            if wait.end is not None:
                self._give_up(purpose, missing)
                raise wait.end
            if wait.seconds >= look_s:
                look_s += _LOOK_S
                self._refuse_to_wait_in_vain(purpose, missing, wait, alone)
            # Not by the store's own `wait`: at the end of a patience it prints warnings.
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_S)

    def _refuse_to_wait_in_vain(self, purpose: str, missing: list[int], wait: Wait, alone: str) -> None:
        lines = self._watchdog.look_for(missing, wait)
        if lines is not None:
            self._give_up(purpose, missing)
            raise _came_alone(purpose, f"ranks {missing} wait for this one elsewhere", alone, lines)

    def _give_up(self, purpose: str, missing: list[int]) -> None:
        def tell(store: dist.Store) -> None:
            self._in(store).set("given up", "")
            self._watchdog.write_reason(store, f"only some ranks came to {purpose}", missing)

        self._watchdog.with_store(tell, _STORE_S)

    # ---- in the thread of the store ----

    def _arrive(self, store: dist.Store) -> bool:
        """Registers this rank; returns whether the others have given up."""
        barrier = self._in(store)
        if barrier.check(["given up"]):
            return True
        barrier.set(f"came {self._own}", "")
        if barrier.add("count", 1) == len(self._ranks):
            barrier.set("complete", "")
        return False

    def _missing(self, store: dist.Store) -> list[int]:
        barrier = self._in(store)
        # One question where all ranks are here, in place of one for each rank.
        if barrier.check(["complete"]):
            return []
        return [rank for rank in self._ranks if not barrier.check([f"came {rank}"])]

    def _in(self, store: dist.Store) -> dist.Store:
        return dist.PrefixStore(f"hf_zero/{self._name}/{self._count}", store)


def _came_alone(purpose: str, what: str, alone: str, lines: str = "") -> CommunicationError:
    where, otherwise = f"\n{lines}\n" if lines else " ", f", or {alone}" if alone else ""
    return CommunicationError(
        f"hf_zero: only some ranks came to {purpose}; {what}.{where}It is collective: call it on every rank, outside "
        f"`if is_main_process`{otherwise}. The time limit is `comm.late_s`, and of a save_state `comm.timeout_s`."
    )


# ---- torch.distributed's own flat collectives, asynchronous: what NCCL and other device backends are best at ----

# torch 2.13 has renamed them.
reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""`(output, input, op, group, async_op)` on contiguous tensors."""

all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""`(output, input, group, async_op)` on contiguous tensors."""


class CollectiveTransport(Transport):
    """Makes one backend call a bucket, on any backend. On gloo its reduce-scatter moves twice the necessary bytes."""

    def __init__(self, groups: Groups, ledger: Ledger | None = None):
        super().__init__(ledger or Ledger(watch=watch_over(groups)))
        self._groups = groups
        # Ranks of a group → how many of this rank's peers there are on other nodes.
        self._elsewhere: dict[tuple[int, ...], int] = {}
        # Device backends note the end of a work object at once, for the device to pass.
        self._unseen = hidden_from_profiler if groups.backend == "gloo" else nullcontext
        self._gathers = GatherOrder(groups.gather.ranks)
        self._control = control_of(groups, self.watch, self._gathers)
        self._name = self.exchange(uuid.uuid4().hex, "exchange of a name")[0]
        watch = self.watch
        self._barrier = StoreBarrier(groups.world, watch, self._name) if isinstance(watch, Watchdog) else None

    def start_reduce_scatter(
        self, flat: torch.Tensor, out: torch.Tensor, label: Label, among: RankGroup | None = None
    ) -> Handle:
        group = among or self._groups.shard
        self._count(label, group, flat.nbytes)
        target = out if out.dtype == flat.dtype else torch.empty(out.shape, dtype=flat.dtype, device=flat.device)
        with self.watch.inside(label), shown("start", label), self._unseen():
            work = reduce_scatter_flat(target, flat, op=dist.ReduceOp.SUM, group=group.handle, async_op=True)

        def complete() -> None:
            work.wait()
            if target is not out:
                out.copy_(target)

        return Handle(label, self.ledger, complete)

    def start_all_gather(
        self, flat: torch.Tensor, own: torch.Tensor, label: Label, among: RankGroup | None = None
    ) -> Handle:
        group = among or self._groups.gather
        self._count(label, group, flat.nbytes)
        # Noted at the start, in the order of the host: NCCL matches by that order alone, without tags.
        self._gathers.note(str(label))
        with self.watch.inside(label), shown("start", label), self._unseen():
            work = all_gather_flat(flat, own, group=group.handle, async_op=True)
        return Handle(label, self.ledger, lambda: work.wait())

    def start_all_to_all(
        self, flat: torch.Tensor, out: torch.Tensor, label: Label, among: RankGroup | None = None
    ) -> Handle:
        group = among or self._groups.shard
        self._count(label, group, flat.nbytes)
        with self.watch.inside(label), shown("start", label), self._unseen():
            work = dist.all_to_all_single(out, flat, group=group.handle, async_op=True)
        return Handle(label, self.ledger, lambda: work.wait())

    def start_all_reduce(self, flat: torch.Tensor, label: Label) -> Handle:
        self._count(label, self._groups.replicate, 2 * flat.nbytes)
        with self.watch.inside(label), shown("start", label), self._unseen():
            work = dist.all_reduce(flat, group=self._groups.replicate.handle, async_op=True)
        return Handle(label, self.ledger, lambda: work.wait())

    def broadcast(self, tensor: torch.Tensor, label: Label, source: int | None = None) -> None:
        group, first = (self._groups.world, 0) if source is None else (self._groups.shard, source)
        sent = tensor.nbytes if group.index == first else 0
        entry = self.ledger.count(label, sent, sent if len(set(self._groups.nodes)) > 1 else 0)
        with self.ledger.waiting(label.kind), self.watch.inside(label):
            # Backends have few dtypes: NCCL no int16, gloo no bool.
            values = tensor.detach().contiguous()
            dist.broadcast(values.view(-1).view(torch.uint8), src=group.ranks[first], group=group.handle)
        entry[ENDED] = time.monotonic()
        if values.data_ptr() != tensor.data_ptr():
            tensor.copy_(values)

    def agree_sum(self, values: torch.Tensor, label: Label) -> torch.Tensor:
        self._count(label, self._groups.shard, 2 * values.nbytes)
        # A clone: the all-reduce writes in place, and the caller keeps its own values.
        result = values.clone()
        with self.watch.inside(label), shown("start", label), self._unseen():
            work = dist.all_reduce(result, group=self._groups.shard.handle, async_op=True)
        Handle(label, self.ledger, lambda: work.wait()).finish()
        return result

    def start_agree_max(self, values: torch.Tensor, label: Label) -> Callable[[], torch.Tensor]:
        take = self._start_swap(values, label)
        return lambda: take().amax(0)

    def barrier(self, purpose: str, timeout_s: float, alone: str = "") -> None:
        if self._barrier is not None:
            self._barrier.wait(purpose, timeout_s, alone)
            # The barrier only counts ranks: the exchange finds ranks that have come for another purpose.
            self.exchange(None, purpose)

    def exchange(self, value: Value, purpose: str = "exchange of a few values") -> list[Value]:
        return self._control.exchange(value, purpose)

    def _start_swap(self, values: torch.Tensor, label: Label) -> Callable[[], torch.Tensor]:
        """Sends this rank's small host tensor; the result waits for every rank's, in rank order."""
        self._count(label, self._groups.world, self._groups.world.size * values.nbytes)
        entry, take = self.ledger.began(label), self._control.start_swap(values, label)

        def wait() -> torch.Tensor:
            with self.ledger.finishing(label.kind, entry):
                return take()

        return wait

    def _count(self, label: Label, group: RankGroup, nbytes: int) -> None:
        """Counts a collective in which this rank sends each peer of the group its part of `nbytes`.

        A backend may pass parts on from rank to rank; which link they take is then its own affair, and their number the same.
        """
        size, elsewhere = len(group.ranks), self._elsewhere.get(group.ranks)
        if elsewhere is None:
            elsewhere = self._elsewhere[group.ranks] = self._groups.peers_elsewhere(group)
        sent = nbytes * (size - 1) // size
        between = sent * elsewhere // max(size - 1, 1)
        self.ledger.count(label, sent, between)


# ---- Reduce-scatter and all-gather by send and receive, straight from and into the flat buffer ----
#
# gloo has no reduce-scatter of its own: the stock one is an all-reduce and a copy, twice the bytes on the wire. Here each
# rank sends a peer the peer's part and adds what it receives in rank order, so that the sum does not depend on timing.

_REDUCE_TAG, _GATHER_TAG, _EXCHANGE_TAG = 0x5A450000, 0x5A460000, 0x5A470000
"""Keep our messages apart from sends of the script's own in the same process group; the channel is added."""


class PointToPointTransport(CollectiveTransport):
    """Sends and receives host tensors over gloo. Broadcasts and all-reduces stay gloo's own."""

    adds_in_wider = True

    def __init__(self, groups: Groups, timeout_s: float, ledger: Ledger | None = None):
        super().__init__(groups, ledger)
        self._timeout_s = timeout_s
        self._control_group = groups.control_group
        # Indices in the control group, which holds all ranks of the world.
        self._places = {rank: place for place, rank in enumerate(groups.world.ranks)}
        # A dropped engine's messages would otherwise be taken for those of this one.
        finish_abandoned(timeout_s)

    def agree_sum(self, values: torch.Tensor, label: Label) -> torch.Tensor:
        if self._groups.shard.size < self._groups.world.size:
            return super().agree_sum(values, label)
        return self._start_swap(values, label)().sum(0)

    def start_reduce_scatter(
        self, flat: torch.Tensor, out: torch.Tensor, label: Label, among: RankGroup | None = None
    ) -> Handle:
        group = among or self._groups.shard
        self._count(label, group, flat.nbytes)
        parts = list(flat.chunk(group.size))
        received = {peer: torch.empty_like(parts[peer]) for peer in group.peers[1:]}
        # `out` takes the first peer's part, unless it lies in `flat` itself or has another dtype.
        first = group.peers[0]
        received[first] = out if self._is_scratch(out, flat) else torch.empty_like(parts[first])
        transfers = self._start(_REDUCE_TAG, label, group, received, parts)

        def complete() -> None:
            # All parts first, then the sum in rank order: added as they arrive, the result would depend on timing.
            transfers.wait()
            received[group.index] = parts[group.index]
            sum_in_rank_order([received[place] for place in range(group.size)], out)

        return Handle(label, self.ledger, complete)

    def start_all_gather(
        self, flat: torch.Tensor, own: torch.Tensor, label: Label, among: RankGroup | None = None
    ) -> Handle:
        group = among or self._groups.shard
        self._count(label, group, flat.nbytes)
        parts = flat.chunk(group.size)
        transfers = self._start(_GATHER_TAG, label, group, parts, [own] * group.size)
        if own.data_ptr() != parts[group.index].data_ptr():
            # Behind the start: the messages are on their way while this rank copies.
            parts[group.index].copy_(own)
        return Handle(label, self.ledger, transfers.wait)

    def start_all_to_all(
        self, flat: torch.Tensor, out: torch.Tensor, label: Label, among: RankGroup | None = None
    ) -> Handle:
        group = among or self._groups.shard
        self._count(label, group, flat.nbytes)
        parts, places = flat.chunk(group.size), out.chunk(group.size)
        transfers = self._start(_EXCHANGE_TAG, label, group, places, parts)
        places[group.index].copy_(parts[group.index])
        return Handle(label, self.ledger, transfers.wait)

    def _start(
        self,
        tag: int,
        label: Label,
        group: RankGroup,
        received: Sequence[torch.Tensor] | Mapping[int, torch.Tensor],
        sent: Sequence[torch.Tensor],
    ) -> Transfers:
        """Receives a part from each peer and sends each peer its part."""
        tag += label.channel
        ranks, control = group.ranks, self._control_group
        with self.watch.inside(label), shown("start", label), self._unseen():
            # All receives before all sends: a peer's send begins once its receive is posted.
            works = [(ranks[p], control.recv([received[p]], self._places[ranks[p]], tag)) for p in group.peers]
            works += [(ranks[p], control.send([sent[p]], self._places[ranks[p]], tag)) for p in group.peers]
        return Transfers(works, self._timeout_s)

    @staticmethod
    def _is_scratch(out: torch.Tensor, flat: torch.Tensor) -> bool:
        begin, end = flat.data_ptr(), flat.data_ptr() + flat.nbytes
        return out.dtype == flat.dtype and not begin <= out.data_ptr() < end


# ---- Chooses the transport for a backend and a device, and makes data parallel groups ----


def choose_transport(groups: Groups, device: torch.device, timeout_s: float, ledger: Ledger | None = None) -> Transport:
    """Chooses: nothing for one rank, point to point for gloo on the host, the backend's own collectives otherwise."""
    is_alone = groups.world_size == 1
    if ledger is None:
        ledger = Ledger(clock(device), None if is_alone else watch_over(groups), is_timed=device.type == "cpu")
    if is_alone:
        return LocalTransport(ledger)
    if groups.backend == "gloo" and device.type == "cpu":
        return PointToPointTransport(groups, timeout_s, ledger)
    return CollectiveTransport(groups, ledger)


def choose_group(groups: Groups, device: torch.device, ledger: Ledger | None = None) -> DataParallelGroup:
    """Makes the data parallel group of these ranks; with `comm.sync_every`, also the one that steps together."""
    transport = choose_transport(groups, device, groups.timeout_s, ledger)
    in_step, own = groups.of_a_step(), transport
    if in_step is not groups:
        own = choose_transport(in_step, device, groups.timeout_s, transport.ledger)
    return DataParallelGroup(groups=in_step, transport=own, all_groups=groups, all_transport=transport)


# ---- Exchanges of small values through the launcher's store, for threads beside training ----

_GLANCE_S = 0.02
_SIGNATURE_BYTES = 32


class StoreExchange:
    """Exchanges values through the launcher's store, over a connection of its own.

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
        """Shortens the wait for other ranks from now on: this process wants to end."""
        self._timeout_s = seconds

    def exchange(self, value: Value) -> list[Value]:
        """Returns every rank's picklable value, in rank order.

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
        # Before unpickling: torch's store answers everyone who reaches its port, and an unpickled value may run code.
        if not hmac.compare_digest(signature, self._signature(self._key(rank), data)):
            raise CommunicationError(
                f"hf_zero: what the launcher's store has from rank {rank} was not written by that rank. Others write into "
                "the store: let only the run's own nodes reach MASTER_PORT."
            )
        return pickle.loads(data)

    def _signature(self, key: str, data: bytes) -> bytes:
        return hmac.digest(self._secret, key.encode() + b"\0" + data, "sha256")
