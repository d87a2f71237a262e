"""What kernels know of optimizers: which settings they have a form for, and which state is whose."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, cast

import torch

from ...buckets.bucket import Row
from ...kernels.adamw import AdamW, adamw
from ...kernels.adamw_in_blocks import adamw_in_blocks
from ...kernels.lion import Lion, lion
from ...kernels.sgd import SGD, sgd
from ...kernels.stepping import Place

Group = Mapping[str, Any]

MakeReady = Callable[[Row, str, dict[str, Any]], bool]
"""Has a row's state of a name where a kernel wants it, zero if the register, whose entry is given, has none; whether it had."""


class KernelForm(ABC):
    """One optimizer as a kernel does it: the same state under the same names.

    Args:
        optimizer: for settings that its groups do not have.

    Attributes:
        usual: settings for which the kernel has one form only, with the value that this form has.
        numbers: settings that must be numbers on the host.
    """

    usual: ClassVar[Mapping[str, Any]]
    numbers: ClassVar[Sequence[str]]

    def __init__(self, optimizer: torch.optim.Optimizer):
        self._optimizer = optimizer

    def hindrance(self, group: Group) -> str | None:
        """Why the kernel cannot step this group, in words; None if it can."""
        for name, value in self.usual.items():
            if group.get(name, value) != value:
                return f"`{name}` is {group[name]}"
        tensors = [name for name in self.numbers if _has_tensor(group[name])]
        return f"`{tensors[0]}` is a tensor" if tensors else None

    @abstractmethod
    def state_names(self, group: Group) -> Sequence[str]:
        """Kinds of state with one value an element."""

    @abstractmethod
    def begin(self, group: Group, states: Mapping[Row, dict[str, Any]], make_ready: MakeReady) -> Mapping[Row, int]:
        """Makes the rows' state ready for their next step.

        Returns:
            of each row, what `step` has to know beside the group: rows that differ in it are stepped apart.
        """

    @abstractmethod
    def step(self, group: Group, phase: int, place: Place) -> None:
        """Takes the step."""


class AdamWForm(KernelForm):
    """`torch.optim.AdamW`, and `torch.optim.Adam` without decay. The phase is the number of the step, from 1."""

    usual: ClassVar[Mapping[str, Any]] = {
        "amsgrad": False,
        "maximize": False,
        "capturable": False,
        "differentiable": False,
    }
    numbers = ("lr", "betas", "eps", "weight_decay")

    def __init__(self, optimizer: torch.optim.Optimizer):
        super().__init__(optimizer)
        # `step`, its version and its value when it was last written here.
        self._counts: dict[Row, tuple[torch.Tensor, int, int]] = {}

    def hindrance(self, group: Group) -> str | None:
        found = super().hindrance(group)
        if found is None and group["weight_decay"] != 0 and not group["decoupled_weight_decay"]:
            return "`weight_decay` is added to the gradient"
        return found

    def state_names(self, group: Group) -> Sequence[str]:
        return ("exp_avg", "exp_avg_sq")

    def begin(self, group: Group, states: Mapping[Row, dict[str, Any]], make_ready: MakeReady) -> Mapping[Row, int]:
        for row, state in states.items():
            if "step" not in state:
                # Where torch's own step has it, so that either may take the next one.
                home = row.tensor.device if group["fused"] else torch.device("cpu")
                state["step"] = torch.zeros((), dtype=torch.float32, device=home)
                self._counts[row] = (state["step"], state["step"]._version, 0)
            for name in self.state_names(group):
                make_ready(row, name, state)
        numbers = {row: self._taken(row, state["step"]) + 1 for row, state in states.items()}
        steps = [state["step"] for state in states.values()]
        torch._foreach_add_(steps, 1)
        for (row, number), step in zip(numbers.items(), steps):
            self._counts[row] = (step, step._version, number)
        return numbers

    def _taken(self, row: Row, step: torch.Tensor) -> int:
        """The value of `step`, asked of the device only where somebody else has written it: that stops its queue."""
        known, version, number = self._counts.get(row, (None, 0, 0))
        return number if known is step and version == step._version else int(step.item())

    def step(self, group: Group, phase: int, place: Place) -> None:
        self._step(adamw, group, phase, place)

    def step_in_blocks(self, group: Group, phase: int, place: Place) -> None:
        """Takes the step of moments that are in 8-bit blocks and stay so."""
        self._step(adamw_in_blocks, group, phase, place)

    def _step(self, kernel: Callable[[Place, AdamW], None], group: Group, phase: int, place: Place) -> None:
        settings = AdamW(
            lr=float(group["lr"]),
            betas=(float(group["betas"][0]), float(group["betas"][1])),
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            step=phase,
        )
        kernel(place, settings)


class SGDForm(KernelForm):
    """`torch.optim.SGD`. The phase is 1 where the step starts the momentum buffer, else 0."""

    usual: ClassVar[Mapping[str, Any]] = {"maximize": False, "differentiable": False}
    numbers = ("lr", "momentum", "dampening", "weight_decay")

    def state_names(self, group: Group) -> Sequence[str]:
        return ("momentum_buffer",) if group["momentum"] != 0 else ()

    def begin(self, group: Group, states: Mapping[Row, dict[str, Any]], make_ready: MakeReady) -> Mapping[Row, int]:
        names = self.state_names(group)
        return {row: int(not all([make_ready(row, name, state) for name in names])) for row, state in states.items()}

    def step(self, group: Group, phase: int, place: Place) -> None:
        settings = SGD(
            lr=float(group["lr"]),
            momentum=float(group["momentum"]),
            dampening=float(group["dampening"]),
            weight_decay=float(group["weight_decay"]),
            nesterov=bool(group["nesterov"]),
            first_step=bool(phase),
        )
        sgd(place, settings)


class LionForm(KernelForm):
    """`lion_pytorch.Lion` (the package lion-pytorch), which keeps no count of its steps. The phase is always 0."""

    usual: ClassVar[Mapping[str, Any]] = {}
    numbers = ("lr", "betas", "weight_decay")

    def state_names(self, group: Group) -> Sequence[str]:
        return ("exp_avg",)

    def begin(self, group: Group, states: Mapping[Row, dict[str, Any]], make_ready: MakeReady) -> Mapping[Row, int]:
        for row, state in states.items():
            make_ready(row, "exp_avg", state)
        return dict.fromkeys(states, 0)

    def step(self, group: Group, phase: int, place: Place) -> None:
        settings = Lion(
            lr=float(group["lr"]),
            betas=(float(group["betas"][0]), float(group["betas"][1])),
            weight_decay=self._weight_decay(group),
        )
        lion(place, settings)

    def _weight_decay(self, group: Group) -> float:
        """With `decoupled_weight_decay`, so much of a weight goes each step as the group says when lr is what it began as."""
        # Releases before 0.2.3 have no such option.
        is_decoupled = getattr(self._optimizer, "decoupled_wd", False)
        return float(group["weight_decay"]) / (cast(Any, self._optimizer)._init_lr if is_decoupled else 1.0)


_FORMS: dict[type[torch.optim.Optimizer], type[KernelForm]] = {
    torch.optim.AdamW: AdamWForm,
    torch.optim.Adam: AdamWForm,
    torch.optim.SGD: SGDForm,
}
_FORMS_BY_NAME: dict[str, type[KernelForm]] = {
    "lion_pytorch.foreach.Lion": LionForm,
    "lion_pytorch.lion_pytorch.Lion": LionForm,
}
"""Of packages that need not be installed."""


def form_of(optimizer: torch.optim.Optimizer) -> KernelForm | None:
    """The kernel's form of an optimizer; None where no kernel does what it does, as for a class made from one of these."""
    kind = type(optimizer)
    made = _FORMS.get(kind) or _FORMS_BY_NAME.get(f"{kind.__module__}.{kind.__qualname__}")
    return None if made is None else made(optimizer)


def form_in_blocks_of(optimizer: torch.optim.Optimizer) -> AdamWForm | None:
    """The form that steps an optimizer's moments in their 8-bit blocks; None where there is none."""
    form = form_of(optimizer)
    return form if isinstance(form, AdamWForm) else None


def _has_tensor(value: Any) -> bool:
    return any(torch.is_tensor(part) for part in (value if isinstance(value, list | tuple) else (value,)))
