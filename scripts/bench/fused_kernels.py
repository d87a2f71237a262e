"""The kernels' share of a copy's bandwidth, next to torch's own optimizers.

    python scripts/bench/fused_kernels.py                      # on a GPU, 2^28 elements or what its free memory holds
    python scripts/bench/fused_kernels.py --device cpu --numel 4194304

Each round measures a copy and then every kernel once, so a drifting clock affects all of them. A figure is the median over the
rounds of its bytes per second divided by the same round's copy. Bytes are the ones the operation cannot avoid.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
from harness import describe_run, print_table, read_options, write_record

from hf_zero.arithmetic.flat import runs_triton
from hf_zero.arithmetic.stochastic import round_stochastically
from hf_zero.buckets.rows import SIGNED, UNSIGNED, Coded, quantize_dynamic
from hf_zero.device import free_bytes
from hf_zero.kernels.adamw import AdamW, adamw
from hf_zero.kernels.adamw_in_blocks import adamw_in_blocks
from hf_zero.kernels.flat_steps import Operands
from hf_zero.kernels.lion import Lion, lion
from hf_zero.kernels.sgd import SGD, sgd
from hf_zero.kernels.statistics import gradient_statistics
from hf_zero.layout.blocks import BLOCK_NUMEL, blocks
from hf_zero.wire.quantize import BlockFormat, dequantize_sum, quantize

WARMUP_ROUNDS = 3

_BYTES_AN_ELEMENT = 88
"""Bytes per element of all tensors together: 16 of float32, 2 of bfloat16 and codes, and temporaries of foreach loops."""


class Task(NamedTuple):
    """One operation, and the number of bytes per element it has to read and write."""

    name: str
    bytes_an_element: float
    run: Callable[[], object]


def kernel_tasks(numel: int, device: torch.device) -> Iterator[Task]:
    """Yields the package's kernels on a shard of `numel` elements, with bfloat16 gradients and copies."""
    weights, exp_avg, exp_avg_sq, residual = (torch.zeros(numel, device=device) for _ in range(4))
    gradient = torch.randn(numel, device=device).bfloat16()
    copy = torch.empty_like(gradient)
    moments = []
    for code, values in ((SIGNED, gradient.float()), (UNSIGNED, gradient.float().square())):
        codes = torch.empty(numel, dtype=torch.uint8, device=device)
        moments.append(Coded(codes, torch.empty(blocks(numel), device=device)))
        quantize_dynamic(values, moments[-1].codes, moments[-1].scales, code)

    def place(**states: Any) -> Operands:
        return Operands(weights=weights, gradient=gradient, states=states, copy=copy)

    in_32_bits = place(exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)
    in_8_bits = place(exp_avg=moments[0], exp_avg_sq=moments[1])
    step = AdamW(lr=1e-6, step=10)
    yield Task("gradient statistics", 2, lambda: gradient_statistics([gradient]))
    yield Task("AdamW, master and copy", 28, partial(adamw, in_32_bits, step))
    in_blocks = partial(adamw_in_blocks, in_8_bits, step)
    yield Task("AdamW, moments in 8 bits, master and copy", 16 + 16 / BLOCK_NUMEL, in_blocks)
    yield Task("Lion, master and copy", 20, partial(lion, place(exp_avg=exp_avg), Lion(lr=1e-6)))
    momentum = partial(sgd, place(momentum_buffer=exp_avg), SGD(lr=1e-6, momentum=0.9))
    yield Task("SGD, momentum, master and copy", 20, momentum)
    yield from block_tasks(gradient, residual, weights)
    yield Task("stochastic rounding", 6, lambda: round_stochastically(weights, copy, seed=1))


def block_tasks(gradient: torch.Tensor, residual: torch.Tensor, out: torch.Tensor) -> Iterator[Task]:
    """Yields both directions of 8-bit blocks, and the sum of two ranks' blocks into `out`."""
    format = BlockFormat()
    codes = torch.empty(2, format.code_bytes(len(gradient)), dtype=torch.uint8, device=gradient.device)
    scales = torch.empty(2, format.blocks(len(gradient)), device=gradient.device)
    for rank in range(2):
        quantize(gradient, codes[rank], scales[rank], format)
    there = partial(quantize, gradient, codes[0], scales[0], format, residual)
    yield Task("quantize int8, error feedback", 11 + 4 / format.block_numel, there)
    back = partial(dequantize_sum, codes, scales, out, format)
    yield Task("sum of two ranks' int8", 6 + 8 / format.block_numel, back)


def torch_tasks(numel: int, device: torch.device) -> Iterator[Task]:
    """Yields torch's AdamW on float32 parameters and gradients, as one tensor."""
    for form in ("fused", "foreach"):
        parameter = torch.nn.Parameter(torch.zeros(numel, device=device))
        parameter.grad = torch.randn(numel, device=device)
        optimizer = torch.optim.AdamW([parameter], lr=1e-6, **{form: True})
        yield Task(f"torch AdamW, {form}, fp32, no copy", 28, optimizer.step)


def seconds(run: Callable[[], object], device: torch.device) -> float:
    """Returns the seconds of one call, by the device's clock on a GPU, otherwise by the host's."""
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


def measure(tasks: list[Task], numel: int, device: torch.device, rounds: int) -> list[dict[str, Any]]:
    """Returns for each task the median of its rounds and of its bandwidth relative to the same round's copy; the copy first."""
    source, place = torch.zeros(numel, device=device), torch.empty(numel, device=device)
    copy = Task("copy, fp32", 8, lambda: place.copy_(source))
    taken_s: dict[str, list[float]] = {task.name: [] for task in [copy, *tasks]}
    for number in range(WARMUP_ROUNDS + rounds):
        for task in [copy, *tasks]:
            one_s = seconds(task.run, device)
            if number >= WARMUP_ROUNDS:
                taken_s[task.name].append(one_s)
    figures = []
    for name, bytes_an_element, _ in [copy, *tasks]:
        share, median_s = bytes_an_element / copy.bytes_an_element, median(taken_s[name])
        fraction = median(share * theirs / own for own, theirs in zip(taken_s[name], taken_s[copy.name]))
        gb_a_second = bytes_an_element * numel / median_s / 1e9
        figures.append({"name": name, "ms": 1e3 * median_s, "gb_a_second": gb_a_second, "copy_fraction": fraction})
    return figures


def fitting_numel(free: int) -> int:
    """Returns the number of elements for which all tasks fit in half of `free` bytes; 2^28 at most."""
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
    numel = options.numel or fitting_numel(free_bytes(device))
    figures = measure([*kernel_tasks(numel, device), *torch_tasks(numel, device)], numel, device, options.rounds)
    form = "Triton" if runs_triton(device) else "torch references"
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    title = f"{form} on {name}, {numel} elements, torch {torch.__version__}"
    columns = [("operation", "name"), ("ms", "ms", ".3f"), ("GB/s", "gb_a_second", ".0f")]
    print_table(title, [*columns, ("of the copy", "copy_fraction", ".2f")], figures)
    if options.json:
        write_record(options.json, describe_run(options) | {"kind": "kernels", "title": title, "figures": figures})
    return 0


if __name__ == "__main__":
    sys.exit(main())
