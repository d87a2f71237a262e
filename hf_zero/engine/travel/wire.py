"""What travels between the ranks and in which form, as the config asks for it."""

from dataclasses import dataclass

import torch

from ...comm.groups.groups import Groups
from ...comm.steps import StepsInOrder
from ...comm.transport import Transport
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
    """How gradients and parameters travel.

    Attributes:
        reduction: of gradients, where they are sharded.
        gather: of the parameters that forward and backward compute with.
        forward, backward: the same for parameters that are dropped in between.
        exact: of parameters that are looked at, edited or saved.
        weight_format: the blocks in which `gather` sends them; None where it sends them as they are.
        align: of shards, so that none ends inside a block.
    """

    reduction: Reduction
    gather: Gather
    forward: Gather
    backward: Gather
    exact: Gather
    weight_format: BlockFormat | None = None
    align: Alignment = USUAL_ALIGNMENT

    def held_bytes(self) -> dict[str, int]:
        """Bytes of lasting memory by kind."""
        return {"gradient residuals": self.reduction.held_bytes, "secondary shards": self.forward.held_bytes}


def choose_wire(config: ZeroConfig, groups: Groups, transport: Transport, device: torch.device) -> Wire:
    """The reductions and gathers that `config.comm` asks for. Where one rank has all the state, nothing is quantised.

    Args:
        groups, transport: of the ranks that take each step together.
        device: that computes.
    """
    exact = Gather(transport, is_exact=True)
    in_passes = Gather(transport) if config.gather_dtype == "bfloat16" else exact
    if groups.shard_size == 1:
        return Wire(
            reduction=ReplicatedReduction(transport), gather=exact, forward=in_passes, backward=in_passes, exact=exact
        )
    weights, gradients = (_format(config, kind) for kind in (config.comm.weights, config.comm.gradients))
    order, queue = StepsInOrder(), side_queue(device)
    if gradients is None:
        reduction = _exact_reduction(transport, groups, order, queue)
    else:
        route = choose_route(transport, groups, gradients, order, error_feedback=config.comm.error_feedback)
        reduction = QuantisedReduction(
            transport, route, _exact_reduction(transport, groups, order, queue, of="a sample")
        )
    gather = exact if weights is None else QuantisedGather(transport, groups, weights)
    forward = backward = in_passes if weights is None else gather
    if groups.node is not None:
        keeping = ForwardGather(forward, transport, groups.node)
        forward, backward = keeping, BackwardGather(keeping, transport)
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
        weight_format=weights,
        align=align,
    )


def _exact_reduction(
    transport: Transport, groups: Groups, order: StepsInOrder, queue: SideQueue, **of: str
) -> Reduction:
    """Without loss: inside the shard group, and between several of them.

    Args:
        of: what is summed, where it is not the gradients.
    """
    within = Reduction(transport, **of)
    return within if groups.replicate.size == 1 else HybridReduction(transport, within, order, queue, **of)


def _format(config: ZeroConfig, kind: str) -> BlockFormat | None:
    return BlockFormat(code=CODES[kind], block_numel=config.comm.block_numel) if kind in CODES else None
