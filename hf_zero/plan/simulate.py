"""The time of a step, bucket by bucket, as the engine schedules it: kernels in one queue, collectives in another.

[Note: the simulated step]
Backward brings buckets in the order of their numbers; a bucket's reduce-scatter may begin when all its gradients are there, and
goes behind the one before it on the link. Above stage 0 there are `GRAD_BUFFERS` of them at a time, and backward waits for the
oldest one; not at stage 1 where micro-batches have accumulated, each bucket in a buffer of its own. When all have ended and the
optimizer has stepped, stages 1 and 2 gather the parameters behind the step, in the order in which the next forward reads them,
and the forward waits for each. Stage 3 gathers a unit for its forward and again for its backward, `prefetch_units` ahead, over
the same link as the reductions. The work of forward and backward is dealt over buckets by their elements. What is simulated is a
step in the middle of a run, from optimizer step to optimizer step.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from ..config import ZeroConfig
from ..layout.pool import GRAD_BUFFERS
from .machine import Machine


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A bucket, or at stage 3 all buckets of a unit, as it comes and goes.

    Attributes:
        numel: elements, by which work is dealt.
        reduce_bytes: of its gradients as they travel; `gather_bytes`, of its parameters. 0 for what does not travel.
    """

    numel: int
    reduce_bytes: int
    gather_bytes: int


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a rank computes in a step.

    Attributes:
        forward_flops, backward_flops: of a micro-batch; recomputation is in backward.
        model_flops: of a micro-batch without recomputation, by which MFU is counted.
        micro_batches: of a step.
        step_bytes: that the optimizer reads and writes; `host_step_bytes`, `moved_bytes`, `disk_bytes`: of these on the host,
            between host and accelerator, and from and to files.
        fetched_bytes: of parameters that come from host memory for each gather.
    """

    forward_flops: float
    backward_flops: float
    model_flops: float
    micro_batches: int = 1
    step_bytes: float = 0.0
    host_step_bytes: float = 0.0
    moved_bytes: float = 0.0
    disk_bytes: float = 0.0
    fetched_bytes: float = 0.0


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of a step, and what they go to.

    Attributes:
        exposed_s: in which kernels wait for collectives.
        communication_s: that the link is busy.
        optimizer_s: from the last gradient to the last parameter.
        mfu: model FLOPs utilisation: of `Machine.peak_flops`, without recomputation.
        flops_a_second: of a rank, recomputation included.
    """

    step_s: float
    compute_s: float
    exposed_s: float
    communication_s: float
    optimizer_s: float
    mfu: float
    flops_a_second: float


class _Link:
    """A queue of collectives, one at a time."""

    def __init__(self) -> None:
        self.free_s = 0.0
        self.busy_s = 0.0

    def send(self, ready_s: float, seconds: float) -> float:
        """When what is ready then has arrived."""
        self.free_s = max(self.free_s, ready_s) + seconds
        self.busy_s += seconds
        return self.free_s


class _Simulation:
    """One step.

    Args:
        pieces: in the order in which backward brings them.
        ranks, nodes: over which a piece is sharded, or at stage 0 reduced.
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
        now = 0.0
        for index in range(work.micro_batches):
            is_last = index == work.micro_batches - 1
            now = self._forward(now, after_step=index == 0)
            reduces = is_last or not self._config.accumulates_locally
            now = self._backward(now, reduces=reduces)
        optimizer_s = self._optimizer_s()
        compute_s = work.micro_batches * (work.forward_flops + work.backward_flops) / machine.flops
        step_s = now + optimizer_s
        return StepTime(
            step_s=step_s,
            compute_s=compute_s,
            exposed_s=max(0.0, now - compute_s),
            communication_s=self._link.busy_s,
            optimizer_s=optimizer_s,
            mfu=work.micro_batches * work.model_flops / step_s / machine.peak_flops,
            flops_a_second=work.micro_batches * (work.forward_flops + work.backward_flops) / step_s,
        )

    def _seconds(self, nbytes: float) -> float:
        return self._machine.collective_s(nbytes, self._ranks, self._nodes)

    def _forward(self, now: float, *, after_step: bool) -> float:
        order = list(reversed(self._pieces))
        if self._config.stage == 3:
            return self._through_units(order, now, self._work.forward_flops, reduces=False)
        arrived = [0.0] * len(order)
        if after_step and self._config.stage > 0:
            arrived = [self._link.send(now, self._seconds(piece.gather_bytes)) for piece in order]
        for piece, there in zip(order, arrived):
            now = max(now, there) + self._share(piece, self._work.forward_flops)
        return now

    def _backward(self, now: float, *, reduces: bool) -> float:
        if self._config.stage == 3:
            again = self._config.reshard_after_forward is not False
            return self._through_units(self._pieces, now, self._work.backward_flops, reduces=reduces, gathers=again)
        # Stage 0 all-reduces: a reduce-scatter and an all-gather.
        times = 2 if self._config.stage == 0 else 1
        has_whole = self._config.stage == 0 or (self._config.stage == 1 and self._work.micro_batches > 1)
        room = len(self._pieces) if has_whole else GRAD_BUFFERS
        under_way: deque[float] = deque()
        for piece in self._pieces:
            if reduces and len(under_way) >= room:
                now = max(now, under_way.popleft())
            now += self._share(piece, self._work.backward_flops)
            if reduces:
                under_way.append(self._link.send(now, times * self._seconds(piece.reduce_bytes)))
        return max([now, *under_way])

    def _through_units(
        self, order: Sequence[Piece], now: float, flops: float, *, reduces: bool, gathers: bool = True
    ) -> float:
        """Units of stage 3: each is gathered ahead of its use, and in backward reduced behind it."""
        ahead = self._config.prefetch_units
        arrived: dict[int, float] = {}
        under_way: deque[float] = deque()
        fetch = self._work.fetched_bytes / self._machine.host_bytes_a_second
        for index, piece in enumerate(order):
            for wanted in range(index, min(len(order), index + 1 + ahead)):
                if gathers and wanted not in arrived:
                    share = order[wanted].numel / self._numel
                    arrived[wanted] = self._link.send(now, self._seconds(order[wanted].gather_bytes) + fetch * share)
            if reduces and len(under_way) >= GRAD_BUFFERS:
                now = max(now, under_way.popleft())
            now = max(now, arrived.get(index, 0.0)) + self._share(piece, flops)
            if reduces:
                under_way.append(self._link.send(now, self._seconds(piece.reduce_bytes)))
        return max([now, *under_way])

    def _share(self, piece: Piece, flops: float) -> float:
        return flops / self._machine.flops * piece.numel / self._numel

    def _optimizer_s(self) -> float:
        work, machine = self._work, self._machine
        return (
            work.step_bytes / machine.memory_bytes_a_second
            + work.host_step_bytes / machine.host_step_bytes_a_second
            + work.moved_bytes / machine.host_bytes_a_second
            + work.disk_bytes / (machine.disk_bytes_a_second / machine.ranks_a_node)
        )


def simulate(
    pieces: Sequence[Piece], config: ZeroConfig, machine: Machine, work: Work, *, ranks: int, nodes: int
) -> StepTime:
    """The time of a step, see [Note: the simulated step].

    Args:
        pieces: in the order in which backward brings them.
        ranks, nodes: over which state is sharded, or at stage 0 gradients are reduced.
    """
    return _Simulation(pieces, config, machine, work, ranks, nodes).run()
