"""Varies one setting at a time: the model's size, ranks, sequence length, accumulation, or bucket size.

    python scripts/bench/curves.py                          # all of them: an hour
    python scripts/bench/curves.py sequence bucket --quick  # two of them, few points, a small model

At each point the engines are compared as in step.py. The curves over ranks use more ranks than there may be cores, so they only
show memory and bytes. The same holds for a model so large that no two engines fit in memory together. Curves in an existing file
stay there if they are not measured again.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from compare import Comparison, compare, parameters_of
from engines import WORKLOADS
from harness import MIB, RESULTS, describe_run, read_options, write_record
from tables import tables_of

ENGINES = ("ddp", "fsdp2", "hf_zero1", "hf_zero2", "hf_zero3")
ALSO_IN_PEAKS = ("zero_optimizer", "hf_zero3_no_prefetch")
"""The peer of stage 1, and stage 3 with the least memory."""


class Curve(NamedTuple):
    """One varied setting.

    Attributes:
        varied: its name, for the heading of a table and the label of an axis.
        values, quick_values: the measured values, and the values of the quick form.
        at: makes the comparison at a value from the comparison in the middle of all curves.
    """

    varied: str
    values: tuple[Any, ...]
    quick_values: tuple[Any, ...]
    at: Callable[[Comparison, Any], Comparison]
    value_of: Callable[[Comparison, Any], Any] = lambda _comparison, value: value


def _of_model_and_ranks(comparison: Comparison, value: tuple[str, int]) -> Comparison:
    name, ranks = value
    engines = (*comparison.engines, *(each for each in ALSO_IN_PEAKS if each not in comparison.engines))
    return replace(comparison, engines=engines, workload=WORKLOADS[name], world_size=ranks, rounds=0)


def _of_bucket(comparison: Comparison, mebibytes: float) -> Comparison:
    engines = tuple(name for name in comparison.engines if not name.startswith("fsdp2"))
    return replace(comparison, engines=engines, sizes={"bucket_bytes": int(mebibytes * MIB)})


CURVES = {
    "size": Curve(
        *("million parameters", ("4m", "12m", "30m", "60m", "124m", "350m"), ("4m", "12m")),
        lambda comparison, name: replace(comparison, workload=WORKLOADS[name]),
        lambda comparison, _name: round(parameters_of(comparison.workload) / 1e6, 1),
    ),
    "ranks": Curve("ranks", (1, 2, 4, 8), (1, 2), lambda comparison, n: replace(comparison, world_size=n, rounds=0)),
    "peaks": Curve(
        *("model, ranks", (("30m", 2), ("30m", 4), ("124m", 2), ("124m", 4)), (("tiny", 2),)),
        _of_model_and_ranks,
        lambda _comparison, value: ", ".join(map(str, value)),
    ),
    "sequence": Curve(
        *("tokens a row", (64, 128, 256, 512), (64,)),
        lambda comparison, n: replace(comparison, workload=replace(comparison.workload, sequence_length=n)),
    ),
    "accumulation": Curve(
        *("micro-batches a step", (1, 2, 4, 8), (2,)), lambda comparison, n: replace(comparison, accumulation=n)
    ),
    "bucket": Curve("MiB a bucket", (1, 4, 16, 32), (1,), _of_bucket),
}


def measure(curve: Curve, middle: Comparison, values: tuple[Any, ...]) -> dict[str, Any]:
    """Returns the curve for a file: the varied setting, and the comparison at each value."""
    points = []
    for value in values:
        comparison = curve.at(middle, value)
        points.append({"value": curve.value_of(comparison, value), **compare(comparison)})
        print(f"{curve.varied} {points[-1]['value']}: {len(points[-1]['engines'])} engines", flush=True)
    return {"varied": curve.varied, "points": points}


def _kept_in(path: Path) -> dict[str, Any]:
    """Returns the curves of a file, each with the commit of its measurement."""
    if not path.exists():
        return {}
    record = json.loads(path.read_text())
    return {name: {"commit": record["commit"]} | curve for name, curve in record["curves"].items()}


def _note_of(curves: dict[str, Any]) -> dict[str, str]:
    """Returns a note about curves from separate measurements."""
    if len({curve["commit"] for curve in curves.values()}) == 1:
        return {}
    commits = ", ".join(f"{name} {curve['commit']}" for name, curve in curves.items())
    return {"note": f"Each curve is of a commit of its own: {commits}."}


def main() -> int:
    options = read_options(
        __doc__,
        quick={"model": "tiny", "starts": 1, "rounds": 1, "steps": 1},
        words=([], f"which: {', '.join(CURVES)} (default: all)"),
        model=("12m", "for all but the first", WORKLOADS),
        largest=("350m", "of the curve over sizes", WORKLOADS),
        starts=(2, "of each engine's processes, with so many rounds each"),
        rounds=2,
        steps=(2, "steps of each engine in each round"),
        engines=list(ENGINES),
        time_limit_s=(1800.0, "for each set of ranks"),
    )
    if unknown := [name for name in options.words if name not in CURVES]:
        print(f"unknown curves {', '.join(unknown)}; there are {', '.join(CURVES)}", file=sys.stderr)
        return 2
    settings = {name: getattr(options, name) for name in ("starts", "rounds", "steps", "time_limit_s")}
    middle = Comparison(engines=tuple(options.engines), workload=WORKLOADS[options.model], **settings)
    path = options.json or RESULTS / "curves.json"
    kept = _kept_in(path)
    for name in options.words or CURVES:
        curve = CURVES[name]
        values = curve.quick_values if options.quick else curve.values
        if name == "size" and not options.quick:
            values = values[: values.index(options.largest) + 1]
        run = describe_run(options)
        kept[name] = measure(curve, middle, values) | {"commit": run["commit"]}
        # Write after each curve, so an interrupted run keeps its measurements.
        write_record(path, run | {"kind": "curves", "curves": kept, **_note_of(kept)})
    print("\n\n".join(tables_of(json.loads(path.read_text())).values()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
