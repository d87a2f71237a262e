"""The table printed by rank 0 when an engine is built: memory, bytes, dtypes and units of the run."""

import logging
import os
import sys
from collections import Counter
from collections.abc import Container, Sequence
from typing import Any

import torch
from torch import nn

from ..buckets.bucket import Bucket
from ..buckets.gathered_memory import GatheredMemory
from ..buckets.packed import bytes_of_scales
from ..comm.groups import keeps_launch_order
from ..config import ZeroConfig
from ..device import available_host_bytes, in_units, ranks_on_this_host, rounded
from ..engine.engine import ZeroEngine
from ..engine.report_tables import IN_FILES, TrafficReport, render
from ..engine.room import anchor_numel
from ..extras import extra, is_installed
from ..forecast.fit import FORECAST_ERROR
from ..forecast.peak import AtStart, Forecast
from ..forecast.state import BucketCost, DdpState, StatePlan, plan_ddp, plan_states
from ..optimizer.bucket_state import KernelReport
from ..optimizer.own_step import is_of_torch
from ..optimizer.trial import UpdateScope
from ..optimizer.trial_step import unsaved_state


def state_plan(engine: ZeroEngine, *, accumulates: bool = False) -> StatePlan:
    """Returns the bytes of state each rank of this engine will hold. `accumulates`: a step has several micro-batches."""
    kept_whole = _frozen_bytes(engine, engine.sharded.unit_of)
    return _plan_of(engine, _all_buckets(engine), kept_whole, accumulates=accumulates)


def ddp_state(engine: ZeroEngine) -> DdpState:
    """Returns the bytes of state each rank would hold under DDP."""
    costs = _costs(engine, _all_buckets(engine))
    return plan_ddp(costs, engine.groups.world_size, _frozen_bytes(engine))


def peak_at_start(
    accelerator: Any,
    models: Sequence[nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    config: ZeroConfig,
) -> AtStart | None:
    """Forecasts a rank's peak for the table, before the engine is built; None if the table shows no peak.

    The trace takes several times as long as a step on the host. There a step's memory rarely decides about a run, so only the
    log level INFO asks for the trace. The planner is an extra: without its folder, training begins without a forecast.
    """
    shown = logging.getLogger("hf_zero").isEnabledFor
    others: Any = sys.modules.get("transformers.utils.logging")
    verbosity = logging.WARNING if others is None else others.get_verbosity()
    if not is_installed("planner") or not shown(logging.WARNING) or verbosity > logging.WARNING:
        return None
    if accelerator.device.type == "cpu" and not shown(logging.INFO) and verbosity > logging.INFO:
        return AtStart(batch="a trace on CPUs needs log level INFO")
    return extra("planner", "forecast_at_start")(accelerator, models, optimizers, config)


def _split_rows(engine: ZeroEngine) -> list[tuple[str, str]]:
    if not engine.state.is_split:
        return []
    together, in_all = engine.state.split_sizes
    copies = engine.world_groups.world_size // in_all
    of_copies = f"{copies} {'copy' if copies == 1 else 'copies'}"
    if together == in_all:
        return [("model", f"split over {in_all} ranks; {of_copies}")]
    layers = "" if together == 1 else f"split over {together} ranks, "
    return [
        (
            "model",
            f"{layers}experts over {in_all} ranks; {of_copies} of the experts, with state sharded over the copies",
        )
    ]


def announce(
    engine: ZeroEngine,
    cast_owner: str,
    rows_of_a_step: str | None = None,
    at_start: AtStart | None = None,
    *,
    accumulates: bool = False,
    sp_size: int = 1,
) -> None:
    """Prints stage, dtypes, buckets and expected bytes per rank to stderr, on rank 0 only.

    Args:
        engine: the engine.
        cast_owner: which library casts to lower precision, in words.
        rows_of_a_step: samples per step on all ranks, in words; None if unknown.
        at_start: activations and the peak; None omits them.
        accumulates: whether a step has several micro-batches.
        sp_size: number of ranks that compute a sequence together.
    """
    if engine.world_groups.rank != 0:
        return
    # From here on only rank 0 runs, so a collective call below would never return.
    plan, ddp, config = state_plan(engine, accumulates=accumulates), ddp_state(engine), engine.config
    report = engine.memory_report()
    largest = max((bucket.layout.numel * bucket.precision.param.itemsize for bucket in engine.buckets), default=0)
    accumulation = "local" if config.accumulates_locally else "sharded"
    rows = [
        ("stage", f"{config.stage}, state over {engine.groups.shard_size} of {engine.groups.world_size} ranks"),
        *_saved_rows(plan, ddp),
        *([("rows a step", rows_of_a_step)] if rows_of_a_step is not None and engine.buckets else []),
        *_split_rows(engine),
        *([("sequences", f"each over {sp_size} ranks")] if sp_size > 1 else []),
        *_quantized_rows(engine, plan),
        *_outer_rows(engine),
        *_unit_rows(engine),
        *_offload_rows(engine, report.traffic),
        *_kernel_rows(report.kernels),
        *_optimizer_rows(engine),
        # Details that are rarely a reason to change a setting.
        ("transport", f"{engine.groups.backend}, {engine.transport.name}{_hindrances(engine)}"),
        ("dtypes", _dtypes(engine)),
        ("who casts", _casts(engine, cast_owner)),
        (
            "buckets",
            f"{len(engine.buckets)}, largest {in_units(largest)}, {_padding(engine)}; accumulation {accumulation}",
        ),
    ]
    state = [*_state_rows(engine, plan, ddp, report.traffic), *_peak_rows(at_start)]
    tables = [
        render("hf_zero plan", ("what", "for each rank"), rows),
        render("hf_zero plan: bytes", ("state", "a rank holds", "DDP would hold"), state),
    ]
    print("".join(tables), file=sys.stderr, flush=True)


def _saved_rows(plan: StatePlan, ddp: DdpState) -> list[tuple[str, str]]:
    """Returns how many bytes of state a rank saves compared with DDP, if both totals are known."""
    saved = ddp.total - plan.total
    if saved <= 0 or plan.optimizer is None or ddp.optimizer is None:
        return []
    return [("saved", f"{in_units(saved)} of the {in_units(ddp.total)} of state that DDP would hold")]


def _hindrances(engine: ZeroEngine) -> str:
    """Lists the reasons why collectives overlap less than the settings request."""
    if engine.groups.backend != "nccl":
        return ""
    found = ""
    if engine.config.stage > 0 and not keeps_launch_order():
        found += "; one communicator: NCCL ran before hf_zero was imported, or NCCL_LAUNCH_ORDER_IMPLICIT is not 1"
    if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        found += "; CUDA_DEVICE_MAX_CONNECTIONS=1 makes collectives wait for kernels: unset the variable"
    return found


def _plan_of(
    engine: ZeroEngine, buckets: Sequence[Bucket], kept_whole: int = 0, *, accumulates: bool = False
) -> StatePlan:
    replicas = engine.groups.replicate.size
    return plan_states(_costs(engine, buckets), engine.config, replicas, kept_whole, accumulates=accumulates)


def _all_buckets(engine: ZeroEngine) -> list[Bucket]:
    """Returns all buckets, including stage 3's buckets of frozen parameters."""
    frozen = [bucket for unit in engine.sharded.schedule.units for bucket in unit.buckets if not bucket.trained]
    return [*engine.buckets, *frozen]


def _frozen_bytes(engine: ZeroEngine, without: Container[nn.Parameter] = ()) -> int:
    """Returns the bytes of frozen parameters, of the scales of packed ones and of buffers, each whole."""
    trained = {slot.parameter for bucket in engine.buckets for slot in bucket.slots}
    frozen = [p for p in engine.module.parameters() if p not in trained and p not in without]
    return sum(tensor.nbytes for tensor in (*frozen, *engine.module.buffers())) + bytes_of_scales(engine.module)


def _state_rows(
    engine: ZeroEngine, plan: StatePlan, ddp: DdpState, traffic: TrafficReport | None
) -> list[tuple[str, str, str]]:
    """Lists the bytes of each kind of state, here and under DDP."""
    optimizers = " + ".join(type(optimizer).__name__ for optimizer, _ in engine.state.groups()) or "none"
    in_blocks = ", 8-bit moments" if engine.config.quantizes_moments else ""
    passing = f"at most {in_units(plan.gradient_buffers)}, transient" if plan.gradient_buffers else "none"
    in_files = "" if traffic is None else f" in memory, {in_units(traffic.held_bytes)} in files"
    told_later, known = "known after the first step", "" if plan.optimizer is not None else "at least "
    ours = {
        "masters": plan.masters,
        "gradient residuals": plan.residuals,
    }
    only_ours = [(kind, in_units(held), "") for kind, held in ours.items() if held]
    frozen = [("frozen parameters and buffers", in_units(plan.frozen), in_units(ddp.frozen))] if ddp.frozen else []
    return [
        ("parameters", in_units(plan.parameters), in_units(ddp.parameters)),
        *frozen,
        ("gradients", in_units(plan.gradients), in_units(ddp.gradients)),
        ("gradient buckets", passing, in_units(ddp.gradient_buckets)),
        (
            f"optimizer state ({optimizers}{in_blocks})",
            told_later if plan.optimizer is None else in_units(plan.optimizer),
            told_later if ddp.optimizer is None else in_units(ddp.optimizer),
        ),
        *only_ours,
        ("persistent total", f"{known}{in_units(plan.total)}{in_files}", f"{known}{in_units(ddp.total)}"),
    ]


def _peak_rows(at_start: AtStart | None) -> list[tuple[str, str, str]]:
    """Lists the bytes needed by a step in addition to the state."""
    if at_start is None:
        return []
    if at_start.ours is None or at_start.ddp is None:
        return [("activations", f"unknown: {at_start.batch}", "")]
    ours, ddp = at_start.ours, at_start.ddp

    def row(words: str, kind: str) -> tuple[str, str, str]:
        return words, in_units(ours.device.get(kind, 0)), in_units(ddp.device.get(kind, 0))

    return [
        row(f"activations (first rows, {at_start.batch})", "activations"),
        *([row("logits, and the loss's tensors of their shape", "logits")] if ddp.device.get("logits") else []),
        (f"peak of a step, within {FORECAST_ERROR:.0%}", _peak(ours), _peak(ddp)),
    ]


def _peak(forecast: Forecast) -> str:
    known = f"not counting {', '.join(forecast.unknown)}: " if forecast.unknown else ""
    on_host = f" and {in_units(forecast.host_bytes)} in host memory" if forecast.host_bytes else ""
    return f"{known}{in_units(forecast.device_bytes)}{on_host}"


def _dtypes(engine: ZeroEngine) -> str:
    """Lists the dtypes of parameters, of gradients in collectives and sums, of the step, and of masters."""
    precisions = [bucket.precision for bucket in engine.buckets]
    masters = [b.precision.master if b.keeps_master or b.precision.casts else None for b in engine.buckets]
    kinds: dict[str, list] = {
        "param": [precision.param for precision in precisions],
        "reduce": [precision.reduce for precision in precisions],
        # NCCL sums 16-bit gradients in 16 bits, gloo in float32.
        "add": [precision.reduced for precision in precisions],
        "step": [precision.master for precision in precisions],
        "master": masters,
    }
    return ", ".join(
        f"{kind} {'/'.join(sorted({str(dtype).removeprefix('torch.').lower() for dtype in found})) or 'none'}"
        for kind, found in kinds.items()
    )


def _casts(engine: ZeroEngine, cast_owner: str) -> str:
    """Names the owner of the cast. Gathered parameters already have their compute dtype."""
    gathered = {str(b.precision.param).removeprefix("torch.") for b in _all_buckets(engine) if b.precision.casts}
    return "; ".join([*(f"the engine, gathered parameters to {dtype}" for dtype in sorted(gathered)), cast_owner])


def _padding(engine: ZeroEngine) -> str:
    layouts = [bucket.layout for bucket in engine.buckets]
    gaps = sum(gap.numel for layout in layouts for gap in layout.padding)
    share = gaps / max(1, sum(layout.numel for layout in layouts))
    return f"{share:.1%} padding" + (" (parameters are not cut)" if any(layout.intact for layout in layouts) else "")


_WHOLE = "whole parameters, each on one rank"

_CUTS = {
    UpdateScope.ELEMENT: "element-wise",
    UpdateScope.UNKNOWN: f"{_WHOLE}, if it reads no others",
    UpdateScope.PARAMETER: _WHOLE,
    UpdateScope.MODEL: "all parameters together",
}
"""The plan's words for each scope. An optimizer that reads all parameters is refused, except at stage 0."""


def _optimizer_rows(engine: ZeroEngine) -> list[tuple[str, str]]:
    """Describes the parameters or slices each optimizer steps on, and why."""
    named = ((type(optimizer).__name__, found) for (optimizer, _), found in zip(engine.state.groups(), engine.scopes))
    said = [f"{name}: {_CUTS[found.scope]} ({found.reason})" for name, found in named]
    # Shown at the start, so a run does not train up to its first save before it fails.
    others = [optimizer for optimizer, _ in engine.state.groups() if not is_of_torch(optimizer)]
    unsaved = [found for found in map(unsaved_state, others) if found is not None]
    rows = [("optimizer", "; ".join(dict.fromkeys(said)))] if said else []
    return rows + ([("checkpoints", f"none can be saved: {unsaved[0]}")] if unsaved else _clock_rows(engine))


def _clock_rows(engine: ZeroEngine) -> list[tuple[str, str]]:
    settings = engine.config.checkpoint
    said = [f"at least every {settings.every_minutes:g} minutes"] if settings.every_minutes else []
    if settings.budget != "none":
        said.append(f"the last one before {settings.budget} have passed")
    return [("checkpoints", "; ".join(said))] if said else []


def _kernel_rows(kernels: KernelReport | None) -> list[tuple[str, str]]:
    if kernels is None or not kernels.all_buckets:
        return []
    why = f"; not all: {'; '.join(kernels.hindrances)}" if kernels.hindrances else ""
    return [("kernels", f"step {kernels.buckets} of {kernels.all_buckets} buckets{why}")]


def _offload_rows(engine: ZeroEngine, traffic: TrafficReport | None) -> list[tuple[str, str]]:
    """Lists the state outside of the training device."""
    offload = engine.config.offload
    rows: list[tuple[str, str]] = []
    in_files = f" in files: {in_units(traffic.held_bytes)} a rank in {traffic.folder}" if traffic else ""
    if offload.moves_params:
        plan = _plan_of(engine, _all_buckets(engine))
        where = f", with all{in_files}" if offload.params == "nvme" else f" in {engine.parameter_tier.name}"
        rows.append(("offload.params", f"{in_units(plan.parameters + plan.frozen)} a rank{where}"))
    moved = [bucket for bucket in engine.buckets if bucket.tier is engine.tier]
    if not offload.moves_state or not moved:
        return rows
    share = sum(bucket.layout.numel for bucket in moved) / sum(bucket.layout.numel for bucket in engine.buckets)
    stays = "" if share == 1 else f"; {1 - share:.0%} of the state remains on the training device"
    if traffic is not None and offload.optimizer == "nvme":
        where = "training device" if engine.tier.visits else "host"
        what = (
            f"optimizer state and separate masters{in_files}; at most {in_units(traffic.window_bytes)} of it in memory, during "
            f"the step, which runs on the {where}{_why_files_cannot_pay_off(engine, traffic.held_bytes)}"
        )
    else:
        plan = _plan_of(engine, moved)
        moved_bytes = (plan.optimizer or 0) + plan.masters
        what, where = "optimizer state and separate masters", "on the training device, a few buckets at a time"
        if engine.tier.window is None:
            moved_bytes += sum(b.layout.shard_numel * b.master.itemsize for b in moved)
            what, where = "optimizer state, masters and reduced gradients", "there"
        what = (
            f"{what} in {engine.tier.name}: {in_units(moved_bytes)} a rank, of {in_units(available_host_bytes())} free on "
            f"this host; the step runs {where}"
        )
    return [*rows, ("offload.optimizer", what + stays)]


def _why_files_cannot_pay_off(engine: ZeroEngine, held_bytes: int) -> str:
    """Returns in words that the state in files would fit in host memory; "" if it would not."""
    free, ranks = available_host_bytes(), ranks_on_this_host()
    if not 0 < held_bytes * ranks <= free:
        return ""
    most = sum(bucket.layout.shard_numel for bucket in engine.buckets) * free // (held_bytes * ranks)
    return (
        f"; files cannot pay off below {most:,} parameters a rank, because their state fits in the {in_units(free)} of free "
        f"memory on this host. In each step a rank reads and writes {in_units(2 * held_bytes)}; for all ranks of this host, "
        f"a disk of 1 GB/s takes {rounded(2 * held_bytes * ranks / 1e9, 2)} s"
    )


def _quantized_rows(engine: ZeroEngine, plan: StatePlan) -> list[tuple[str, str]]:
    comm = engine.config.comm
    if not comm.quantizes or engine.groups.shard_size == 1:
        return []
    kept = f", {in_units(plan.residuals)} of residuals" if plan.residuals else ""
    travels = f"gradients {comm.gradients}{kept}; weights {comm.weights}"
    return [("quantized", travels)]


def _outer_rows(engine: ZeroEngine) -> list[tuple[str, str]]:
    """Lists the settings of outer steps."""
    comm, outer = engine.config.comm, engine.groups.outer
    if outer is None:
        return []
    sizes = ((anchor_numel(b.layout.shard_numel, outer, comm.outer), b.master.itemsize) for b in engine.buckets)
    held = sum(numel * itemsize for numel, itemsize in sizes)
    travels = (
        f"every {comm.sync_every} steps between {outer.size} groups of {engine.groups.shard_size} ranks: not exact"
    )
    return [("outer steps", f"{travels}; {in_units(held)} in addition to the masters")]


def _unit_rows(engine: ZeroEngine) -> list[tuple[str, str]]:
    """Describes the gathers of parameters at stage 3."""
    schedule = engine.sharded.schedule
    root, *layers = schedule.units
    if engine.sharded.is_empty:
        return []
    classes = Counter(type(engine.module.get_submodule(name)).__name__ for layer in layers for name in layer.modules)
    named = ", ".join(f"{count} {name}" for name, count in classes.items()) or "no layers"
    if classes.total() > len(layers):
        named += f" in {len(layers)} units of `unit_bytes`"
    largest = max((layer.passing_bytes for layer in layers), default=0)
    ahead = min(engine.config.prefetch_units, max(len(layers) - 1, 0))
    if schedule.reshards_after_forward:
        most = root.passing_bytes + (1 + ahead) * largest
        policy = f"{ahead} ahead, freed after forward; at most {in_units(most)} gathered"
    else:
        most = sum(unit.passing_bytes for unit in schedule.units)
        policy = f"kept until the step: {in_units(most)} gathered"
    rows = [("units", f"{named} and the root"), ("gathering", policy)]
    if engine.compiled_layers:
        rows.append(("compiled", f"{engine.compiled_layers} layers, each separately, instead of the whole model"))
    return rows


def _costs(engine: ZeroEngine, buckets: Sequence[Bucket]) -> list[BucketCost]:
    # One trial for each kind of bucket, because a trial steps the optimizer and a model may have hundreds of buckets.
    tried = {key: engine.state.itemsizes(*key) for key in {_tried_with(bucket) for bucket in buckets}}
    return [_cost(engine, bucket, tried[_tried_with(bucket)]) for bucket in buckets]


def _tried_with(bucket: Bucket) -> tuple[int, int, torch.dtype]:
    """Returns the settings that determine an optimizer's bytes per element."""
    return bucket.key.optimizer, bucket.key.group, bucket.precision.master


def _cost(engine: ZeroEngine, bucket: Bucket, itemsizes: tuple[int, ...] | None) -> BucketCost:
    precision, is_sharded = bucket.precision, isinstance(bucket.memory, GatheredMemory)
    return BucketCost(
        layout=bucket.layout,
        param_bytes=precision.kept.itemsize,
        reduce_bytes=precision.reduce.itemsize,
        reduced_bytes=precision.reduced.itemsize,
        gradient_bytes=bucket.gradient_dtype.itemsize,
        master_bytes=precision.master.itemsize,
        has_master=precision.has_master,
        keeps_master=bucket.keeps_master,
        state_itemsizes=itemsizes,
        sharded=is_sharded,
        trained=bucket.trained,
        offloaded=bucket.tier.is_offloaded,
        visits=bucket.tier.visits,
        in_blocks=engine.config.quantizes_moments,
        state_in_files=bucket.tier.name == IN_FILES,
        parameters_in_files=is_sharded and engine.parameter_tier.name == IN_FILES,
    )
