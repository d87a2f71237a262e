"""What travels between the ranks and in which form, as the config asks for it."""

from dataclasses import dataclass

import torch

from ...comm.groups.groups import Groups
from ...comm.steps import StepsInOrder
from ...comm.transport import DataParallelGroup
from ...config import ZeroConfig
from ...device import SideQueue, side_queue
from ...kernels.quantise import CODES, BlockFormat
from ...layout.slots import USUAL_ALIGNMENT, Alignment
from .gathers import Gather, QuantisedGather
from .quantised_reductions import QuantisedReduction, choose_route
from .reductions import HybridReduction, Reduction, ReplicatedReduction
from .secondary import BackwardGather, ForwardGather


@dataclass(frozen=True, kw_only=True)
class Wire:
    """How gradients and parameters travel, each bucket's between the ranks of its group.

    Attributes:
        reduction: of gradients, where they are sharded.
        gather: of the parameters that forward and backward compute with.
        forward, backward: the same for parameters that are dropped in between.
        exact: of parameters that are looked at, edited or saved.
        weights, gradients: the blocks in which `gather` and `reduction` send; None where they send what there is.
        align: of shards, so that none ends inside a block.
    """

    reduction: Reduction
    gather: Gather
    forward: Gather
    backward: Gather
    exact: Gather
    weights: BlockFormat | None = None
    gradients: BlockFormat | None = None
    align: Alignment = USUAL_ALIGNMENT

    def weight_format(self, group: DataParallelGroup) -> BlockFormat | None:
        """The blocks that parameters come in to each rank of a group; None where they come as they are."""
        return self.weights if group.groups.shard_size > 1 else None

    def adds_in_wider(self, group: DataParallelGroup) -> bool:
        """Whether gradients are summed over a group in the dtype of the result, where that is wider than theirs."""
        is_summed = group.groups.shard_size > 1
        return is_summed and (self.gradients is not None or group.transport.adds_in_wider)

    def held_bytes(self) -> dict[str, int]:
        """Bytes of lasting memory by kind."""
        return {"gradient residuals": self.reduction.held_bytes, "secondary shards": self.forward.held_bytes}


def choose_wire(config: ZeroConfig, groups: Groups, device: torch.device) -> Wire:
    """The reductions and gathers that `config.comm` asks for. Where one rank has all the state, nothing is quantised.

    Args:
        groups: of the most ranks that a bucket is shared between.
        device: that computes.
    """
    exact = Gather(is_exact=True)
    in_passes = Gather() if config.gather_dtype == "bfloat16" else exact
    if groups.shard_size == 1:
        return Wire(reduction=ReplicatedReduction(), gather=exact, forward=in_passes, backward=in_passes, exact=exact)
    weights, gradients = (_format(config, kind) for kind in (config.comm.weights, config.comm.gradients))
    order, queue = StepsInOrder(), side_queue(device)
    if gradients is None:
        reduction = _exact_reduction(groups, order, queue)
    else:
        route = choose_route(groups, gradients, order, error_feedback=config.comm.error_feedback)
        reduction = QuantisedReduction(route, _exact_reduction(groups, order, queue, of="a sample"))
    gather = exact if weights is None else QuantisedGather(weights)
    forward = backward = in_passes if weights is None else gather
    if groups.node is not None:
        keeping = ForwardGather(forward, groups.node)
        forward, backward = keeping, BackwardGather(keeping)
    align = USUAL_ALIGNMENT
    if not weights is gradients is None:
        # Shards of gradients are cut once more between several groups.
        parts = 1 if gradients is None else groups.replicate.size
        align = Alignment(shard_numel=max(align.shard_numel, config.comm.block_numel) * parts)
    return Wire(
        reduction=reduction,
        gather=gather,
        forward=forward,
        backward=backward,
        exact=exact,
        weights=weights,
        gradients=gradients,
        align=align,
    )


def _exact_reduction(groups: Groups, order: StepsInOrder, queue: SideQueue, **of: str) -> Reduction:
    """Without loss: inside the shard group, and between several of them.

    Args:
        of: what is summed, where it is not the gradients.
    """
    within = Reduction(**of)
    return within if groups.replicate.size == 1 else HybridReduction(within, order, queue, **of)


def _format(config: ZeroConfig, kind: str) -> BlockFormat | None:
    return BlockFormat(code=CODES[kind], block_numel=config.comm.block_numel) if kind in CODES else None
