"""The plan that rank 0 prints when an engine is built."""

import sys

from ..engine.engine import ZeroEngine
from ..engine.reports import mib, render
from ..plan.states import BucketCost, StatePlan, plan_states, state_values


def state_plan(engine: ZeroEngine) -> StatePlan:
    """The bytes of state that each rank of this engine will hold."""
    return plan_states([_cost(engine, bucket) for bucket in engine.buckets], engine.config)


def announce(engine: ZeroEngine, cast_owner: str) -> None:
    """Prints stage, dtypes, buckets and expected bytes a rank to stderr, on rank 0 only.

    Args:
        cast_owner: who casts to a lower precision, in words.
    """
    if engine.groups.rank != 0:
        return
    plan = state_plan(engine)
    names = {"param": set(), "master": set(), "reduce": set()}
    for bucket in engine.buckets:
        for kind, found in names.items():
            found.add(str(getattr(bucket.precision, kind)).removeprefix("torch."))
    dtypes = ", ".join(f"{kind} {'/'.join(sorted(found))}" for kind, found in names.items())
    largest = max(bucket.flat.nbytes for bucket in engine.buckets)
    optimizers = " + ".join(type(optimizer).__name__ for optimizer, _ in engine.named_groups()) or "none"
    config = engine.config
    accumulation = "local" if config.accumulates_locally else "sharded"
    rows = [
        ("stage", f"{config.stage}, state over {engine.groups.shard_size} of {engine.groups.world_size} ranks"),
        ("transport", f"{engine.groups.backend}, {type(engine.transport).__name__}"),
        ("dtypes", dtypes),
        ("who casts", cast_owner),
        ("buckets", f"{len(engine.buckets)}, largest {mib(largest)} MiB; accumulation {accumulation}"),
        ("parameters", f"{mib(plan.parameters)} MiB"),
        ("fp32 masters", f"{mib(plan.masters)} MiB"),
        ("gradients", f"{mib(plan.gradients)} MiB, and at most {mib(plan.gradient_buffers)} MiB in passing"),
        (
            f"optimizer state ({optimizers})",
            "told after the first step" if plan.optimizer is None else f"{mib(plan.optimizer)} MiB",
        ),
        ("bytes a rank", f"{mib(plan.total)} MiB of state"),
    ]
    print(render("hf_zero plan", ("what", "for each rank"), rows), file=sys.stderr, flush=True)


def _cost(engine: ZeroEngine, bucket) -> BucketCost:
    index, group = bucket.layout.key[2:]
    if index < 0:
        values = 0
    else:
        optimizer = engine.named_groups()[index][0]
        values = state_values(type(optimizer).__name__, optimizer.param_groups[group])
    precision = bucket.precision
    return BucketCost(
        layout=bucket.layout,
        param_bytes=precision.param.itemsize,
        reduce_bytes=precision.reduce.itemsize,
        master_bytes=precision.master.itemsize,
        has_master=precision.has_master,
        state_bytes=None if values is None else values * precision.master.itemsize,
    )
