"""The form in which gradients and parameters are sent between ranks, chosen by the config."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..comm.groups import Groups
from ..comm.steps_in_order import StepsInOrder
from ..comm.transport import DataParallelGroup
from ..config import ZeroConfig
from ..extras import extra
from ..layout.blocks import BLOCK_NUMEL
from ..layout.buckets import USUAL_ALIGNMENT, Alignment
from ..queues import SideQueue, side_queue
from ..stage3.secondary_shards import BackwardGather, ForwardGather
from ..step.gathers import Gather
from ..step.reductions import HybridReduction, Reduction, ReplicatedReduction


@dataclass(frozen=True, kw_only=True)
class Wire:
    """How gradients and parameters are sent between the ranks of each bucket's group.

    Attributes:
        reduction: reduces sharded gradients.
        steps: starts the steps of reductions between several shard groups; None with one group.
        gather: gathers parameters for forward and backward.
        forward: gathers for the forward, of parameters that are dropped between forward and backward.
        backward: gathers the same parameters for the backward.
        exact: gathers parameters to read, edit or save them.
        quantizes_gradients: `reduction` sends quantized blocks.
        align: alignment of shards, so that no shard ends inside a block.
    """

    reduction: Reduction
    gather: Gather
    forward: Gather
    backward: Gather
    exact: Gather
    steps: StepsInOrder | None = None
    quantizes_gradients: bool = False
    align: Alignment = USUAL_ALIGNMENT

    def rounding_in(self, group: DataParallelGroup) -> Callable[[torch.Tensor], None] | None:
        """Returns `gather.rounding` if the ranks of the group receive parameters in quantized blocks; otherwise None."""
        # A group of one rank sends nothing, so rounding would lose precision for no benefit.
        return self.gather.rounding if group.groups.shard_size > 1 else None

    def adds_in_wider(self, group: DataParallelGroup) -> bool:
        """Whether gradients are summed over a group in the result's dtype, if wider than the gradients' dtype."""
        is_summed = group.groups.shard_size > 1
        return is_summed and (self.quantizes_gradients or group.transport.adds_in_wider)

    def held_bytes(self) -> dict[str, int]:
        """Bytes of lasting memory by kind."""
        return {"gradient residuals": self.reduction.held_bytes, "secondary shards": self.forward.held_bytes}


def choose_wire(config: ZeroConfig, groups: Groups, device: torch.device) -> Wire:
    """Returns the reductions and gathers for `config.comm`. If one rank has all the state, nothing is quantized.

    Args:
        groups: the groups of the buckets with the most ranks.
        device: the training device.
    """
    exact = Gather(is_exact=True)
    in_passes = Gather() if config.gather_dtype == "bfloat16" else exact
    if groups.shard_size == 1:
        return Wire(reduction=ReplicatedReduction(), gather=exact, forward=in_passes, backward=in_passes, exact=exact)
    order, queue = StepsInOrder(), side_queue(device)
    quantizes_weights, quantizes_gradients = (kind != "none" for kind in (config.comm.weights, config.comm.gradients))
    if quantizes_gradients:
        # In the same order as the gradients, so that on all ranks, a sample's steps between groups start at the same position.
        sample = _exact_reduction(groups, order, queue, of="a sample")
        reduction = extra("wire", "quantized_reduction")(config.comm, groups, order, sample)
    else:
        reduction = _exact_reduction(groups, order, queue)
    weights = extra("wire", "BlockFormat")() if quantizes_weights else None
    gather = exact if weights is None else extra("wire", "QuantizedGather")(weights)
    forward = backward = in_passes if weights is None else gather
    if groups.node is not None:
        keeping = ForwardGather(forward, groups.node)
        forward, backward = keeping, BackwardGather(keeping)
    align = USUAL_ALIGNMENT
    if config.comm.quantizes:
        # With several groups, shards of gradients are split again between the groups.
        parts = groups.replicate.size if quantizes_gradients else 1
        align = Alignment(shard_numel=max(align.shard_numel, BLOCK_NUMEL) * parts)
    return Wire(
        reduction=reduction,
        steps=order if groups.replicate.size > 1 else None,
        gather=gather,
        forward=forward,
        backward=backward,
        exact=exact,
        quantizes_gradients=quantizes_gradients,
        align=align,
    )


def _exact_reduction(groups: Groups, order: StepsInOrder, queue: SideQueue, **of: str) -> Reduction:
    """Returns an exact reduction, inside the shard group and, if there are several, between shard groups.

    Args:
        of: name of the summed values in the ledger, if they are not gradients.
    """
    within = Reduction(**of)
    return within if groups.replicate.size == 1 else HybridReduction(within, order, queue, **of)
