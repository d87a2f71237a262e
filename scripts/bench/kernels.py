"""What the kernels reach of a copy's bandwidth, beside torch's own optimizers, in one command.

    python scripts/bench/kernels.py                      # on a GPU, 2^28 elements or what its free memory holds
    python scripts/bench/kernels.py --device cpu --numel 4194304

Each round measures a copy and then every kernel once, so that a clock that drifts moves all of them; a figure is the median
over the rounds of its bytes a second divided by that round's copy's. Bytes are those that the operation cannot avoid.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial

import torch
from harness import print_table, read_options, write_record

from hf_zero.arithmetic import round_stochastically, runs_triton
from hf_zero.buckets.dynamic import SIGNED, UNSIGNED, Coded, quantise_dynamic
from hf_zero.device import free_bytes
from hf_zero.kernels.statistics import gradient_statistics
from hf_zero.kernels.steps import SGD, AdamW, Lion, Place, adamw, adamw_in_blocks, lion, sgd
from hf_zero.layout.slots import BLOCK_NUMEL, blocks
from hf_zero.wire.quantise import INT8, BlockFormat, dequantise_sum, quantise

WARMUP_ROUNDS = 3

_BYTES_AN_ELEMENT = 88
"""Of all tensors together: 16 of float32, 2 of bfloat16 and codes, with what foreach loops take meanwhile."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """One operation and the bytes an element that it has to read and write."""

    name: str
    bytes_an_element: float
    run: Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Figure:
    """The median of a task's rounds; `copy_fraction` is its bandwidth by the copy's in the same round."""

    name: str
    ms: float
    gb_a_second: float
    copy_fraction: float


def kernel_tasks(numel: int, device: torch.device) -> list[Task]:
    """The package's kernels on a shard of `numel` elements, bfloat16 gradients and copies."""
    weights, exp_avg, exp_avg_sq, residual = (torch.zeros(numel, device=device) for _ in range(4))
    gradient = torch.randn(numel, device=device).bfloat16()
    copy = torch.empty_like(gradient)
    moments = []
    for code, values in ((SIGNED, gradient.float()), (UNSIGNED, gradient.float().square())):
        moments.append(
            Coded(torch.empty(numel, dtype=torch.uint8, device=device), torch.empty(blocks(numel), device=device))
        )
        quantise_dynamic(values, moments[-1].codes, moments[-1].scales, code)
    in_32_bits, in_8_bits, with_one_moment, with_momentum = (
        Place(weights=weights, gradient=gradient, states=states, copy=copy)
        for states in (
            {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq},
            dict(zip(("exp_avg", "exp_avg_sq"), moments)),
            {"exp_avg": exp_avg},
            {"momentum_buffer": exp_avg},
        )
    )
    return [
        Task(name="gradient statistics", bytes_an_element=2, run=lambda: gradient_statistics([gradient])),
        Task(
            name="AdamW, master and copy",
            bytes_an_element=28,
            run=lambda: adamw(in_32_bits, AdamW(lr=1e-6, step=10)),
        ),
        Task(
            name="AdamW, moments in 8 bits, master and copy",
            bytes_an_element=16 + 16 / BLOCK_NUMEL,
            run=lambda: adamw_in_blocks(in_8_bits, AdamW(lr=1e-6, step=10)),
        ),
        Task(
            name="Lion, master and copy",
            bytes_an_element=20,
            run=lambda: lion(with_one_moment, Lion(lr=1e-6)),
        ),
        Task(
            name="SGD, momentum, master and copy",
            bytes_an_element=20,
            run=lambda: sgd(with_momentum, SGD(lr=1e-6, momentum=0.9)),
        ),
        *block_tasks(gradient, residual, weights),
        Task(
            name="stochastic rounding",
            bytes_an_element=6,
            run=lambda: round_stochastically(weights, copy, seed=1),
        ),
    ]


def block_tasks(gradient: torch.Tensor, residual: torch.Tensor, out: torch.Tensor) -> Iterator[Task]:
    """Both ways through blocks of 8-bit codes, the sum of two ranks' into `out`."""
    format = BlockFormat(code=INT8)
    codes = torch.empty(2, format.code_bytes(len(gradient)), dtype=torch.uint8, device=gradient.device)
    scales = torch.empty(2, format.blocks(len(gradient)), device=gradient.device)
    for rank in range(2):
        quantise(gradient, codes[rank], scales[rank], format)
    yield Task(
        name=f"quantise {INT8}, error feedback",
        bytes_an_element=11 + 4 / format.block_numel,
        run=partial(quantise, gradient, codes[0], scales[0], format, residual),
    )
    yield Task(
        name=f"sum of two ranks' {INT8}",
        bytes_an_element=6 + 8 / format.block_numel,
        run=partial(dequantise_sum, codes, scales, out, format),
    )


def torch_tasks(numel: int, device: torch.device) -> list[Task]:
    """torch's AdamW on float32 parameters and gradients, as one tensor."""
    tasks = []
    for form in ("fused", "foreach"):
        parameter = torch.nn.Parameter(torch.zeros(numel, device=device))
        parameter.grad = torch.randn(numel, device=device)
        optimizer = torch.optim.AdamW([parameter], lr=1e-6, **{form: True})
        tasks.append(Task(name=f"torch AdamW, {form}, fp32, no copy", bytes_an_element=28, run=optimizer.step))
    return tasks


def seconds(run: Callable[[], object], device: torch.device) -> float:
    """Of one call: by the device's own clock on a GPU, by the host's otherwise."""
    if device.type == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3
    begin_s = time.perf_counter()
    run()
    return time.perf_counter() - begin_s


def measure(tasks: list[Task], numel: int, device: torch.device, rounds: int) -> list[Figure]:
    """The copy's figure first."""
    source, place = torch.zeros(numel, device=device), torch.empty(numel, device=device)
    copy = Task(name="copy, fp32", bytes_an_element=8, run=lambda: place.copy_(source))
    taken: dict[str, list[float]] = {task.name: [] for task in [copy, *tasks]}
    for round_index in range(WARMUP_ROUNDS + rounds):
        for task in [copy, *tasks]:
            one = seconds(task.run, device)
            if round_index >= WARMUP_ROUNDS:
                taken[task.name].append(one)
    return [summarise(task, taken[task.name], copy, taken[copy.name], numel) for task in [copy, *tasks]]


def summarise(task: Task, taken_s: list[float], copy: Task, copy_s: list[float], numel: int) -> Figure:
    share = task.bytes_an_element / copy.bytes_an_element
    median_s = statistics.median(taken_s)
    return Figure(
        name=task.name,
        ms=1e3 * median_s,
        gb_a_second=task.bytes_an_element * numel / median_s / 1e9,
        copy_fraction=statistics.median(share * theirs / mine for mine, theirs in zip(taken_s, copy_s)),
    )


def fitting_numel(free: int) -> int:
    """The elements that `kernel_tasks`, `torch_tasks` and the copy hold in half of `free` bytes; 2^28 at most."""
    return min(1 << 28, 1 << (free // 2 // _BYTES_AN_ELEMENT).bit_length() - 1)


def main(arguments: list[str] | None = None) -> int:
    options = read_options(
        __doc__,
        arguments,
        device=("cuda", None, ["cuda", "cpu"]),
        numel=(int, "by default 2^28, or as many as half of the free memory holds"),
        rounds=20,
    )
    if options.device == "cuda" and not torch.cuda.is_available():
        print("skipped: no CUDA device on this machine; --device cpu measures the torch references")
        return 0
    device = torch.device(options.device)
    if options.numel is None:
        options.numel = fitting_numel(free_bytes(device))
    tasks = kernel_tasks(options.numel, device) + torch_tasks(options.numel, device)
    form = "Triton" if runs_triton(device) else "torch references"
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    figures = measure(tasks, options.numel, device, options.rounds)
    title = f"{form} on {name}, {options.numel} elements, torch {torch.__version__}"
    rows = ((f.name, f"{f.ms:.3f}", f"{f.gb_a_second:.0f}", f"{f.copy_fraction:.2f}") for f in figures)
    print_table(title, ("operation", "ms", "GB/s", "of the copy"), rows)
    if options.json:
        write_record(options.json, {"title": title, "figures": [asdict(f) for f in figures]})
    return 0


if __name__ == "__main__":
    sys.exit(main())
