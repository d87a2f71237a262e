"""Models that tensor or expert parallelism splits over ranks, trained without the engine, with a plain all-reduce."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..comm.model_copies import ModelCopies
from ..engine.units.split_model import SplitModel, is_dtensor


def is_split(model: nn.Module) -> bool:
    """Whether parameters of a model are DTensors."""
    return any(is_dtensor(parameter) for parameter in model.parameters())


class PlainCopies:
    """Averages gradients over the copies of a split model, as DistributedDataParallel does for whole ones.

    Args:
        model: with DTensors, the same on all ranks; its parameters, and those that `optimizer` has of it, are other objects
            afterwards. Collective.

    Attributes:
        place: this rank's copy, by number.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer):
        self._model = model
        split = SplitModel(model, [optimizer])
        sets = [split.ranks, split.copy_ranks]
        experts = [name for name, parameter in model.named_parameters() if parameter in split.experts]
        split.give_back()
        self._experts = {model.get_parameter(name) for name in experts}
        everyone: list[list[tuple[int, ...]]] = [[]] * dist.get_world_size()
        dist.all_gather_object(everyone, sets)
        copies, of_experts = (ModelCopies.of(theirs) for theirs in zip(*everyone))
        self.place = copies.copies.index(sets[0])
        self._size = len(copies.copies)
        self._group, self._expert_group = map(_own_group, (copies, of_experts))

    @torch.no_grad()
    def average(self) -> None:
        """Replaces the gradients by their means over the copies. One that no copy has stays None. Collective."""
        trained = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        used = torch.tensor([parameter.grad is not None for parameter in trained], dtype=torch.int32)
        used = used.to(_local(trained[0]).device)
        dist.all_reduce(used, op=dist.ReduceOp.MAX, group=self._group)
        for parameter, is_used in zip(trained, used.tolist()):
            if not is_used:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            elif is_dtensor(parameter) and is_dtensor(parameter.grad):
                # An embedding's comes back whole.
                split: Any = parameter
                parameter.grad = split.grad.redistribute(placements=split.placements)
            gradient = _local(parameter.grad)
            # An expert's gradient is the sum over the batches of all that send it their tokens.
            dist.all_reduce(gradient, group=self._expert_group if parameter in self._experts else self._group)
            gradient.div_(self._size)

    @torch.no_grad()
    def clip(self, max_norm: float) -> torch.Tensor:
        """Scales the gradients to a norm of the whole model of at most `max_norm`; returns that norm. Collective."""
        gradients = [parameter.grad for parameter in self._model.parameters() if parameter.grad is not None]
        norm = torch.stack([put_together(each).double().square().sum() for each in gradients]).sum().sqrt()
        for gradient in gradients:
            _local(gradient).mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm


class LocalValues:
    """What this rank has of a split model, to be put back: a model on a device mesh cannot be copied."""

    def __init__(self, model: nn.Module):
        self._model = model
        self._values = [_local(value).detach().clone() for value in self._held()]
        self._gradients = [parameter.grad for parameter in model.parameters()]

    @torch.no_grad()
    def put_back(self) -> None:
        """Gives the model its values again, and its gradients."""
        for value, kept in zip(self._held(), self._values, strict=True):
            _local(value).copy_(kept)
        for parameter, gradient in zip(self._model.parameters(), self._gradients, strict=True):
            parameter.grad = gradient

    def _held(self) -> list[torch.Tensor]:
        return [*self._model.parameters(), *self._model.buffers()]


def _own_group(copies: ModelCopies) -> dist.ProcessGroup | None:
    """Of the ranks that hold the same part as this one. Collective."""
    made = [(alike, dist.new_group(list(alike))) for alike in copies.alike]
    return next(group for alike, group in made if dist.get_rank() in alike)


def put_together(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a DTensor, or the tensor itself. Collective over the ranks that it is split over."""
    split: Any = tensor
    return split.full_tensor() if is_dtensor(tensor) else tensor


def _local(tensor: torch.Tensor) -> torch.Tensor:
    split: Any = tensor
    return split.to_local() if is_dtensor(tensor) else tensor
