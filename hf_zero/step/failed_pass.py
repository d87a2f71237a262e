"""A backward ended by an exception, until the ranks continue or raise."""

from collections.abc import Sequence
from operator import attrgetter

import torch
import torch.distributed as dist

from ..buckets.bucket import ParameterSlot
from ..buckets.sharded_gradient import GradientState, ShardedGradient
from ..comm.transport import Transport
from ..hooks.guards import look_only
from ..presence.arrivals import in_words

_GRAD, _PARAMETER = attrgetter("grad"), attrgetter("parameter")

# [Note: a failed backward]
# A script may catch the exception and continue. Plain PyTorch then keeps the gradients accumulated so far in `p.grad`.
# Autograd drops the callback that would have ended the pass, and this calls `_lose_pass` before the script continues.
#
# One rank reduces the gradients that have arrived at once. If memory is short, the next forward raises unless the script has
# zeroed its gradients. Passes that only accumulate have everything in `p.grad` anyway.
#
# Several ranks raise, as under DDP, because a failed rank has sent some gradients and lacks others. At its next forward,
# backward or step, the failed rank first joins the reductions that the other ranks wait for. Then all ranks raise.
#
# All ranks continue if all have failed before the first gradient, or if the pass was in `no_sync`. In `no_sync` DDP sends
# nothing, and adds the gradients of the failed backward to those of the other micro-batches. But if the script has changed
# this rank's gradients since then, for example by zero_grad, all ranks raise, because the sum over the ranks already
# contains the gradients from before the change.


class FailedPass:
    """The error of a failed backward, and the gradients left by the failure. See [Note: a failed backward].

    Attributes:
        error: raised instead of the next forward, backward or step; None if no pass has failed.
        owed: None if the other ranks do not wait for this rank's part of the pass; otherwise whether gradients had arrived
            before the failure.
    """

    def __init__(self, slots: Sequence[ParameterSlot]):
        self._slots = slots
        self.error: RuntimeError | None = None
        self.owed: bool | None = None
        self._went_on = False
        self._left: list[tuple] = []

    def note(self, *, had_gradients: bool, goes_on: bool) -> None:
        """Notes the failure of a pass in which the other ranks wait.

        Args:
            had_gradients: whether gradients had arrived before the failure.
            goes_on: whether another backward was to add to the gradients.
        """
        self.refuse()
        self.owed = had_gradients
        self._went_on, self._left = goes_on, self._marks()

    def refuse(self, why: object = None, *, ranks: Sequence[int] = ()) -> None:
        """Makes the error. `why`: the exception that has ended the reductions. `ranks`: the ranks whose backward has failed."""
        where = f" on {in_words(ranks)}" if ranks else ""
        reason = (
            "so the ranks no longer agree"
            if why is None
            else f"and these could not be reduced: {str(why) or type(why).__name__}"
        )
        self.error = RuntimeError(
            f"hf_zero: the last backward ended with an error{where} after some gradients had arrived, {reason}. End the "
            "run and resume it from a checkpoint."
        )

    def raise_error(self) -> None:
        """Raises `RuntimeError` if no step may follow."""
        if self.error is not None:
            raise RuntimeError(*self.error.args)

    def forget(self) -> None:
        self.error, self.owed = None, None

    @property
    def goes_on(self) -> bool:
        """Whether another backward is to add to the gradients, and the script has not changed the gradients since the failure."""
        return self._went_on and self._left == self._marks()

    @property
    def is_zeroed(self) -> bool:
        """Whether the script has zeroed all gradients."""
        with look_only():
            return all(map(_is_zeroed, map(_GRAD, map(_PARAMETER, self._slots))))

    def _marks(self) -> list[tuple]:
        """Returns a list with other values after the script has replaced, zeroed or edited a gradient."""
        with look_only():
            gradients = list(map(_GRAD, map(_PARAMETER, self._slots)))
            return [
                (id(g), g.state if isinstance(g, ShardedGradient) else getattr(g, "_version", 0)) for g in gradients
            ]

    def judge(self, transport: Transport, *, had_gradients: bool | None, goes_on: bool) -> None:
        """Raises on all ranks if the backward of one has failed. Collective.

        Does not raise if all have failed before the first gradient, or if all ranks are to accumulate further. Then each rank
        keeps its gradients, as under DDP.

        Args:
            had_gradients: as in `note`; None on a rank whose backward has finished.
            goes_on: as in `note`.
        """
        said = dist.get_rank(), had_gradients, goes_on
        everyone = transport.exchange(said, "exchange after a failed backward")
        if all(theirs is False for _, theirs, _ in everyone) or all(goes_on for _, _, goes_on in everyone):
            self.error = None
        else:
            self.refuse(ranks=[rank for rank, theirs, _ in everyone if theirs is not None])
            self.raise_error()


def _is_zeroed(gradient: torch.Tensor | None) -> bool:
    if isinstance(gradient, ShardedGradient):
        return gradient.state is GradientState.ZEROED and gradient.pending is None
    return gradient is None or not gradient.any()
