"""Slots of the parameters in a bucket, and this rank's parts of the parameters."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from ..layout.buckets import RowLayout
from ..layout.intervals import Interval
from .sharded_gradient import GradientState, ShardedGradient

if TYPE_CHECKING:
    from .bucket import Bucket

# Called for all parameters in each step, so the loops run in C.
TENSOR_OF, SLOT_OF, PARAMETER_OF = attrgetter("tensor"), attrgetter("slot"), attrgetter("slot.parameter")
BUCKET_OF, FOLLOWED_VERSION = attrgetter("slot.bucket"), attrgetter("slot.version")


class BucketKey(NamedTuple):
    """Properties shared by all parameters of a bucket.

    Attributes:
        trained: whether the parameters require gradients.
        dtype: dtype in the model, before `param_dtype` is applied.
        gathered_dtype: dtype to which stage 3 casts in a gather; None without a cast.
        optimizer: index of the parameters' optimizer in the order given to the engine; -1 without one.
        group: index in this optimizer's `param_groups`; -1 without one.
        is_expert: split over more ranks than the remaining model, so fewer ranks share the state.
        is_split: split by tensor or expert parallelism with a quantized wire. If one quantization block mixed split and
            replicated elements, the ranks of a copy would round the replicated ones differently.
        stays: kept in `dtype`, regardless of `param_dtype` and `rounding`.
        is_packed: packed weights and their modules' further tensors: never cast or rounded, and sent as bytes.
    """

    trained: bool
    dtype: torch.dtype
    gathered_dtype: torch.dtype | None
    optimizer: int
    group: int
    is_expert: bool = False
    is_split: bool = False
    stays: bool = False
    is_packed: bool = False


@dataclass(eq=False)
class ParameterSlot:
    """A parameter in its bucket, and the state of its gradient in the current backward.

    Attributes:
        number: index among the slots of the bucket.
        view: the parameter's elements of the bucket's flat buffer, in the parameter's shape.
        arrived: whether a gradient is in the bucket's open buffer.
        used: whether a gradient arrived on this rank during the pass; after the pass, on any rank.
        used_elsewhere: whether a gradient arrived only on other ranks.
        continues: whether the arriving gradient adds to one reduced earlier and not zeroed since.
        version: the parameter's autograd version counter when the master last followed the parameter.
        row: this rank's part of the parameter; None without one.
    """

    name: str
    number: int
    parameter: nn.Parameter
    interval: Interval
    bucket: "Bucket" = field(repr=False)
    view: torch.Tensor = field(repr=False)
    sharded_gradient: ShardedGradient = field(repr=False)
    arrived: bool = False
    used: bool = False
    used_elsewhere: bool = False
    continues: bool = False
    version: int = 0
    row: "Row | None" = field(default=None, repr=False)

    def view_of(self, flat: torch.Tensor) -> torch.Tensor:
        """Returns this slot's part of a flat buffer with the bucket's layout, in the parameter's shape, row-major."""
        return part_of(flat, self.interval, self.parameter.shape)


def part_of(flat: torch.Tensor, interval: Interval, shape: Sequence[int]) -> torch.Tensor:
    return flat[interval.start : interval.stop].view(shape)


@dataclass(eq=False)
class Row:
    """This rank's part of one parameter.

    Attributes:
        tensor: the tensor updated by the optimizer, in the master dtype: 1-D, or in the parameter's shape if the parameter
            must not be cut. The parameter itself if one rank owns the whole parameter and keeps no separate master.
    """

    slot: ParameterSlot
    layout: RowLayout
    tensor: nn.Parameter

    @property
    def is_parameter(self) -> bool:
        return self.tensor is self.slot.parameter

    @property
    def has_gradient(self) -> bool:
        """Whether the next step has a gradient for this shard."""
        # model.zero_grad() removes the `ShardedGradient`; optimizer.zero_grad() removes the shard tensor's gradient.
        tensor, parameter = self.tensor, self.slot.parameter
        return tensor.grad is not None and (tensor is parameter or parameter.grad is not None)

    @property
    def is_zeroed(self) -> bool:
        """Whether the script has zeroed the gradient since the last step, with no backward since."""
        sharded_gradient = self.slot.sharded_gradient
        is_held = self.tensor.grad is not None or self.slot.parameter.grad is not sharded_gradient
        return not is_held and sharded_gradient.state is GradientState.ZEROED

    def of(self, shard: torch.Tensor) -> torch.Tensor:
        """Returns this shard's part of a flat tensor with the layout of the rank's shard, in the shape of `tensor`."""
        return part_of(shard, self.layout.in_shard, self.tensor.shape)
