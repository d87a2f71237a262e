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

# ---- Schedule-free optimizers, whose `train()` and `eval()` write to the parameters ----

_SWITCHES = ("train", "eval")


class TrainModes:
    """Sends an optimizer's writes in `train()` and `eval()` to all ranks. Optimizers without these stay untouched.

    Defazio et al., "The Road Less Scheduled", 2024: gradients are taken at one average of the weights, and the model is
    evaluated and saved at another; `train()` and `eval()` exchange them in place.

    Args:
        is_possible: parameters and state are in memory and up to date between steps.
        writing: (name of the call) → a context around it, which sends the written rows.

    Raises:
        ValueError: `is_possible` is False, and the optimizer has these methods.
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
                f"hf_zero: the optimizer {name} writes to the parameters in its {self._names[0]}(), so they and its "
                "state must stay in memory. Leave out `offload.optimizer: nvme`, `moments: 8bit` and `rounding: "
                "stochastic`, or use another optimizer."
            )
        for each in self._names:
            # On the object: other optimizers of the class may belong to no engine.
            setattr(optimizer, each, _sending(f"{name}.{each}()", getattr(optimizer, each), writing))

    def remove(self) -> None:
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
    """Sends writes to rows outside of `optimizer.step()` to all ranks.

    `optimizer.param_groups` holds this rank's rows, of which other ranks have copies, and this rank too beside a master; only a
    step renews copies. Schedule-free optimizers write to rows in `train()` and `eval()`, and scripts do, to clamp weights or to
    swap in averaged ones. Autograd's count of in-place edits shows a write, but not one through `.data` or numpy.

    Args:
        buckets: of this rank's rows. Buckets without copies are left out.
        transport: for the agreement on written buckets.
        before: called on all ranks before rows are written or sent: ends their gathers, and drops gathered values.
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
        """Makes `model.state_dict()` refuse unsent writes, and the optimizers' `train()` and `eval()` send theirs.

        Returns:
            objects whose `remove()` ends that.

        Raises:
            ValueError: an optimizer whose `train()` and `eval()` cannot write where its state is.
        """
        asked = WeakHook(self, RowWrites._before_state_dict)
        # Between steps, the optimizers' state is in memory and up to date.
        is_possible = not config.steps_by_bucket
        modes = [TrainModes(each, is_possible=is_possible, writing=self.writing) for each in optimizers]
        return [model.register_state_dict_pre_hook(asked), *modes]

    def follow(self, buckets: Iterable[Bucket]) -> None:
        """Counts writes so far as sent, for these buckets."""
        for bucket in buckets:
            if bucket in self._known:
                self._known[bucket] = bucket.row_writes

    def refuse_unsent(self, doing: str) -> None:
        """Raises RuntimeError for a write to this rank's rows that copies have not followed."""
        for bucket, known in self._known.items():
            if bucket.row_writes != known:
                names = [row.slot.name for row in bucket.rows]
                more = f" and {len(names) - 1} other parameters of its bucket" if len(names) > 1 else ""
                raise RuntimeError(
                    f"hf_zero: {doing}, and what optimizer.param_groups holds of {names[0]}{more} has been written "
                    "to since the last optimizer.step(), unseen by other ranks. Call "
                    "`engine_of(model).synchronise()` on all ranks after such a write."
                )

    @contextmanager
    def writing(self, what: str) -> Iterator[None]:
        """Sends the writes to rows that happen inside, on any rank. Collective."""
        # A gather under way reads the rows: it would send half of the write.
        self._before()
        yield
        self.send(what)

    def send(self, what: str) -> None:
        """Sends writes to rows since the last call, of any rank. Collective.

        Args:
            what: the writer's name, for the collective's label.
        """
        if not self._known:
            return
        written = torch.tensor([bucket.row_writes != known for bucket, known in self._known.items()], dtype=torch.uint8)
        # All ranks send the same buckets: a write on one rank alone must still meet a gather on the others.
        agreed = self._transport.agree_max(
            written, Label(kind="agreement on written parameters", subject=what)
        ).tolist()
        buckets = [bucket for bucket, is_written in zip(self._known, agreed) if is_written]
        if buckets:
            self._before()
            self.renew_copies(buckets)

    def renew_copies(self, buckets: Sequence[Bucket]) -> None:
        """Sends the rows of these buckets to all of their copies. Collective."""
        for bucket in buckets:
            bucket.write_back()
        self._send(buckets)
        self.follow(buckets)

    def _before_state_dict(self, _module: nn.Module, *_args: object) -> None:
        self.refuse_unsent("a state dict is asked for")


def _is_copied(bucket: Bucket) -> bool:
    # At stage 3 without a separate master, a row is the only copy of its elements.
    return not bucket.rows_are_parameters and (isinstance(bucket.memory, UnshardedMemory) or bucket.has_second_copy)
