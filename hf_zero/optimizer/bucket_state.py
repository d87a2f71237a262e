"""The state of an optimizer, and the memory of a bucket's master and state between steps."""

import copy
import inspect
import json
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..buckets.bucket import Bucket, Row
from ..buckets.precision import Precision
from ..buckets.rows import NESTED, PackedPart, kind_of, name_of
from ..layout.blocks import block_bytes, is_in_blocks
from ..offload.files import StoredShard
from ..offload.shards import Region

# ---- Finds the state of an optimizer with a trial step of a copy before its first step ----

_SHAPE = (4, 4)
"""Shape of the trial parameter: a matrix, because some optimizers only support matrices."""
LARGE_SHAPE = (128, 96)
"""Shape of a parameter that optimizers with state in blocks treat as large: a multiple of the usual block of 256 elements, and
above the usual limit of 4096 elements for state in blocks."""
_PLAIN = (torch.Tensor, int, float, str, type(None))
"""Classes of state that can be copied and compared with the original."""
_CONTAINERS: dict[type, str] = {list: "list", tuple: "tuple", torch.Size: "size", dict: "dict"}
"""Classes whose values are saved one by one. Objects of a subclass would be restored as another class."""
_KEYS = (str, int, float, bool, type(None))
"""Classes of dict keys that JSON restores unchanged."""
_OF_THE_DEVICE = ("capturable", "fused")
"""Settings that a step on the host may refuse, and that do not change the kinds of state."""
DUE = "delayed "
"""Prefix of keys in old checkpoints: gradients, settings and step counts of steps that were delayed by one."""


Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments that a script passes to `optimizer.step`: positional and keyword arguments."""

NO_ARGUMENTS: Arguments = ((), {})

_ARGUMENTS = "_hf_zero_arguments"


def arguments_of(optimizer: torch.optim.Optimizer) -> Arguments:
    """Returns the script's arguments to the running step."""
    return optimizer.__dict__.get(_ARGUMENTS, NO_ARGUMENTS)


def note_arguments(optimizer: torch.optim.Optimizer, arguments: Arguments) -> None:
    """Passes these arguments to `own_step` of this optimizer from now on."""
    if arguments != NO_ARGUMENTS:
        optimizer.__dict__[_ARGUMENTS] = arguments
    else:
        optimizer.__dict__.pop(_ARGUMENTS, None)


def is_of_torch(optimizer: torch.optim.Optimizer) -> bool:
    """Whether class and step are torch's own. Such a step ignores parameters without a gradient."""
    kind: Any = type(optimizer)
    return all(made.__module__.startswith("torch.optim.") for made in (kind, kind.step))


def own_step(optimizer: torch.optim.Optimizer) -> None:
    """Runs the optimizer's arithmetic without its step hooks, with the noted arguments."""
    # torch wraps the step of an optimizer class in the calls of its hooks when the first object of the class is made. If the
    # step of a class calls its parent's step, a second wrapper runs. So remove all hooks for the call.
    step: Any = type(optimizer).step
    inner = step.__wrapped__ if getattr(step, "hooked", False) else step
    hooks = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    try:
        args, kwargs = arguments_of(optimizer)
        inner(optimizer, *args, **kwargs)
    finally:
        optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = hooks


def enter_training(optimizer: torch.optim.Optimizer) -> None:
    """Calls `train()` of schedule-free optimizers, which refuse to step without this call."""
    train = getattr(optimizer, "train", None)
    if callable(train):
        train()


def double_of(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], state: Mapping[torch.Tensor, dict[str, Any]]
) -> torch.optim.Optimizer:
    """Makes an optimizer like this one with its own group and state. Its step does not change this optimizer.

    Its methods are those of the class, without replacements by a scheduler or an engine.
    """
    kind = type(optimizer)
    # Skip `__init__`, whose arguments are unknown.
    double = object.__new__(kind)
    # Copy the attributes, because `copy.copy` would leave out attributes other than the groups of some classes.
    attributes = optimizer.__dict__.items()
    double.__dict__.update({name: value for name, value in attributes if not callable(getattr(kind, name, None))})
    double.param_groups, double.state = [group], defaultdict(dict, state)
    return double


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Copies an optimizer group without its parameters."""
    # Copy deeply, because the step of a double may write to a tensor or list in the settings.
    return {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}


def group_with(group: Mapping[str, Any], wanted: Callable[[torch.Tensor], bool]) -> dict[str, Any]:
    """Copies an optimizer group with some of its parameters, and with their names if the group has names."""
    chosen = [index for index, tensor in enumerate(group["params"]) if wanted(tensor)]
    parallel = [name for name in ("params", "param_names") if name in group]
    return {**group, **{name: [group[name][index] for index in chosen] for name in parallel}}


class CollectivesRefused(TorchDispatchMode):
    """Raises RuntimeError at each collective of torch.distributed in a trial, because other ranks may not take part.

    Attributes:
        called: name of the last refused collective; None without one.
    """

    called: str | None = None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        library, name, *_ = str(func).split(".")
        if library in ("c10d", "_c10d_functional"):
            self.called = name.rstrip("_")
            raise RuntimeError(f"{self.called} in a trial step")
        return func(*args, **(kwargs or {}))


def without_collectives() -> AbstractContextManager[CollectivesRefused | None]:
    """Opens a context without collectives. Yields None without a process group, for speed, because then there are none."""
    is_possible = torch.distributed.is_available() and torch.distributed.is_initialized()
    return CollectivesRefused() if is_possible else nullcontext()


@dataclass(frozen=True)
class Trial:
    """The findings of one trial step of an optimizer.

    Attributes:
        kinds: (name, dtype) of each state tensor with one value per element.
        names: names of all state of the parameter.
        has_factors: whether some state tensors have other shapes than the parameter, or are in lists, tuples or dicts.
        unsaved: state unfit for a checkpoint, in words; None without any.
    """

    kinds: tuple[tuple[str, torch.dtype], ...]
    names: frozenset[str]
    has_factors: bool
    unsaved: str | None


def try_step(
    optimizer: torch.optim.Optimizer,
    settings: Mapping[str, Any],
    dtype: torch.dtype,
    shape: tuple[int, int] = _SHAPE,
) -> Trial | None:
    """Steps a matrix of `dtype` once, in a group with these settings, with a double of the optimizer or a new one.

    Returns None if neither can step.
    """
    parameter = nn.Parameter(torch.zeros(shape, dtype=dtype))
    parameter.grad = torch.ones_like(parameter)
    group = settings_of(settings) | {"params": [parameter]}
    # These are the names of the settings' own parameters.
    group.pop("param_names", None)
    trial = double_of(optimizer, group, {})
    try:
        with torch.random.fork_rng(devices=[]):
            enter_training(trial)
            with without_collectives():
                own_step(trial)
    except Exception:
        # The class cannot step without its constructor, so this trial shows nothing. The caller decides how to proceed.
        return _try_new(optimizer, settings_of(settings), dtype)
    return _trial_of(trial, parameter)


def _trial_of(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> Trial:
    """Collects the findings after a step."""
    state, name = optimizer.state[parameter], type(optimizer).__name__
    tensors = {kind: value for kind, value in state.items() if torch.is_tensor(value)}
    lost = [name_of(kind) for kind, value in flat_state(state).items() if not isinstance(value, _PLAIN)]
    unsaved = (
        f"{name} keeps {lost[0]!r}, which is no tensor or number, and no list, tuple or dict of these" if lost else None
    )
    loose = [key for key in optimizer.state if not torch.is_tensor(key)]
    if loose:
        unsaved = f"{name} keeps state of no parameter ({loose[0]!r})"
    return Trial(
        kinds=tuple((kind, value.dtype) for kind, value in tensors.items() if value.shape == parameter.shape),
        names=frozenset(kind for kind, value in state.items() if value is not None),
        has_factors=any(type(value) in _CONTAINERS for value in state.values())
        or any(value.numel() > 1 and value.shape != parameter.shape for value in tensors.values()),
        unsaved=unsaved,
    )


# ---- State in lists, tuples and dicts, as flat values with separate names ----


def _is_saved(value: Any) -> bool:
    kind = type(value)
    if kind is dict:
        return all(type(key) in _KEYS for key in value) and all(map(_is_saved, value.values()))
    return all(map(_is_saved, value)) if kind in _CONTAINERS else isinstance(value, _PLAIN)


def flat_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a parameter's state by kind, with the values of lists, tuples and dicts one by one.

    `GG = [a, [b]]` becomes `GG.0` = a and `GG.1.0` = b; `nested.GG` and `nested.GG.1` describe the lists. Containers of other
    objects stay whole, and all containers stay whole if two values would get the same name.
    """
    flat: dict[str, Any] = {}
    has_clash = False

    def put(name: str, value: Any) -> None:
        nonlocal has_clash
        kind = NESTED + name if _is_container(value) else kind_of(name)
        has_clash |= kind in flat
        if not _is_container(value):
            flat[kind] = value
            return
        keys = list(value) if type(value) is dict else len(value)
        flat[kind] = json.dumps([_CONTAINERS[type(value)], keys])
        for number, each in enumerate(value.values() if type(value) is dict else value):
            put(f"{name}.{number}", each)

    for name, value in state.items():
        put(name, value)
    return {kind_of(name): value for name, value in state.items()} if has_clash else flat


def _is_container(value: Any) -> bool:
    # Other containers stay unchanged, and are refused by a save.
    return type(value) in _CONTAINERS and _is_saved(value)


def nested_state(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Restores the state from the result of `flat_state`.

    Raises:
        ValueError: a value of a list, tuple or dict is missing, or its description is invalid.
    """
    left = dict(flat)

    def build(name: str) -> Any:
        description = left.pop(NESTED + name, None)
        if description is None:
            return left.pop(kind_of(name))
        container, keys = json.loads(description)
        count = keys if isinstance(keys, int) else len(keys)
        # Build one value after the other, so a damaged count ends at the first missing value.
        values = [build(f"{name}.{number}") for number in range(count)]
        if container == "dict":
            return dict(zip(keys, values, strict=True))
        return next(kind for kind, word in _CONTAINERS.items() if word == container)(values)

    state = {}
    try:
        # Build outer containers first: their names are shorter, and building them consumes the inner ones.
        for kind in sorted((kind for kind in flat if kind.startswith(NESTED)), key=len):
            if kind in left:
                name = kind.removeprefix(NESTED)
                state[name] = build(name)
    except (ValueError, TypeError, KeyError, StopIteration, RecursionError) as error:
        raise ValueError(
            f"hf_zero: the optimizer state in lists, tuples or dicts is damaged ({type(error).__name__}: {error}). Resume from "
            "another checkpoint."
        ) from error
    return {name_of(kind): value for kind, value in left.items()} | state


def with_each(state: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """Returns the state with each value changed, also inside lists, tuples and dicts."""
    return nested_state(
        {kind: value if kind.startswith(NESTED) else change(value) for kind, value in flat_state(state).items()}
    )


def state_kinds(
    optimizer: torch.optim.Optimizer, settings: Mapping[str, Any], dtype: torch.dtype
) -> tuple[tuple[str, torch.dtype], ...] | None:
    """Returns (name, dtype) of each state tensor with one value per element, for rows of `dtype` in such a group.

    Returns None if no trial step is possible.
    """
    trial = try_step(optimizer, settings, dtype)
    return None if trial is None else trial.kinds


def kinds_by_size(optimizer: torch.optim.Optimizer, settings: Mapping[str, Any], dtype: torch.dtype) -> bool:
    """Whether a large parameter has other kinds of state than a small one, for example if only large ones have blocks."""
    if is_of_torch(optimizer):
        return False
    small, large = (try_step(optimizer, settings, dtype, shape) for shape in (_SHAPE, LARGE_SHAPE))
    return small is not None and large is not None and (small.kinds, small.names) != (large.kinds, large.names)


def state_itemsizes(
    optimizer: torch.optim.Optimizer, settings: Mapping[str, Any], dtype: torch.dtype
) -> tuple[int, ...] | None:
    """Returns bytes per element of each kind of state, for parameters of `dtype` in a group with these settings.

    Returns None if no trial step is possible, or if state does not have one value per element (Adafactor's rows and columns).
    """
    trial = _try_on_host(optimizer, settings, dtype)
    return None if trial is None or trial.has_factors else tuple(dtype.itemsize for _, dtype in trial.kinds)


def with_dimensions(
    state: Mapping[str, Any], row: Row, optimizer: torch.optim.Optimizer, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Reshapes the state of a parameter without dimensions, such as a temperature, to a row with one dimension.

    The moments of such a parameter look like scalars. A trial step on a matrix, in a group with these settings, distinguishes
    the two.
    """
    held = dict(state)
    scalars = {name: value for name, value in state.items() if torch.is_tensor(value) and not value.dim()}
    if row.slot.parameter.dim() or not row.tensor.dim() or not scalars:
        return held
    trial = _try_on_host(optimizer, settings, row.tensor.dtype)
    elementwise = {name for name, _ in trial.kinds} if trial else set()
    held.update(
        (name, value.view(row.tensor.shape))
        for name, value in scalars.items()
        if name in elementwise or name.startswith(DUE)
    )
    return held


def state_names(optimizer: torch.optim.Optimizer, settings: Mapping[str, Any]) -> frozenset[str]:
    """Returns the names of state after a step of a matrix; none if no trial step is possible."""
    trial = _try_on_host(optimizer, settings, torch.float32)
    return frozenset() if trial is None else trial.names


def unsaved_state(optimizer: torch.optim.Optimizer) -> str | None:
    """Names state of a matrix unfit for a checkpoint; None without any, or if no trial step is possible."""
    trials = (_try_on_host(optimizer, group, torch.float32) for group in optimizer.param_groups)
    return next((trial.unsaved for trial in trials if trial is not None and trial.unsaved is not None), None)


def _try_on_host(optimizer: torch.optim.Optimizer, settings: Mapping[str, Any], dtype: torch.dtype) -> Trial | None:
    """Tries an optimizer for an accelerator on the host."""
    settings = {
        name: value.item() if torch.is_tensor(value) and value.numel() == 1 else value
        for name, value in settings_of(settings).items()
    } | {name: False for name in _OF_THE_DEVICE if name in settings}
    return try_step(optimizer, settings, dtype)


def _try_new(optimizer: torch.optim.Optimizer, settings: Mapping[str, Any], dtype: torch.dtype) -> Trial | None:
    """Tries a new optimizer of the class, for classes of torch that create their state in the constructor.

    A double is not constructed, so a double of torch 2.11's Adagrad has no state for a step.
    """
    kind: Any = type(optimizer)
    if not is_of_torch(optimizer):
        return None
    # A group has more entries than the constructor has arguments, such as a scheduler's `initial_lr`.
    asked = {name: settings[name] for name in inspect.signature(kind).parameters if name in settings}
    parameter = nn.Parameter(torch.zeros(_SHAPE, dtype=dtype))
    parameter.grad = torch.ones_like(parameter)
    try:
        new = kind([parameter], **asked)
        own_step(new)
    except Exception:
        # The class needs another kind of parameter or gradient than a small dense matrix, so nothing is known beforehand.
        return None
    return _trial_of(new, parameter)


def tier_bytes_needed(
    owner: Mapping[nn.Parameter, tuple[int, int]],
    optimizers: Sequence[torch.optim.Optimizer],
    precision_of: Callable[[nn.Parameter], Precision],
    shards_of: Callable[[nn.Parameter], int],
    *,
    with_gradients: bool,
    in_blocks: bool,
) -> int:
    """Counts bytes of masters and optimizer state of a rank's part, and with `with_gradients` of gradients as well.

    State that cannot be known beforehand is not counted.

    Args:
        owner: (optimizer, group) of each trained parameter.
        shards_of: number of ranks that share a parameter's state.
        in_blocks: whether large parameters have their state in 8-bit blocks.
    """
    kinds: dict[tuple, list[int]] = {}
    # Bytes by the number of ranks sharing them.
    total: dict[int, int] = {}
    for parameter, (index, group) in owner.items():
        precision, shards = precision_of(parameter), shards_of(parameter)
        key = (index, group, precision.master)
        # Run one trial step per group and dtype, because a model may have thousands of parameters.
        if key not in kinds:
            optimizer = optimizers[index] if index >= 0 else None
            found = state_kinds(optimizer, optimizer.param_groups[group], precision.master) if optimizer else ()
            kinds[key] = [dtype.itemsize for _, dtype in found or ()]
        master = precision.master.itemsize if precision.has_master else 0
        gradient = precision.master.itemsize if with_gradients else 0
        numel = parameter.numel()
        packed = in_blocks and is_in_blocks(numel)
        state = len(kinds[key]) * block_bytes(numel) if packed else numel * sum(kinds[key])
        total[shards] = total.get(shards, 0) + state + numel * (master + gradient)
    return sum(nbytes // shards for shards, nbytes in total.items())


# ---- Counts for reports: steps by kernels ----


@dataclass(frozen=True, kw_only=True)
class KernelReport:
    """Counts buckets with steps by kernels.

    Attributes:
        hindrances: the reasons why optimizers step the other buckets themselves, each once.
    """

    buckets: int
    all_buckets: int
    hindrances: tuple[str, ...]


# ---- One bucket's master and optimizer state: fetched for a step, and stored afterwards ----

_HOST = torch.device("cpu")

States = Mapping[Row, dict[str, Any]]
"""The state of some of a bucket's rows by name: entries of `optimizer.state`, or a copy."""

Regions = Mapping[str, torch.Tensor]
"""A file's contents by name: flat tensors in a buffer. Empty for a bucket without a file."""


class Placeholders:
    """Represent state that is stored elsewhere in `optimizer.state`.

    A placeholder is a tensor of any shape without memory, which reads as NaN, or as 0 if the dtype has no NaN.
    """

    def __init__(self):
        self._absent: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}

    def of(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device = _HOST) -> torch.Tensor:
        key = (dtype, device)
        # Use one scalar per dtype and device, because `has` recognizes a placeholder by its address. A second scalar would look
        # like values, and its NaN would be stored as state.
        if key not in self._absent:
            self._absent[key] = torch.full(
                (), float("nan") if dtype.is_floating_point else 0, dtype=dtype, device=device
            )
        return self._absent[key].expand(shape)

    def has(self, value: Any) -> bool:
        absent = self._absent.get((value.dtype, value.device)) if torch.is_tensor(value) else None
        return absent is not None and value.data_ptr() == absent.data_ptr()


def is_elementwise(value: Any, row: Row) -> TypeGuard[torch.Tensor]:
    """Whether a value is state with one value per element of the row."""
    return torch.is_tensor(value) and value.dim() > 0 and value.shape == row.tensor.shape


class MasterStorage:
    """Stores a bucket's master between steps. In this class, it stays in memory: the bucket's, or the parameters' own.

    Attributes:
        is_away: whether the master is only in memory during a step.
    """

    is_away = False

    def __init__(self, bucket: Bucket):
        self._bucket = bucket

    def move_in(self) -> None:
        """Stores the master of a newly built bucket."""

    def fetch(self, regions: Regions) -> None:
        """Fetches the master, and copies a script's edits into the master."""

    def store(self) -> None:
        """Writes the parameters from the master after a step, and stores the master.

        If the master stays in memory, the parameters are written after the whole step. Stepped rows still have their gradients.
        """

    def fetched_master(self) -> AbstractContextManager[None]:
        """Opens a context in which the master may be read and written."""
        return nullcontext()

    @torch.no_grad()
    def put(self, row: Row, values: torch.Tensor) -> None:
        row.tensor.copy_(values.view(row.tensor.shape))

    def view(self, row: Row, tensor: torch.Tensor) -> torch.Tensor | PackedPart:
        """Returns a row's live master without a copy. `tensor`: the row's tensor."""
        return tensor

    @property
    def region(self) -> Region | None:
        """Returns the master's region in a file if its dtype is the parameters' own; None otherwise."""
        return None


class StateStorage:
    """Stores a bucket's optimizer state between steps. In this class, it stays in `optimizer.state`, as the optimizer made it.

    State stored elsewhere has placeholders in `optimizer.state`. Other tensors there (just loaded by the script, or made by the
    optimizer) are the state itself, and are stored after the bucket's next step.

    Attributes:
        is_away: whether the state is only in memory, or only in full precision, during a step.
        lent_bytes: memory of the state during a step, without a buffer for a file's contents.
    """

    is_away = False
    lent_bytes = 0

    def lend(self, states: States, regions: Regions) -> None:
        """Replaces placeholders in `states` by values."""

    def store(self, states: States, regions: Regions) -> None:
        """Stores the values of `states`, and replaces them by placeholders."""

    def values(self, row: Row, name: str, value: Any) -> Any:
        """Returns a row's `name` of `optimizer.state` with its values, possibly as a copy."""
        return value

    def view(self, row: Row, kind: str, tensor: torch.Tensor) -> torch.Tensor | PackedPart:
        """Returns a row's live state without a copy. `tensor`: the entry in `optimizer.state`."""
        return tensor

    def put(self, row: Row, state: dict[str, Any]) -> dict[str, Any]:
        """Stores a row's loaded state; returns the entry for `optimizer.state`."""
        return state

    def nbytes(self, tensors: Sequence[torch.Tensor]) -> int:
        """Returns the bytes of the state. `tensors`: its entries in `optimizer.state`."""
        return sum(tensor.nbytes for tensor in tensors)

    def close(self) -> None:
        """Frees the memory."""


class BucketState:
    """One bucket's master and optimizer state.

    Args:
        optimizer: steps the bucket; None without one.
        shard: the file of master or state; None if both are in memory.
    """

    def __init__(
        self,
        bucket: Bucket,
        optimizer: torch.optim.Optimizer | None,
        master: MasterStorage,
        state: StateStorage,
        shard: StoredShard | None = None,
    ):
        self.bucket = bucket
        self.optimizer = optimizer
        self.master = master
        self.state = state
        self.shard = shard

    @property
    def is_away(self) -> bool:
        """Whether some values are not in memory between steps."""
        return self.master.is_away or self.state.is_away

    def registered(self) -> States:
        """Returns the entries of the bucket's rows in `optimizer.state`."""
        if self.optimizer is None:
            return {}
        # Check for existence first: reading `optimizer.state` creates an entry, and an empty entry would look like a step.
        register = self.optimizer.state
        return {row: register[row.tensor] for row in self.bucket.rows if row.tensor in register}

    def lend(self, buffer: torch.Tensor | None) -> None:
        """Fetches everything for a step. `buffer`: contains the file's contents."""
        regions = self.regions_in(buffer)
        self.state.lend(self.registered(), regions)
        self.master.fetch(regions)

    def store(self, buffer: torch.Tensor | None) -> None:
        """Stores everything after a step. `buffer` then contains the new contents of the file."""
        self.master.store()
        self.state.store(self.registered(), self.regions_in(buffer))

    def regions_in(self, buffer: torch.Tensor | None) -> Regions:
        """Returns views of a buffer with the file's contents."""
        return {} if self.shard is None or buffer is None else self.shard.views(buffer)
