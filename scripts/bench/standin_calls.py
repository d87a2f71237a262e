"""Counts a training step's requests to the device beyond the model's: launches, copies, collectives, events, allocations.

    python scripts/bench/standin_calls.py                     # stages 0 to 3 on two ranks: a minute, and once one for a compiler
    python scripts/bench/standin_calls.py --stages 2 --bucket-bytes 40000
    python scripts/bench/standin_calls.py --capture           # what a CUDA graph of a step would need, and what prevents one

No accelerator is needed: the device is the tests' stand-in, an accelerator to torch, which traces all requests. A C++ compiler
and ninja are needed. A small GPT-2 is clipped and stepped by torch's own optimizer, since Triton does not support the device. The
trace shows one launch per operator, regardless of the kernels a GPU would run for it.

Each entry is named by the innermost functions of the package that requested it. Requests outside of the package's functions
belong to the model, the optimizer or autograd, and are summed up in one line for comparison. Counts are exact on a busy machine.

With `--capture`, two successive steps of a `capturable` AdamW are compared, operation by operation and address by address. The
stand-in keeps freed memory for later requests, as torch's allocator of CUDA memory does. Stage 3 keeps its parameters gathered.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from harness import ROOT, describe_run, keep, on_ranks, print_table, read_options
from tables import show_and_keep

import hf_zero

if str(ROOT / "tests" / "support") not in sys.path:
    sys.path.insert(0, str(ROOT / "tests" / "support"))

WARMUP_STEPS = 6
"""Steps before each step repeats the last one: edits are searched for in the first four, and buckets learned in two more."""
FRAMES = 2
"""Number of functions of the package in an entry's name."""
KINDS = {
    "launch": "launches",
    "copy": "copies",
    "collective": "collectives",
    "event": "events",
    "allocation": "allocations",
}
"""The kinds, and their plurals."""
SCRIPT = "(model, optimizer, autograd)"


class Asked(NamedTuple):
    """A request to the device: its kind, one of `KINDS`; the requesting functions, the innermost first; and torch's operator."""

    kind: str
    where: str
    name: str


def kind_of(entry: tuple[Any, ...]) -> str | None:
    """Returns the kind of a trace entry; None for entries without a driver call on the host, such as freed memory."""
    _thread, kind, actor, _id, _accesses, name, _where = entry
    if kind == "do" and actor.startswith("stream"):
        return "copy" if name == "copy" else "launch"
    if kind == "do" and actor.startswith("communicator"):
        return "collective"
    return {"give": "event", "allocate": "allocation"}.get(kind) if actor.startswith("stream") else None


def where_of(entry: tuple[Any, ...]) -> str:
    """Names the innermost functions of the package, without line numbers, so unrelated edits of a file do not change the name."""
    # An entry's stack looks like "engine/norm.py:81 _norm < engine/norm.py:60 measure".
    frames = [frame.split() for frame in entry[6].split(" < ")] if entry[6] else []
    return " < ".join(f"{place.partition(':')[0]} {function}" for place, function in frames[:FRAMES]) or SCRIPT


def counted(entries: list[tuple[Any, ...]]) -> Counter[Asked]:
    """Counts the entries of a trace."""
    return Counter(Asked(kind, where_of(entry), entry[5]) for entry in entries if (kind := kind_of(entry)) is not None)


def own(found: Counter[Asked], kind: str) -> int:
    """Counts the requests by functions of the package."""
    return sum(number for each, number in found.items() if each.kind == kind and each.where != SCRIPT)


def traced(compiled: ModuleType, step: Any) -> list[tuple[Any, ...]]:
    """Returns the trace of one call of `step`."""
    compiled.start_trace(f"{Path(hf_zero.__file__).parent}/")
    try:
        step()
    finally:
        entries = compiled.end_trace()
    return entries


def traced_step(compiled: ModuleType, step: Any) -> Counter[Asked]:
    """Counts the requests to the device in one call of `step`."""
    return counted(traced(compiled, step))


# ---- two steps, compared ----


class Operation(NamedTuple):
    """An operation or a request for memory, with its addresses, and the requesting functions."""

    kind: str
    actor: str
    name: str
    addresses: tuple[Any, ...]
    where: str


def operations_of(entries: list[tuple[Any, ...]]) -> list[Operation]:
    """Lists the operations of a step."""
    return [
        Operation(kind, actor, name, tuple(accesses), where_of(entry))
        for entry in entries
        for _thread, kind, actor, _id, accesses, name, _where in [entry]
        if kind in ("do", "pin", "unpin", "join", "allocate")
    ]


def differing(first: list[tuple[Any, ...]], second: list[tuple[Any, ...]]) -> Counter[str]:
    """Counts the operations that differ between a step and the step before, by the requesting functions."""
    before, after = operations_of(first), operations_of(second)
    found = [b for a, b in zip(before, after) if a[:-1] != b[:-1]]
    found += max(before, after, key=len)[min(len(before), len(after)) :]
    return Counter(f"{each.where}: {each.name or each.kind}" for each in found)


class Replayed(NamedTuple):
    """The needs of a graph of a step.

    Attributes:
        operations: number of operations of the step, including its requests for memory.
        differing: operations of the next step that are different, or have different addresses.
        waits: number of the host's waits for the device.
        requests: for memory, by functions of the package.
        left: requests of the step whose memory it has not freed.
        allocated: requests of all functions for which the device allocated memory, because no freed memory had the size.
    """

    operations: int
    differing: Counter[str]
    waits: int
    requests: Counter[str]
    left: int
    allocated: int


def compared_steps(compiled: ModuleType, step: Any) -> Replayed:
    """Compares two successive calls of `step`."""
    waited = len(compiled.waits())
    entries = [traced(compiled, step) for _ in range(2)]
    waits = len(compiled.waits()) - waited
    first = operations_of(entries[0])
    asked = [operation for operation in first if operation.kind == "allocate"]
    freed = sum(entry[1] == "free" for entry in entries[0])
    return Replayed(
        operations=len(first),
        differing=differing(*entries),
        waits=waits // 2,
        requests=Counter(each.where for each in asked if each.where != SCRIPT),
        left=len(asked) - freed,
        allocated=sum(operation.name != "kept" for operation in asked),
    )


def count(
    rank: int, world_size: int, *, library: Path, folder: str, stages: list[int], bucket_bytes: int, captures: bool
) -> Any:
    """Counts, by stage, a step of this rank; also returns the number of buckets.

    Args:
        captures: compares two steps, for each value of `nonfinite` with which every step is made.
    """
    import standin_device
    from training import adamw_in_two_groups, fused_adamw, gpt2, gpt2_batch

    from hf_zero.engine.engine import ZeroEngine

    compiled, found = standin_device.register(library), {}
    memory = standin_device.keeping_freed(compiled) if captures else nullcontext()
    with standin_device.process_group(rank, world_size, folder), memory:
        device = torch.device(standin_device.NAME, rank)
        for stage, nonfinite in [(stage, each) for stage in stages for each in ("stop", "ignore")[: 1 + captures]]:
            torch.manual_seed(0)
            model = gpt2(layers=3).to(device)
            settings: dict[str, Any] = {"stage": stage, "bucket_bytes": bucket_bytes, "nonfinite": nonfinite}
            optimizer = fused_adamw(model)
            if captures:
                optimizer = adamw_in_two_groups(model, capturable=True)
                for group in optimizer.param_groups:
                    group["lr"] = torch.tensor(group["lr"], device=device)
                settings |= {"reshard_after_forward": False} if stage == 3 else {}
            engine = ZeroEngine(model, [optimizer], settings)
            batch = gpt2_batch(torch.Generator().manual_seed(dist.get_rank()), 2)
            batch = {name: values.to(device) for name, values in batch.items()}

            def step(model: Any = model, optimizer: Any = optimizer, engine: Any = engine, batch: Any = batch) -> None:
                model(**batch).loss.backward()
                engine.clip_grad_norm_(1.0)
                optimizer.step()
                optimizer.zero_grad()

            for _ in range(WARMUP_STEPS):
                step()
            if captures:
                found[stage, nonfinite] = compared_steps(compiled, step)
            else:
                found[stage] = (len(engine.buckets), traced_step(compiled, step))
            engine.finish_parameters()
    return found


def main() -> int:
    options = read_options(
        __doc__,
        stages=([0, 1, 2, 3], None),
        ranks=2,
        bucket_bytes=(20_480, "of parameters in a bucket"),
        capture=(False, "compares two steps"),
    )
    import standin_device

    with tempfile.TemporaryDirectory(prefix="standin-calls-") as folder:
        job = {"library": standin_device.build(), "folder": folder}
        job |= {"stages": options.stages, "bucket_bytes": options.bucket_bytes, "captures": options.capture}
        by_stage = on_ranks(count, options.ranks, limit_s=300, **job)[0]
    if options.capture:
        rows = [
            {"stage": stage, "nonfinite": nonfinite, **found._asdict()}
            for (stage, nonfinite), found in by_stage.items()
        ]
        show_and_keep("capture", options, {"kind": "capture", "rows": rows})
        return 0
    kept = {}
    for stage, (buckets, found) in by_stage.items():
        rows = [
            {"what": f"{each.where}: {each.name}" if each.name else each.where, "kind": each.kind, "number": number}
            for each, number in sorted(found.items(), key=lambda one: (list(KINDS).index(one[0].kind), -one[1]))
            if each.where != SCRIPT
        ]
        for kind in KINDS:
            theirs = sum(number for each, number in found.items() if each.kind == kind and each.where == SCRIPT)
            rows.append({"what": SCRIPT, "kind": kind, "number": theirs})
        columns = [("asked for by", "what"), ("kind", "kind"), ("a step", "number")]
        totals = ", ".join(f"{own(found, kind)} {plural}" for kind, plural in KINDS.items())
        print_table(f"stage {stage}, {buckets} buckets: {totals}", columns, rows)
        kept[f"stage {stage}"] = {
            "buckets": buckets,
            **{plural: own(found, kind) for kind, plural in KINDS.items()},
            "rows": rows,
        }
    if options.json:
        keep("standin_calls", describe_run(options), {"kind": "standin_calls", "stages": kept}, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
