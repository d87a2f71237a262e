"""The time of a step of a set-up: the engine's buckets and the traced work, simulated."""

from ...config import ZeroConfig
from ...plan.forecast import Activations
from ...plan.machine import Machine
from ...plan.simulate import Piece, StepTime, Work, simulate
from .layouts import Layout

_DDP_BUCKET_BYTES = 25 * 2**20


def step_time(layout: Layout, machine: Machine, activations: Activations, micro_batches: int) -> StepTime:
    """Of an optimizer step with a layout.

    Args:
        micro_batches: of a step.
    """
    groups, config = layout.groups, layout.config
    group = groups.shard if groups.shard.size > 1 else groups.replicate
    nodes = len({groups.nodes[rank] for rank in group.ranks})
    work = _work(layout, activations, micro_batches)
    return simulate(_pieces(layout), config, machine, work, ranks=group.size, nodes=nodes)


def ddp_step_time(layout: Layout, machine: Machine, activations: Activations, micro_batches: int) -> StepTime:
    """Under DistributedDataParallel: its all-reduces are stage 0's, in buckets of 25 MiB.

    Args:
        layout: of stage 0.
    """
    config = ZeroConfig(stage=0)
    pieces: list[Piece] = []
    for piece in _pieces(layout):
        parts = max(1, -(-piece.reduce_bytes // _DDP_BUCKET_BYTES))
        each = Piece(numel=piece.numel // parts, reduce_bytes=piece.reduce_bytes // parts, gather_bytes=0)
        pieces += [each] * parts
    group = layout.groups.replicate
    nodes = len({layout.groups.nodes[rank] for rank in group.ranks})
    work = _work(layout, activations, micro_batches)
    return simulate(pieces, config, machine, work, ranks=group.size, nodes=nodes)


def _pieces(layout: Layout) -> list[Piece]:
    """Buckets in the order of reduction; at stage 3 a unit's together."""
    found: dict[object, Piece] = {}
    for number, bucket in enumerate(layout.buckets):
        cost = bucket.cost
        key = (bucket.unit, bool(bucket.unit) or number) if layout.config.stage == 3 else number
        before = found.get(key, Piece(numel=0, reduce_bytes=0, gather_bytes=0))
        found[key] = Piece(
            numel=before.numel + cost.own_numel,
            reduce_bytes=before.reduce_bytes + cost.layout.numel * cost.reduce_bytes * cost.trained,
            gather_bytes=before.gather_bytes + bucket.gathered_bytes,
        )
    return list(found.values())


def _work(layout: Layout, activations: Activations, micro_batches: int) -> Work:
    offload = layout.config.offload
    stepped, in_files, reduced, parameters = 0, 0, 0, 0
    for cost in (bucket.cost for bucket in layout.buckets if bucket.cost.trained):
        numel = cost.layout.shard_numel
        state = sum(cost.state_itemsizes or ())
        stepped += numel * (cost.gradient_bytes + 2 * (cost.master_bytes + state) + cost.param_bytes * cost.has_master)
        in_files += 2 * numel * cost.in_files
        reduced += numel * cost.gradient_bytes
        parameters += numel * cost.param_bytes
    moves = offload.moves_state
    fetched = sum(b.cost.parameter_bytes for b in layout.buckets) if offload.moves_params else 0
    return Work(
        forward_flops=activations.forward_flops,
        backward_flops=activations.flops - activations.forward_flops,
        model_flops=3 * activations.forward_flops,
        micro_batches=micro_batches,
        step_bytes=0 if moves else stepped,
        host_step_bytes=stepped if moves else 0,
        moved_bytes=reduced + parameters if moves else 0,
        disk_bytes=in_files,
        fetched_bytes=fetched,
    )
