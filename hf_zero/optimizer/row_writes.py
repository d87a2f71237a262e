"""Writes of a script to rows and parameters between steps, found and sent to all ranks."""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..buckets.bucket import Bucket
from ..buckets.memory import UnshardedMemory
from ..comm.ledger import Label
from ..comm.transport import Transport
from ..config import ZeroConfig
from ..hooks import WeakHook

# ---- Optimizers with a `train()` and an `eval()` of their own, which write to the parameters (schedule-free ones) ----

_SWITCHES = ("train", "eval")


class TrainModes:
    """Has all ranks get what an optimizer's `train()` and `eval()` write; one without such methods is left as it is.

    Defazio et al., "The Road Less Scheduled", 2024: gradients are taken at one average of the weights, and the model is
    evaluated and saved at another; `train()` and `eval()` exchange them in place.

    Args:
        is_possible: between steps, what they read and write is in memory and up to date.
        writing: (what writes) → a context around it, after which all ranks have what was written to rows.

    Raises:
        ValueError: it is not, and the optimizer has such methods.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        is_possible: bool,
        writing: Callable[[str], AbstractContextManager[None]],
    ):
        self._optimizer = optimizer
        self._names = [name for name in _SWITCHES if callable(getattr(optimizer, name, None))]
        name = type(optimizer).__name__
        if self._names and not is_possible:
            raise ValueError(
                f"hf_zero: the optimizer {name} writes to the parameters in its {self._names[0]}(), so they and its state have "
                "to be in memory between steps. Take `offload.optimizer: nvme`, `moments: 8bit` and "
                "`rounding: stochastic` out of the settings (`offload.optimizer: cpu` is possible), or use another optimizer."
            )
        for each in self._names:
            setattr(optimizer, each, _sending(f"{name}.{each}()", getattr(optimizer, each), writing))

    def remove(self) -> None:
        """Leaves the optimizer with its own methods."""
        for name in self._names:
            delattr(self._optimizer, name)


def _sending(
    name: str, switch: Callable[..., object], writing: Callable[[str], AbstractContextManager[None]]
) -> Callable[..., object]:
    @functools.wraps(switch)
    def switched(*args, **kwargs) -> object:
        with writing(name):
            return switch(*args, **kwargs)

    return switched


# ---- Detects writes to the optimizer's parameters outside of `step()`, and sends them to the other ranks ----


class RowWrites:
    """Keeps the model the same on all ranks when something else than `optimizer.step()` writes to rows.

    What a script finds in `optimizer.param_groups` is this rank's rows. Where parameters are whole, other ranks have copies of
    them, and where there are masters, so has this rank; only a step renews those. Schedule-free optimizers write to rows in
    their `train()` and `eval()`, and scripts do to clamp weights or to swap in averaged ones.

    A write is seen by autograd's count of in-place edits, one for all rows of a bucket. Writes through `.data` or numpy are not
    counted, and not seen.

    Args:
        buckets: of this rank's rows. Those whose rows are the parameters themselves, or all that there is of them, need nothing.
        transport: on which ranks agree on what was written.
        before: called on all ranks before rows are written on purpose, or sent: ends what is on its way from them, and drops
            what has been gathered of them.
        send: sends the rows of these buckets to the other ranks.
    """

    def __init__(
        self,
        buckets: Iterable[Bucket],
        transport: Transport,
        *,
        before: Callable[[], None],
        send: Callable[[Sequence[Bucket]], None],
    ):
        self._known = {bucket: bucket.row_writes for bucket in buckets if _is_copied(bucket)}
        self._transport = transport
        self._before = before
        self._send = send

    def watch(
        self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], config: ZeroConfig
    ) -> list[TrainModes | RemovableHandle]:
        """Has `model.state_dict()` refuse unsent writes, and the optimizers' `train()` and `eval()` send theirs.

        Returns:
            what ends it, each by its `remove()`.

        Raises:
            ValueError: an optimizer whose `train()` and `eval()` cannot write where its state is.
        """
        asked = WeakHook(self, RowWrites._before_state_dict)
        # Between steps, the optimizers' state is in memory and up to date.
        is_possible = not config.steps_by_bucket
        modes = [TrainModes(each, is_possible=is_possible, writing=self.writing) for each in optimizers]
        return [model.register_state_dict_pre_hook(asked), *modes]

    def follow(self, buckets: Iterable[Bucket]) -> None:
        """What was written to the rows of these buckets until now has reached all copies, or is on its way."""
        for bucket in buckets:
            if bucket in self._known:
                self._known[bucket] = bucket.row_writes

    def refuse_unsent(self, doing: str) -> None:
        """Raises RuntimeError where copies have not followed a write to this rank's rows."""
        for bucket, known in self._known.items():
            if bucket.row_writes != known:
                names = [row.slot.name for row in bucket.rows]
                more = f" and {len(names) - 1} other parameters of its bucket" if len(names) > 1 else ""
                raise RuntimeError(
                    f"hf_zero: {doing}, and what optimizer.param_groups holds of {names[0]}{more} has been written to since "
                    "the last optimizer.step(). This rank's optimizer holds its own part of the parameters, so that the other "
                    "ranks have not seen the write. Call `engine_of(model).synchronise()` on all ranks after such a write, or "
                    "write to `model.parameters()`, the same on every rank."
                )

    @contextmanager
    def writing(self, what: str) -> Iterator[None]:
        """Around something that may write to rows on any rank: what it wrote is then sent. Collective."""
        self._before()
        yield
        self.send(what)

    def send(self, what: str) -> None:
        """Sends what was written to rows, on whichever rank, since copies followed last. Collective.

        Args:
            what: has written, for the collective's name.
        """
        if not self._known:
            return
        written = torch.tensor([bucket.row_writes != known for bucket, known in self._known.items()], dtype=torch.uint8)
        agreed = self._transport.agree_max(
            written, Label(kind="agreement on written parameters", subject=what)
        ).tolist()
        buckets = [bucket for bucket, is_written in zip(self._known, agreed) if is_written]
        if buckets:
            self._before()
            self.renew_copies(buckets)

    def renew_copies(self, buckets: Sequence[Bucket]) -> None:
        """Sends the rows of these buckets to all copies of them. Collective."""
        for bucket in buckets:
            bucket.write_back()
        self._send(buckets)
        self.follow(buckets)

    def _before_state_dict(self, _module: nn.Module, *_args: object) -> None:
        self.refuse_unsent("a state dict is asked for")


def _is_copied(bucket: Bucket) -> bool:
    return not bucket.rows_are_parameters and (isinstance(bucket.memory, UnshardedMemory) or bucket.has_second_copy)
