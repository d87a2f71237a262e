"""When units are unsharded, prefetched and resharded.

[Note: the end of a unit's backward]
Autograd runs the nodes that are ready in the reverse of the order in which forward made them, and accumulates a parameter's
gradient before any other node. A tensor's hook runs when the node that made the tensor is about to run. So once the hook
on a unit's output runs, every node of the units that came after it in forward has run, and those units can go. No node of
ours is put around a unit's inputs to learn that: it would sum the gradients of an input that several units share (a
decoder's encoder states) in another order than plain autograd does.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch

from .backward import differentiable_tensors, has_tensors, is_in_backward
from .collectives import Gather, Wire
from .unit import Unit, UnitState, refuse_unseen_edits


class VisitOrder:
    """Which unit comes after which, as last seen; corrects itself when the graph takes another way."""

    def __init__(self):
        self._successor: dict[Unit, Unit | None] = {}
        self._last: Unit | None = None

    def begin(self) -> None:
        """Begins a pass, whose first visit has no predecessor."""
        self._last = None

    def visit(self, unit: Unit) -> None:
        if self._last is not None and self._last is not unit:
            self._successor[self._last] = unit
        self._last = unit

    def is_at(self, unit: Unit) -> bool:
        """Whether `unit` is the one visited last in this pass."""
        return unit is self._last

    def end(self) -> None:
        """The pass is over: nothing comes after the unit visited last."""
        if self._last is not None:
            self._successor[self._last] = None
        self._last = None

    def following(self, unit: Unit, count: int) -> list[Unit]:
        """Up to `count` different units expected after `unit`."""
        found: list[Unit] = []
        while len(found) < count:
            after = self._successor.get(unit)
            if after is None or after in found:
                break
            found.append(after)
            unit = after
        return found


class Unsharding:
    """Gathers each unit for its forward and its backward, the next ones ahead of time, and drops those done with.

    Which unit is gathered when depends on forwards, and on outputs that announce a backward. What a rank reads besides, which
    nothing announces in the backward, it keeps in memory until that has ended, and takes part in the unit's gathers as if it had
    been dropped: so a read by one rank alone leaves no other rank waiting later.

    Args:
        root: parameters that no layer has, whole from the model's forward to the end of its backward.
        layers: the other units.
        wire: how they are gathered.
        prefetch: units gathered ahead of the one in use.
        reshard_after_forward: False keeps what has been gathered until the optimizer's step.

    Attributes:
        reshards_after_forward: the same.
        peak_bytes: the most that gathered parameters have taken beyond the shards.
    """

    def __init__(
        self,
        root: Unit,
        layers: Sequence[Unit],
        *,
        wire: Wire,
        prefetch: int,
        reshard_after_forward: bool,
    ):
        self._root = root
        self._wire = wire
        self._kept: set[Unit] = set()
        self.units = [root, *layers]
        self._prefetch = prefetch
        self.reshards_after_forward = reshard_after_forward
        self._forward = VisitOrder()
        self._backward = VisitOrder()
        self._running: list[Unit] = []
        self._versions: dict[Unit, dict[int, int]] = {}
        self._is_backward_open = False
        self._builds_graph = False
        self._backward_follows = False
        self._keeps_all = False
        self._fetching: list[Unit] = []
        self.peak_bytes = 0

    @property
    def in_pass(self) -> bool:
        """Whether some unit's forward is running, or a backward."""
        return bool(self._running) or is_in_backward()

    # ---- what the hooks call ----

    def before_forward(self, unit: Unit, inputs: object = ()) -> None:
        """Makes `unit` whole for its forward, or for its recomputation inside a backward."""
        self._versions[unit] = {id(tensor): tensor._version for tensor in _with_bases(differentiable_tensors(inputs))}
        if is_in_backward():
            self.before_backward(unit)
            return
        if not self._running:
            self._forward.begin()
            self._backward_follows = torch.is_grad_enabled()
            if not self._backward_follows:
                # No step may ever come.
                self._refuse_unseen_edits()
        self._running.append(unit)
        self._use(unit, self._forward)

    def after_forward(self, unit: Unit, outputs: object) -> None:
        """Drops `unit` unless its backward comes next, and has its outputs announce that backward."""
        if torch.is_grad_enabled():
            self._watch(unit, outputs)
        if is_in_backward():
            return
        if unit in self._running:
            # An exception in a forward leaves out the units inside it.
            del self._running[self._running.index(unit) :]
        if not self._running:
            self._forward.end()
        if not self.reshards_after_forward:
            return
        # Of the whole pass: reentrant checkpointing runs a layer without gradients, and its backward comes nevertheless.
        backward_follows = self._backward_follows
        # Backward begins with the last layer, which stays. Those before it would lie beside the logits, where memory peaks, and
        # are gathered again while the last one's backward runs.
        may_be_last = backward_follows and not self._forward.following(unit, 1)
        if unit is self._root:
            if not backward_follows:
                self._drop_all()
        elif len(unit.modules) == 1 and not may_be_last:
            # What stays although it was not the last goes when another comes, as units of several layers do.
            self._drop([unit])

    def look_at_outputs(self, unit: Unit, outputs: object) -> None:
        """Keeps a unit until its backward if none of its outputs can announce the backward."""
        if torch.is_grad_enabled() and not has_tensors(outputs):
            self._kept.add(unit)

    def before_read(self, unit: Unit) -> None:
        """Makes `unit` whole for code outside its own forward: a submodule called by itself, a weight read by a parent.

        It stays in memory until the end of the backward, which nothing announces for such a read.
        """
        self._start(unit, self._wire.forward)
        self._finish(unit)
        if unit is not self._root:
            self._kept.add(unit)

    def before_saved_read(self, unit: Unit) -> None:
        """Makes `unit` whole for a backward node outside of any layer, until the next layer's backward."""
        self._start(unit, self._wire.backward)
        self._finish(unit)

    def before_backward(self, unit: Unit, *, builds_graph: bool = False) -> None:
        """Makes `unit` whole for its backward, and drops the layers whose backward has ended.

        Args:
            builds_graph: this backward is itself differentiated (create_graph). The nodes of the second backward read the
                parameters and nothing announces those, so all stays whole until a backward without it has ended.
        """
        is_first = not self._is_backward_open
        if is_first:
            self._is_backward_open = True
            self._builds_graph = False
            self._backward.begin()
        self._builds_graph |= builds_graph
        self._keeps_all |= builds_graph
        if unit is self._root and not (is_first or unit.is_sharded):
            # Of an output that is made early, such as an image's features, which only some ranks may have.
            return
        self._use(unit, self._backward)

    def end_backward(self) -> None:
        """A backward pass is over."""
        if self._is_backward_open:
            self._is_backward_open = False
            self._backward.end()
            self._keeps_all = self._builds_graph
        self._fetch([])
        if self.reshards_after_forward:
            self._drop_all()

    def recover(self) -> None:
        """Forgets a forward or backward that an exception has ended. Called outside of both."""
        self._running.clear()
        if self._is_backward_open:
            self.end_backward()

    # ---- what the engine calls ----

    def unshard(self, units: Iterable[Unit]) -> None:
        """Makes units whole and exact, all gathers at once."""
        units = list(units)
        for unit in units:
            if not unit.is_sharded and unit.gather is not self._wire.exact:
                # Last: everything that can run beside the wait has been started.
                self._finish(unit)
                unit.reshard(keeps=unit in self._kept)
            self._start(unit, self._wire.exact)
        for unit in units:
            self._finish(unit)
            unit.leave_to_script()

    def reshard_all(self) -> None:
        """Drops all gathered parameters, which a step is about to make stale."""
        held = [unit.name for unit in self.units if unit.holds]
        if held:
            raise RuntimeError(
                f"hf_zero: optimizer.step() inside `gathered` or `unsharded` (units {', '.join(held[:3])}): the whole copies "
                "would be out of date. Leave the context before the step."
            )
        self._keeps_all = False
        self._fetch([])
        self._drop_all()
        # Copies inside a node are of the values before the step.
        self._wire.forward.forget()
        for unit in self.units:
            unit.forget_fetch()
        self._refuse_unseen_edits()

    def forget_copies(self, unit: Unit) -> None:
        """Drops copies of a sharded unit's parameters outside of the shard, which is about to change."""
        self._wire.forward.forget()
        unit.forget_fetch()

    def release(self, units: Iterable[Unit]) -> None:
        """Drops units that were made whole for a look. Units with a running forward return to its form."""
        units = list(units)
        self._drop([unit for unit in units if unit not in self._running])
        for unit in units:
            if unit in self._running and not unit.holds and unit.gather is not self._wire.forward:
                # Exact ones may be of another dtype than the forward, or have digits that it does not.
                self._finish(unit)
                unit.reshard()
                self._start(unit, self._wire.forward)
                self._finish(unit)

    # ---- how ----

    def _use(self, unit: Unit, order: VisitOrder) -> None:
        if order.is_at(unit) and unit is not self._root and unit.state is UnitState.UNSHARDED:
            # The next layer of the same unit.
            return
        order.visit(unit)
        ahead = order.following(unit, self._prefetch)
        if self.reshards_after_forward and unit is not self._root:
            wanted = {unit, self._root, *ahead, *self._running}
            # Release before gather: else the new layer's memory comes on top of the one that is done.
            self._drop([other for other in self.units if not other.is_sharded and other not in wanted])
        gather = self._wire.forward if order is self._forward else self._wire.backward
        # This unit's gather first, the prefetches behind: the link serves them in order, and this one is waited for.
        self._start(unit, gather)
        for each in ahead:
            if self._has_room():
                self._start(each, gather)
        # What a gather takes its shard from may itself be slow: it is read while the gathers before it run.
        self._fetch(order.following(unit, self._prefetch + 1))
        self._finish(unit)

    def _fetch(self, wanted: list[Unit]) -> None:
        """Begins to fetch the shards of units that are wanted next, and gives up those that no longer are."""
        for unit in self._fetching:
            if unit.is_sharded and unit not in wanted:
                unit.forget_fetch()
        self._fetching = [unit for unit in wanted if unit.is_sharded]
        for unit in self._fetching:
            unit.start_fetch()

    def _has_room(self) -> bool:
        """Whether one more layer may be gathered ahead of its use."""
        passing = [unit for unit in self.units if not (unit.is_sharded or unit.holds or unit is self._root)]
        return len(passing) <= self._prefetch or not self.reshards_after_forward

    def _start(self, unit: Unit, gather: Gather) -> None:
        if unit.is_sharded:
            unit.start_unshard(gather)
            whole = [other for other in self.units if not other.is_sharded or other in self._kept]
            gathered = sum([other.passing_bytes for other in whole])
            self.peak_bytes = max(self.peak_bytes, gathered)

    @staticmethod
    def _finish(unit: Unit) -> None:
        if unit.state is UnitState.UNSHARDING:
            unit.finish_unshard()

    def _drop(self, units: Iterable[Unit]) -> None:
        for unit in () if self._keeps_all else units:
            if not unit.is_sharded and not unit.holds:
                self._finish(unit)
                unit.reshard(keeps=unit in self._kept)

    def _drop_all(self) -> None:
        """Drops also kept units, whose backward will not come."""
        if self._keeps_all:
            return
        kept, self._kept = self._kept, set()
        self._drop(self.units)
        for unit in kept:
            if unit.is_sharded:
                unit.let_go()

    def _refuse_unseen_edits(self) -> None:
        refuse_unseen_edits([unit.unseen for unit in self.units if unit.unseen.compared])

    def _watch(self, unit: Unit, outputs: object) -> None:
        # A tensor handed through (T5's position bias) is made elsewhere: its hook would run at another time. One that the
        # layer has written into is made here.
        versions = self._versions.pop(unit, {})

        def announce(_gradient: torch.Tensor) -> None:
            self.before_backward(unit, builds_graph=torch.is_grad_enabled())

        found = list(differentiable_tensors(outputs))
        # An in-place operation on a view takes the view's own node out of the graph, and its base's stays.
        for tensor in _with_bases(found):
            if versions.get(id(tensor)) != tensor._version:
                tensor.register_hook(announce)


def _with_bases(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    for tensor in tensors:
        yield tensor
        base = tensor._base
        if base is not None and base.requires_grad:
            yield base
