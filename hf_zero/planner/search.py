"""Simulated step times on a machine, and the choice between set-ups."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from ..config import ZeroConfig
from ..device import rounded
from ..forecast.fit import CLOSE, FITS, TOO_LARGE, PlanError, Room, size
from ..forecast.peak import Forecast
from ..layout.gradient_buffers import GRAD_BUFFERS

# ---- Rates of accelerators, links and disks, for the forecast of a step's time ----

_GB = 10**9

_ACCELERATORS = {
    # Keys are parts of device names; longer names of one family are listed first.
    "B200": (2250, 1125, 8000),
    "H200": (989, 67, 4800),
    "H100 NVL": (835, 60, 3900),
    "H100 PCIe": (756, 51, 2000),
    "H100": (989, 67, 3350),
    "A100-PCIE-40GB": (312, 19.5, 1555),
    "A100-SXM4-40GB": (312, 19.5, 1555),
    "A100": (312, 19.5, 2039),
    "L40S": (362, 91.6, 864),
    "L4": (121, 30.3, 300),
    "A10G": (70, 35, 600),
    "A10": (125, 31.2, 600),
    "RTX 4090": (165, 82.6, 1008),
    "RTX 3090": (71, 35.6, 936),
    "RTX A6000": (155, 38.7, 768),
    "V100": (125, 15.7, 900),
    "T4": (65, 8.1, 320),
}
"""From makers' data sheets, without sparsity: TFLOPS of 16-bit and of 32-bit matrix products, and GB/s of memory."""

_REACHED_FLOPS, _REACHED_BANDWIDTH = 0.45, 0.75
"""The fractions of these rates reached by kernels."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Hosts with accelerators, and the links between them.

    The latencies and default rates equal those in buckets/precision.py, which are from NCCL's tables for choosing algorithms.

    Attributes:
        nodes, ranks_a_node: number of hosts and ranks per host; each rank has one accelerator.
        flops: floating-point operations per second reached by a rank's kernels in forward and backward, a fraction of
            `peak_flops`.
        peak_flops: the accelerator maker's number.
        call_s: time to start a collective.
        step_s, step_between_s: time of a step of a collective's ring inside a node, and between two nodes.
        node_bytes_a_second: bandwidth of a ring inside a node.
        link_bytes_a_second: bandwidth of the links between nodes per rank; a ring uses the links of all ranks of a node.
        step_flops: floating-point operations per second in the matrix products of an optimizer's step, which are in 16 bits
            (Muon).
        memory_bytes_a_second: bandwidth of the accelerator's memory, which limits an optimizer step.
        host_bytes_a_second: bandwidth between an accelerator and host memory, in each direction.
        host_step_bytes_a_second: bandwidth of a host's memory in passes over state, shared by its ranks.
        rank_step_bytes_a_second: the most that the cores of one rank reach.
        host_step_flops: floating-point operations per second in matrix products of 16 bits on a host, shared by its ranks. Set by
            hand, for 32 cores with AVX-512.
        disk_bytes_a_second: bandwidth of a node's disk.
    """

    nodes: int = 1
    ranks_a_node: int = 8
    flops: float = 140e12
    peak_flops: float = 312e12
    call_s: float = 8.4e-6
    step_s: float = 3.4e-6
    step_between_s: float = 9.6e-6
    node_bytes_a_second: float = 235 * _GB
    link_bytes_a_second: float = 25 * _GB
    step_flops: float = 140e12
    memory_bytes_a_second: float = 1500 * _GB
    host_bytes_a_second: float = 20 * _GB
    host_step_bytes_a_second: float = 80 * _GB
    rank_step_bytes_a_second: float = 50 * _GB
    host_step_flops: float = 1e12
    disk_bytes_a_second: float = 3 * _GB

    @classmethod
    def of(cls, accelerator: str, *, nodes: int, ranks_a_node: int, is_16_bit: bool) -> "Machine":
        """Returns hosts with accelerators of the driver's device name; an unknown name counts as an A100.

        Args:
            accelerator: the device name.
            nodes, ranks_a_node: see the attributes.
            is_16_bit: whether matrix products are in bfloat16 or float16.
        """
        name = next((each for each in _ACCELERATORS if each in accelerator), "A100")
        in_16_bit, in_32_bit, gb_a_second = _ACCELERATORS[name]
        peak = 1e12 * (in_16_bit if is_16_bit else in_32_bit)
        return cls(
            nodes=nodes,
            ranks_a_node=ranks_a_node,
            peak_flops=peak,
            flops=_REACHED_FLOPS * peak,
            step_flops=_REACHED_FLOPS * 1e12 * in_16_bit,
            memory_bytes_a_second=_REACHED_BANDWIDTH * gb_a_second * _GB,
        )

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_a_node

    def host_pass_s(self, nbytes: float) -> float:
        """Returns the time in which a rank reads and writes `nbytes` of host memory while the other ranks do the same."""
        return nbytes / min(self.rank_step_bytes_a_second, self.host_step_bytes_a_second / self.ranks_a_node)

    def host_products_s(self, flops: float) -> float:
        """Returns the time in which a rank computes matrix products on the host while the other ranks do the same."""
        return flops / (self.host_step_flops / self.ranks_a_node)

    def latency_s(self, ranks: int, nodes: int) -> float:
        """Returns the latency of a collective over a ring of `ranks` on `nodes`."""
        between = nodes - 1
        return self.call_s + (ranks - 1 - between) * self.step_s + between * self.step_between_s

    def bytes_a_second(self, ranks: int, nodes: int) -> float:
        """Returns the bandwidth of a ring: the slower of its two levels."""
        if nodes == 1:
            return self.node_bytes_a_second
        return min(self.node_bytes_a_second, self.link_bytes_a_second * ranks / nodes)

    def collective_s(self, nbytes: float, ranks: int, nodes: int, calls: int = 1) -> float:
        """Estimates a reduce-scatter or an all-gather of `nbytes` bytes in total: latency of the calls, bytes by bandwidth."""
        if ranks == 1 or not nbytes:
            return 0.0
        return calls * self.latency_s(ranks, nodes) + nbytes * (ranks - 1) / ranks / self.bytes_a_second(ranks, nodes)


# ---- The time of a step, bucket by bucket: kernels in one queue, collectives in another ----
#
# [Note: the simulated step] Backward completes buckets in the order of their numbers. A bucket's reduce-scatter can start when
# all its gradients are computed and the previous bucket has left the link. Above stage 0, `GRAD_BUFFERS` buckets exist at a
# time, and backward waits for the oldest one. The exception is stage 1 with accumulated micro-batches, where each bucket has
# its own buffer. After the last reduction and the optimizer's step, stages 1 and 2 gather the parameters in the order of the
# next forward, which waits for each. Stage 3 gathers each unit for its forward, and each layer except the last again for its
# backward, `prefetch_units` ahead, over the same link as the reductions. The work of forward and backward is divided among
# buckets by their elements. The simulated step is one in the middle of a run, from one optimizer step to the next.
#
# [Note: the simulated offload] Offloaded state is stepped on the accelerator or on the host.
#
# On the accelerator, backward frees memory of activations. During backward, state is copied from the host into this memory, at
# most `freed_bytes`. During the step, the other state is copied in, stepped and copied back, one bucket after the other. State
# that is on the accelerator after the step is copied back during the next forward, and `window_bytes` of it never delay it.
# State in files is read, copied to the accelerator, stepped, copied back and written, during the step only.
#
# On the host, reduced gradients are copied from the accelerator during backward. If a step has several reductions, the host adds
# them up at the same time. Then the host computes the norm and scales the gradients (Trainer clips by default): two reads and one
# write of each gradient. Then the optimizer steps one bucket after the other. Meanwhile, the parameters of finished buckets are
# copied to the accelerator, and state in files is read and written. Reads and writes share the rate of the disk.


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A bucket, or at stage 3 all buckets of a unit, which are gathered and reduced together.

    Attributes:
        numel: elements, by which work is divided.
        reduce_bytes, gather_bytes: bytes of gradients and of parameters on the link; 0 if not sent.
        encoding_bytes, gather_encoding_bytes: device memory traffic of a rank to encode and decode gradients, and parameters,
            with fewer bits.
        reduce_calls, gather_calls: collectives that send these bytes; codes and their scales are sent by two.
        in_layer: False for stage 3's parameters outside of layers, which are whole from the forward to the end of the backward.
    """

    numel: int
    reduce_bytes: int
    gather_bytes: int
    encoding_bytes: int = 0
    gather_encoding_bytes: int = 0
    reduce_calls: int = 1
    gather_calls: int = 1
    in_layer: bool = True


@dataclass(frozen=True, kw_only=True)
class Work:
    """A rank's computation in a step.

    Attributes:
        forward_flops, backward_flops: per micro-batch; backward includes recomputation.
        model_flops: per micro-batch without recomputation, for MFU.
        micro_batches: micro-batches per step.
        step_bytes: bytes read and written by the optimizer on the accelerator.
        step_flops: operations of matrix products in the optimizer's step on the accelerator.
        host_step_bytes, host_step_flops: the same on the host.
        down_bytes: bytes of gradients copied to host memory, per reduction.
        up_bytes: bytes of stepped parameters copied to the accelerator.
        edge_bytes: the largest bucket's gradients, which are the last ones, or its parameters.
        disk_bytes: bytes read from files and written to them.
        visiting_bytes: bytes of state copied to the accelerator for the step, and back.
        window_bytes: bytes of visiting state that need no free memory.
        passing_bytes: bytes of state in files copied to the accelerator and back, one bucket after the other.
        freed_bytes: memory of the accelerator that backward frees for visiting state.
        fetched_bytes: bytes of parameters copied from host memory for each gather.
        moved_activation_bytes: bytes of activations copied to host memory in each forward, and back in backward.
        exchange_s: time for which a micro-batch waits for the other ranks of its sequence.
    """

    forward_flops: float
    backward_flops: float
    model_flops: float
    micro_batches: int = 1
    step_bytes: float = 0.0
    step_flops: float = 0.0
    host_step_bytes: float = 0.0
    host_step_flops: float = 0.0
    down_bytes: float = 0.0
    up_bytes: float = 0.0
    edge_bytes: float = 0.0
    disk_bytes: float = 0.0
    visiting_bytes: float = 0.0
    window_bytes: float = 0.0
    passing_bytes: float = 0.0
    freed_bytes: float = 0.0
    fetched_bytes: float = 0.0
    moved_activation_bytes: float = 0.0
    exchange_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """The seconds of a step, by part.

    Attributes:
        step_s: the whole step.
        compute_s: kernels of forward and backward.
        exposed_s: time in which kernels wait for collectives.
        communication_s: time in which the link is busy.
        optimizer_s: from the last gradient to the last parameter.
        disk_s: time in which the disk is busy.
        without_disk_s: the whole step with a disk that needs no time.
        mfu: model FLOPs utilization: the fraction of `Machine.peak_flops`, without recomputation.
        flops_a_second: a rank's rate, including recomputation.
    """

    step_s: float
    compute_s: float
    exposed_s: float
    communication_s: float
    optimizer_s: float
    mfu: float
    flops_a_second: float
    disk_s: float = 0.0
    without_disk_s: float = 0.0


class _Link:
    """A queue of collectives, one at a time."""

    def __init__(self) -> None:
        self.free_s = 0.0
        self.busy_s = 0.0

    def send(self, ready_s: float, seconds: float) -> float:
        """Returns the arrival time of data ready at `ready_s`."""
        self.free_s = max(self.free_s, ready_s) + seconds
        self.busy_s += seconds
        return self.free_s


class _Simulation:
    """Simulates one step.

    Args:
        pieces: in the order in which backward completes them.
        config: the engine's settings.
        machine: the machine.
        work: a rank's computation.
        ranks, nodes: the group over which a piece is sharded, or reduced at stage 0.
    """

    def __init__(
        self, pieces: Sequence[Piece], config: ZeroConfig, machine: Machine, work: Work, ranks: int, nodes: int
    ):
        self._pieces, self._config, self._work = pieces, config, work
        self._machine, self._ranks, self._nodes = machine, ranks, nodes
        self._link = _Link()
        self._numel = sum(piece.numel for piece in pieces) or 1

    def run(self) -> StepTime:
        work, machine = self._work, self._machine
        now = late_s = 0.0
        for index in range(work.micro_batches):
            is_last = index == work.micro_batches - 1
            now = self._forward(now, after_step=index == 0)
            reduces = is_last or not self._config.accumulates_locally
            now = self._backward(now, reduces=reduces) + work.exchange_s + self._late_activations_s()
            if reduces:
                late_s = self._late_gradients_s(late_s, adds=index > 0)
        disk_s = work.disk_bytes / (machine.disk_bytes_a_second / machine.ranks_a_node)
        late_s = max(late_s, work.edge_bytes / machine.host_bytes_a_second)
        optimizer_s = late_s + self._optimizer_s(disk_s)
        compute_s = work.micro_batches * (work.forward_flops + work.backward_flops) / machine.flops
        step_s = now + optimizer_s
        return StepTime(
            step_s=step_s,
            compute_s=compute_s,
            exposed_s=max(0.0, now - compute_s),
            communication_s=self._link.busy_s + work.micro_batches * work.exchange_s,
            optimizer_s=optimizer_s,
            mfu=work.micro_batches * work.model_flops / step_s / machine.peak_flops,
            flops_a_second=work.micro_batches * (work.forward_flops + work.backward_flops) / step_s,
            disk_s=disk_s,
            without_disk_s=now + late_s + self._optimizer_s(0.0),
        )

    def _reduce_s(self, piece: Piece) -> float:
        """Returns the seconds to reduce a piece's gradients. Encoding precedes the collective, and decoding follows it."""
        return self._seconds(piece.reduce_bytes, piece.encoding_bytes, piece.reduce_calls)

    def _gather_s(self, piece: Piece) -> float:
        return self._seconds(piece.gather_bytes, piece.gather_encoding_bytes, piece.gather_calls)

    def _seconds(self, nbytes: float, encoding_bytes: float, calls: int) -> float:
        encoding_s = encoding_bytes / self._machine.memory_bytes_a_second
        return self._machine.collective_s(nbytes, self._ranks, self._nodes, calls) + encoding_s

    def _forward(self, now: float, *, after_step: bool) -> float:
        order = list(reversed(self._pieces))
        if self._config.stage == 3:
            return self._through_units(order, now, self._work.forward_flops, reduces=False, gathered=range(len(order)))
        arrived = [0.0] * len(order)
        if after_step and self._config.stage > 0:
            arrived = [self._link.send(now, self._gather_s(piece)) for piece in order]
        for piece, there in zip(order, arrived):
            now = max(now, there) + self._share(piece, self._work.forward_flops)
        return now

    def _backward(self, now: float, *, reduces: bool) -> float:
        if self._config.stage == 3:
            reshards = self._config.reshard_after_forward is not False
            layers = [index for index, piece in enumerate(self._pieces) if piece.in_layer and reshards]
            # The last layer of the forward stays, because backward begins with it.
            return self._through_units(
                self._pieces, now, self._work.backward_flops, reduces=reduces, gathered=layers[1:]
            )
        # Stage 0 all-reduces, which costs as much as a reduce-scatter and an all-gather.
        times = 2 if self._config.stage == 0 else 1
        has_whole = self._config.stage == 0 or (self._config.stage == 1 and self._work.micro_batches > 1)
        room = len(self._pieces) if has_whole else GRAD_BUFFERS
        under_way: deque[float] = deque()
        for piece in self._pieces:
            if reduces and len(under_way) >= room:
                now = max(now, under_way.popleft())
            now += self._share(piece, self._work.backward_flops)
            if reduces:
                under_way.append(self._link.send(now, times * self._reduce_s(piece)))
        return max([now, *under_way])

    def _through_units(
        self, order: Sequence[Piece], now: float, flops: float, *, reduces: bool, gathered: Sequence[int]
    ) -> float:
        """Simulates units of stage 3. The units with these indices are gathered before their use."""
        ahead = self._config.prefetch_units
        arrived: dict[int, float] = {}
        under_way: deque[float] = deque()
        fetch = self._work.fetched_bytes / self._machine.host_bytes_a_second
        for index, piece in enumerate(order):
            for wanted in range(index, min(len(order), index + 1 + ahead)):
                if wanted in gathered and wanted not in arrived:
                    share = order[wanted].numel / self._numel
                    arrived[wanted] = self._link.send(now, self._gather_s(order[wanted]) + fetch * share)
            if reduces and len(under_way) >= GRAD_BUFFERS:
                now = max(now, under_way.popleft())
            now = max(now, arrived.get(index, 0.0)) + self._share(piece, flops)
            if reduces:
                under_way.append(self._link.send(now, self._reduce_s(piece)))
        return max([now, *under_way])

    def _share(self, piece: Piece, flops: float) -> float:
        return flops / self._machine.flops * piece.numel / self._numel

    def _late_activations_s(self) -> float:
        """Returns the time for which copies of activations to the host, and back, last longer than forward and backward."""
        copy_s = self._work.moved_activation_bytes / self._machine.host_bytes_a_second
        work_s = (flops / self._machine.flops for flops in (self._work.forward_flops, self._work.backward_flops))
        return sum(max(0.0, copy_s - each) for each in work_s)

    def _late_gradients_s(self, before_s: float, *, adds: bool) -> float:
        """Returns for how long copies of gradients to the host, and their sums there, last after a backward.

        Args:
            before_s: the same after the previous backward.
            adds: whether the host adds the gradients to earlier ones.
        """
        work, machine = self._work, self._machine
        forward_s, backward_s = work.forward_flops / machine.flops, work.backward_flops / machine.flops
        # A sum reads two numbers and writes one.
        sums_s = machine.host_pass_s(3 * work.down_bytes * adds)
        copies_s = work.down_bytes / machine.host_bytes_a_second
        return max(0.0, max(0.0, before_s - forward_s) + max(copies_s, sums_s) - backward_s)

    def _optimizer_s(self, disk_s: float) -> float:
        """Returns the time from the last gradient to the next forward; see [Note: the simulated offload]."""
        work, machine = self._work, self._machine
        link, forward_s = machine.host_bytes_a_second, work.forward_flops / machine.flops
        host_s = machine.host_pass_s(work.host_step_bytes) + machine.host_products_s(work.host_step_flops)
        return (
            work.step_bytes / machine.memory_bytes_a_second
            + work.step_flops / machine.step_flops
            + self._visit_s()
            + machine.host_pass_s(3 * work.down_bytes)
            + max(host_s, disk_s, work.passing_bytes / link)
            + work.edge_bytes / link
            + max(0.0, work.up_bytes / link - host_s - forward_s)
        )

    def _visit_s(self) -> float:
        work, machine = self._work, self._machine
        link = machine.host_bytes_a_second
        forward_s, backward_s = (flops / machine.flops for flops in (work.forward_flops, work.backward_flops))
        early = min(work.visiting_bytes, work.freed_bytes)
        fetches_s = max(0.0, early / link - backward_s) + (work.visiting_bytes - early) / link
        # State is copied back while the step waits for fetches.
        returns = work.visiting_bytes - work.window_bytes - fetches_s * link
        return fetches_s + max(0.0, returns / link - forward_s)


def simulate(
    pieces: Sequence[Piece], config: ZeroConfig, machine: Machine, work: Work, *, ranks: int, nodes: int
) -> StepTime:
    """Returns the time of a step; see [Note: the simulated step].

    Args:
        pieces: in the order in which backward completes them.
        config: the engine's settings.
        machine: the machine.
        work: a rank's computation.
        ranks, nodes: the group over which state is sharded, or gradients are reduced at stage 0.
    """
    return _Simulation(pieces, config, machine, work, ranks, nodes).run()


# ---- The fitting set-ups, the fastest of them, and the reasons ----


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A set-up with its memory forecast and its step time; `step` is None if unknown."""

    forecast: Forecast
    step: StepTime | None = None

    @property
    def name(self) -> str:
        return self.forecast.name

    @property
    def step_s(self) -> float:
        """Returns the seconds of a step; 0 if unknown."""
        return self.step.step_s if self.step is not None else 0.0


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A planner's recommendation.

    Attributes:
        candidate: the recommended set-up; None if all are too large.
        rejected: the fastest set-up that is too large; if all are, the one with the least memory; None if none is.
        close: the fastest set-up close to the memory limit and not recommended; None if there is none.
        claim: why the candidate is recommended, as a predicate such as "fits and is fastest".
        why: the reasons, as lines to print.
    """

    candidate: Candidate | None
    rejected: Candidate | None
    close: Candidate | None
    claim: str
    why: tuple[str, ...]


SIMPLER = 0.03
"""A step that is faster by this fraction does not justify a higher stage, a different tier or fewer bits."""


def choose(candidates: Sequence[Candidate], room: Room) -> Choice:
    """Chooses the fastest fitting set-up; among equally fast ones the first, which is the simplest.

    If none fits, chooses the set-up with the least memory among those close to the limit.

    Raises:
        PlanError: there is nothing to choose from.
    """
    if not candidates:
        raise PlanError("hf_zero: no set-up fits the kept settings.")
    of_class: dict[str, list[Candidate]] = {FITS: [], CLOSE: [], TOO_LARGE: []}
    for each in candidates:
        of_class[room.fit_of(each.forecast)].append(each)
    fitting, close, too_large = of_class[FITS], of_class[CLOSE], of_class[TOO_LARGE]
    if not fitting and not close:
        least = min(candidates, key=_bytes)
        return Choice(candidate=None, rejected=least, close=None, claim="", why=_nothing_fits(least, room))
    if fitting:
        quickest = min(each.step_s for each in fitting)
        chosen = next(each for each in fitting if each.step_s <= quickest * (1 + SIMPLER))
    else:
        chosen = min(close, key=_bytes)
    left = [each for each in close if each is not chosen]
    rejected, close_one = min(too_large, key=_speed, default=None), min(left, key=_speed, default=None)
    claim = _claim(chosen, fitting)
    return Choice(
        candidate=chosen,
        rejected=rejected,
        close=close_one,
        claim=claim,
        why=_reasons(chosen, claim, rejected, close_one, fitting, room),
    )


def _claim(chosen: Candidate, fitting: Sequence[Candidate]) -> str:
    """Returns why `chosen` is recommended; the claim holds for the numbers in the table."""
    if not fitting:
        return "may run out of memory: nothing fits, and this one needs the least memory of the close set-ups"
    if len(fitting) == 1:
        return "is the only one that fits"
    if chosen.step is None:
        return "fits and is simplest (step times are not known)"
    fastest = min(fitting, key=lambda each: each.step_s)
    slower = chosen.step_s / fastest.step_s - 1
    if slower <= 0:
        return "fits and is fastest"
    # Rounded up, so the claim does not understate the difference.
    percent = math.ceil(1000 * slower) / 10
    return f"fits and is simplest of the fast ones ({percent:g} % slower than {fastest.name}, the fastest)"


def _bytes(candidate: Candidate) -> int:
    return candidate.forecast.device_bytes


def _speed(candidate: Candidate) -> tuple[float, int]:
    return candidate.step_s, _bytes(candidate)


def _reasons(
    chosen: Candidate,
    claim: str,
    rejected: Candidate | None,
    close: Candidate | None,
    fitting: Sequence[Candidate],
    room: Room,
) -> tuple[str, ...]:
    spare = f", {size(room.device - _bytes(chosen))} to spare" if fitting else ""
    lines = [f"{chosen.name} {claim}: {size(_bytes(chosen))} of {size(room.device)} a rank{spare}."]
    lines += [f"{each.name} is {room.describe(each.forecast)}." for each in (close, rejected) if each is not None]
    slower = [each for each in fitting if each is not chosen and each.step is not None]
    if slower and chosen.step is not None:
        other = min(slower, key=_bytes)
        if _bytes(other) < _bytes(chosen):
            lines.append(
                f"Less memory: {other.name} needs {size(_bytes(other))}, with a step of "
                f"{duration(other.step_s)} instead of {duration(chosen.step_s)}."
            )
    if chosen.forecast.unknown:
        lines.append(f"Not counted, because unknown in advance: {', '.join(chosen.forecast.unknown)}.")
    return tuple(lines)


MOST_TIMES_SLOWER = 3
"""State in files pays off if host memory is too small, and if a step is at most this times slower than with host memory."""


def advice_on_files(candidates: Sequence[Candidate], room: Room, machine: Machine, numel: int) -> list[str]:
    """Returns a line on whether state in files can pay off: from which model size and disk on; [] without such set-ups.

    Args:
        candidates: all set-ups.
        numel: the model's parameters.
    """
    by_tiers = {
        (each.forecast.settings.get("stage"), _tiers(each)): each for each in candidates if each.step is not None
    }
    pairs = [
        (by_tiers[stage, ("cpu", "none")], each)
        for (stage, tiers), each in by_tiers.items()
        if tiers == ("nvme", "none") and (stage, ("cpu", "none")) in by_tiers
    ]
    if not pairs:
        return []
    in_memory, in_files = min(pairs, key=lambda pair: pair[1].step_s)
    step = in_files.step
    if step is None or not in_memory.forecast.host_bytes:
        return []
    rate = machine.disk_bytes_a_second / _GB
    slower = step.step_s / in_memory.step_s
    spare_s = MOST_TIMES_SLOWER * in_memory.step_s - step.without_disk_s
    least = f"{rounded(rate * step.disk_s / spare_s)} GB/s" if spare_s > 0 else "any rate"
    disk = (
        f"{in_files.name} needs {duration(step.step_s)} per step, {slower:.1f} times as long as {in_memory.name}: a disk of "
        f"{rate:g} GB/s is busy for {duration(step.disk_s)} of that time, and a disk below {least} makes it more than "
        f"{MOST_TIMES_SLOWER} times slower."
    )
    if room.host is None or in_memory.forecast.host_bytes > room.host:
        return [disk] if slower > MOST_TIMES_SLOWER else []
    most = int(numel * room.host / in_memory.forecast.host_bytes)
    return [
        f"Files do not pay off below {most:,} parameters, because the state of smaller models fits in host memory. {disk}"
    ]


def _tiers(candidate: Candidate) -> tuple[str, str]:
    offload = candidate.forecast.settings.get("offload") or {}
    return offload.get("optimizer", "none"), offload.get("params", "none")


def duration(seconds: float) -> str:
    """Returns a step's time in words: "1.25 s" or "27.4 ms"."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{rounded(seconds * 1e3)} ms"


def _nothing_fits(least: Candidate, room: Room) -> tuple[str, ...]:
    device = least.forecast.device
    largest = max(device, key=lambda kind: device[kind])
    remedies = {
        "activations": "Use fewer rows per micro-batch and more micro-batches, shorter rows, or activation checkpointing.",
        "logits": "Use fewer rows per micro-batch and more micro-batches, shorter rows, or a loss in chunks.",
        "parameters": "Use more ranks, state and parameters in host memory, or a smaller model.",
    }
    remedy = remedies.get(largest, "Use more ranks, more memory, or state in host memory or in files.")
    return (
        f"Nothing fits. The set-up with the least memory is {least.name}, which is {room.describe(least.forecast)}.",
        f"Its largest part is {largest}: {size(device[largest])}. {remedy}",
    )
