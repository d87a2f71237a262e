"""Compares the Triton kernels with their references, in Triton's interpreter on CPU tensors, or on a GPU.

Run by test_kernels.py in its own process, since one process either interprets or compiles: `python kernel_interpreted.py cpu`
interprets, and prints one JSON object: check → "" or the traceback. The interpreter does not notice a write outside of a buffer,
so every buffer here is between canaries.
"""

from __future__ import annotations

import json
import math
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
from optimizer_steps import MOMENTS, STEPPERS, Stepper, make_tensors, place_of, worst_error
from triton_interpreter import interpret

from hf_zero.arithmetic import stochastic
from hf_zero.buckets.rows import SIGNED, UNSIGNED, Coded, DynamicCode, dequantize_dynamic, quantize_dynamic
from hf_zero.kernels import statistics
from hf_zero.kernels import stochastic as stochastic_kernels
from hf_zero.kernels.adamw import AdamW
from hf_zero.kernels.adamw_in_blocks import adamw_in_blocks_reference, adamw_in_blocks_triton
from hf_zero.layout.blocks import blocks
from hf_zero.wire import quantize
from hf_zero.wire.quantize import BlockFormat

# At the last size, statistics have several parts. Other kernels have ten programs at 5,003 elements, and the interpreter takes a
# millisecond per program.
SIZES = (0, 1, 127, 128, 100_003)
SHORTER = (0, 1, 127, 128, 100_003 if torch.cuda.is_available() else 5_003)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CANARY_NUMEL = 64
CANARY = 77

CHECKS: dict[str, Callable[[], None]] = {}


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS[function.__name__] = function
    return function


class Guarded:
    """Flat tensors between canaries."""

    def __init__(self):
        self._wholes: list[torch.Tensor] = []

    def of(self, values: torch.Tensor) -> torch.Tensor:
        """Returns a copy of `values` with canaries on both sides."""
        whole = torch.full((values.numel() + 2 * CANARY_NUMEL,), CANARY, dtype=values.dtype)
        self._wholes.append(whole)
        inner = whole[CANARY_NUMEL : CANARY_NUMEL + values.numel()]
        inner.copy_(values)
        return inner

    def check(self) -> None:
        for whole in self._wholes:
            edges = torch.cat([whole[:CANARY_NUMEL], whole[-CANARY_NUMEL:]])
            assert bool((edges == CANARY).all()), "a kernel wrote beside its buffer"


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether all bits are equal, except that NaNs only have to be NaN in both."""
    return left.dtype == right.dtype and bool(((left == right) | (left.isnan() & right.isnan())).all())


def normal(numel: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Returns the same numbers on every device."""
    drawn = torch.randn(numel, generator=torch.Generator("cpu").manual_seed(seed), device="cpu")
    return drawn.to(torch.get_default_device(), dtype)


@check
def statistics_agree_with_float64_and_are_the_same_twice():
    for dtype in DTYPES:
        for numel in SIZES:
            guard = Guarded()
            flat = guard.of(normal(numel, 1, dtype))
            found, again = statistics.statistics_triton([flat]), statistics.statistics_triton([flat])
            exact = flat.double().square().sum().item()
            assert torch.equal(found, again)
            assert abs(found[0].item() - exact) <= 1e-6 * exact, (dtype, numel, found, exact)
            assert found[1] == 0
            guard.check()


@check
def statistics_of_several_shards_are_those_of_all_elements():
    shards = [normal(numel, numel + 1) for numel in (100_003, 0, 5, 131_072)]
    exact = torch.cat(shards).double().square().sum().item()
    found = statistics.statistics_triton(shards)
    assert abs(found[0].item() - exact) <= 1e-6 * exact


@check
def statistics_count_what_is_not_finite():
    for dtype in DTYPES:
        flat = normal(70_001, 2, dtype)
        flat[::10_000] = float("nan")
        flat[[3, 70_000]] = torch.tensor([math.inf, -math.inf], dtype=dtype)
        found, expected = statistics.statistics_triton([flat, flat]), statistics.statistics_reference([flat, flat])
        bad = 2 * int(flat.isfinite().logical_not().sum())
        assert found[1] == expected[1] == bad, (found, bad)
        assert found[0].isnan() and expected[0].isnan()


@check
def step_scalars_are_the_references_bit_for_bit():
    for sums in ([4.0, 0.0], [0.0, 0.0], [1e-30, 0.0], [math.nan, 3.0], [math.inf, 0.0], [1e300, 0.0], [7.3, 0.0]):
        for max_norm in (1.0, 0.3, 1e9, math.inf):
            for inverse_scale in (None, torch.tensor([2.0**-16]), torch.tensor([0.3])):
                given = torch.tensor(sums, dtype=torch.float64)
                found = statistics.scalars_triton(given, max_norm, inverse_scale)
                expected = statistics.scalars_reference(given, max_norm, inverse_scale)
                assert same_bits(found, expected), (sums, max_norm, inverse_scale, found, expected)


def step_guarded(
    stepper: Stepper,
    tensors: list[torch.Tensor],
    copy_dtype: torch.dtype | None,
    multiplier: torch.Tensor | None = None,
    found_inf: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """Steps the Triton form between canaries, and the reference; returns the former's results, the copy last."""
    guard = Guarded()
    mine, its = [guard.of(tensor) for tensor in tensors], [tensor.clone() for tensor in tensors]
    copies = [None, None] if copy_dtype is None else [guard.of(torch.zeros(len(its[0]), dtype=copy_dtype)), None]
    if copy_dtype is not None:
        copies[1] = copies[0].clone()
    stepper.step(stepper.triton, mine, copies[0], multiplier, found_inf)
    stepper.step(stepper.reference, its, copies[1], multiplier, found_inf)
    guard.check()
    for name, found, expected in zip(["weights", "gradient", "state", "state"], mine, its):
        assert same_bits(found, expected), (name, found, expected)
    assert copy_dtype is None or same_bits(*copies), copies
    return mine if copy_dtype is None else [*mine, copies[0]]


@check
def optimizers_are_their_references_bit_for_bit_and_near_float64():
    multiplier = torch.tensor([0.25])
    for name, stepper in STEPPERS.items():
        for numel in SHORTER:
            tensors = make_tensors(stepper, numel, torch.float32, torch.float32)
            after = step_guarded(stepper, tensors, None, multiplier)
            error = worst_error(stepper, tensors, after, 0.25)
            assert error <= 2, (name, numel, error)


@check
def optimizers_take_and_give_every_dtype():
    for stepper in STEPPERS.values():
        for gradient in DTYPES:
            for copy in DTYPES:
                weights, *_, written = step_guarded(stepper, make_tensors(stepper, 1000, torch.float32, gradient), copy)
                assert torch.equal(weights.to(copy), written)
        for weights in (torch.bfloat16, torch.float16):
            step_guarded(stepper, make_tensors(stepper, 1000, weights, weights), None)


@check
def optimizers_write_nothing_where_found_inf_is_set():
    for stepper in STEPPERS.values():
        tensors = make_tensors(stepper, 1000, torch.float32, torch.bfloat16)
        tensors[1][17] = float("nan")
        stopped = step_guarded(stepper, tensors, torch.bfloat16, found_inf=torch.tensor([1.0]))
        for before, after in zip(tensors, stopped):
            assert same_bits(before, after)
        assert not stopped[-1].any()
        stepped = step_guarded(stepper, tensors, torch.bfloat16, found_inf=torch.tensor([0.0]))
        assert not same_bits(stepped[0], tensors[0]) and stepped[-1].any()


@check
def optimizers_carry_what_is_not_finite():
    for stepper in STEPPERS.values():
        tensors = make_tensors(stepper, 128, torch.float32, torch.float32)
        tensors[1][:3] = torch.tensor([math.nan, math.inf, -math.inf])
        step_guarded(stepper, tensors, torch.bfloat16)


def coded(values: torch.Tensor, code: DynamicCode) -> Coded:
    found = Coded(torch.empty(len(values), dtype=torch.uint8), torch.empty(blocks(len(values))))
    quantize_dynamic(values, found.codes, found.scales, code)
    return found


def decoded(moment: Coded, code: DynamicCode) -> torch.Tensor:
    values = torch.empty(len(moment.codes))
    dequantize_dynamic(moment.codes, moment.scales, values, code)
    return values


def in_blocks(numel: int, gradient: torch.dtype) -> list[torch.Tensor]:
    """Makes weights, gradient, codes and scales of both moments; blocks of large, tiny, zero, and same-sign elements."""
    magnitudes = 10.0 ** normal(blocks(numel), 7).mul(3).repeat_interleave(256)[:numel]
    m, v = normal(numel, 2) * magnitudes, normal(numel, 3).square() * magnitudes.square()
    m[256:512], v[256:512] = 0.0, 1e-40
    m[512:768].abs_().neg_()
    moments = [coded(m, SIGNED), coded(v, UNSIGNED)]
    weights = [normal(numel, 0), (normal(numel, 1) * magnitudes).to(gradient)]
    return [*weights, *(part for moment in moments for part in (moment.codes, moment.scales))]


LATER = AdamW(lr=1e-3, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1, step=7)


def step_in_blocks(
    tensors: list[torch.Tensor], copy_dtype: torch.dtype | None, found_inf: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """Steps the Triton form between canaries, twice if it is fast, and the reference; the copy is last."""
    ends, multiplier = [], torch.tensor([0.25])
    forms = [adamw_in_blocks_triton] * (1 if len(tensors[0]) > 5000 else 2)
    for form in (*forms, adamw_in_blocks_reference):
        guard = Guarded()
        w, g, *moments = [guard.of(tensor) for tensor in tensors]
        copy = None if copy_dtype is None else guard.of(torch.zeros(len(w), dtype=copy_dtype))
        states = Coded(*moments[:2]), Coded(*moments[2:])
        form(place_of(MOMENTS, w, g, *states, copy=copy, multiplier=multiplier, found_inf=found_inf), LATER)
        guard.check()
        ends.append([w, g, *moments, *([] if copy is None else [copy])])
    for end in ends[:-1]:
        for name, found, expected in zip(["w", "g", "m", "m scales", "v", "v scales", "copy"], end, ends[-1]):
            assert same_bits(found, expected), (name, (found != expected).nonzero()[:5])
    return ends[0]


@check
def adamw_in_blocks_is_its_reference_bit_for_bit_twice_and_near_float64():
    for numel in SHORTER:
        for gradient, copy in ((torch.float32, None), (torch.bfloat16, torch.bfloat16))[: 1 if numel > 5000 else 2]:
            tensors = in_blocks(numel, gradient)
            after = step_in_blocks(tensors, copy)
            if not numel:
                continue
            m, v = decoded(Coded(*tensors[2:4]), SIGNED).double(), decoded(Coded(*tensors[4:6]), UNSIGNED).double()
            g = tensors[1].double() * 0.25
            m, v = 0.9 * m + (1 - 0.9) * g, 0.95 * v + (1 - 0.95) * g * g
            update = 1e-3 * m / (1 - 0.9**7) / ((v / (1 - 0.95**7)).sqrt() + 1e-6)
            exact = tensors[0].double() * (1 - 1e-3 * 0.1) - update
            assert (after[0].double() - exact).abs().max() <= 1e-6 * exact.abs().max(), numel
            for exact, moment, code, bound in (
                (m, Coded(*after[2:4]), SIGNED, 142),
                (v, Coded(*after[4:6]), UNSIGNED, 284),
            ):
                largest = moment.scales.abs().double().repeat_interleave(256)[:numel]
                error = (decoded(moment, code).double() - exact).abs()
                assert (error <= largest / bound * (1 + 1e-5) + 1e-37).all(), (numel, code)


@check
def adamw_in_blocks_carries_what_is_not_finite():
    tensors = in_blocks(1100, torch.float32)
    tensors[1][[3, 800, 801, 1099]] = torch.tensor([math.nan, math.inf, -math.inf, 3e38])
    after = step_in_blocks(tensors, torch.float16)
    # Blocks 0 and 3 have a NaN and infinities. The square of the last element overflows.
    assert after[3].isnan().tolist() == [True, False, False, True, False]
    assert after[5].isnan().tolist() == [True, False, False, True, True]
    step_in_blocks(after[:6], torch.float16)


@check
def adamw_in_blocks_writes_nothing_where_found_inf_is_set():
    tensors = in_blocks(1100, torch.bfloat16)
    tensors[1][17] = math.nan
    stopped = step_in_blocks(tensors, torch.bfloat16, torch.tensor([1.0]))
    assert all(same_bits(before, after) for before, after in zip(tensors, stopped)) and not stopped[-1].any()
    stepped = step_in_blocks(tensors, torch.bfloat16, torch.tensor([0.0]))
    assert not same_bits(stepped[0], tensors[0]) and not same_bits(stepped[2], tensors[2]) and stepped[-1].any()


FORMATS = [BlockFormat(block_numel=block_numel) for block_numel in (32, 256, 1024)]


def sizes_for(format: BlockFormat) -> tuple[int, ...]:
    """Sizes for a format. The interpreter runs the longest only with the usual block size."""
    return SHORTER if format.block_numel == 256 or torch.cuda.is_available() else SHORTER[:-1]


def in_turn(left: Sequence[Any], right: Sequence[Any], turn: int) -> list[tuple[Any, Any]]:
    """Returns pairs with each element once. As many turns as there are elements result in all pairs."""
    return [(one, right[(place + turn) % len(right)]) for place, one in enumerate(left)]


def with_strangers(flat: torch.Tensor) -> torch.Tensor:
    """Adds NaN and infinities to some blocks, and zeros to one, if the tensor is long enough to leave other blocks unchanged."""
    if flat.numel() > 5000:
        flat[[3, 2500, 2501]] = torch.tensor([math.nan, math.inf, -math.inf], dtype=flat.dtype)
        flat[3000:4600] = 0
    return flat


@check
def quantizing_is_the_references_bit_for_bit():
    for format in FORMATS:
        for place, numel in enumerate(sizes_for(format)):
            kept = normal(numel, 5) * 0.01
            pairs = in_turn(DTYPES, (None, kept, kept.bfloat16()), place)
            # The interpreter takes as long for a program of 512 elements as the reference for a million.
            for dtype, carried in [(torch.bfloat16, kept.bfloat16())] if numel > 5000 else pairs:
                guard = Guarded()
                values = guard.of(with_strangers(normal(numel, 4, dtype)))
                codes = guard.of(torch.zeros(format.code_bytes(numel), dtype=torch.uint8))
                scales = guard.of(torch.zeros(format.blocks(numel)))
                residual = None if carried is None else guard.of(carried)
                expected = codes.clone(), scales.clone(), None if carried is None else carried.clone()
                quantize.quantize_triton(values, codes, scales, format, residual)
                quantize.quantize_reference(values, *expected[:2], format, expected[2])
                guard.check()
                assert same_bits(codes, expected[0]), (format, numel, dtype)
                assert same_bits(scales, expected[1]), (format, numel, dtype)
                assert carried is None or same_bits(residual, expected[2]), (format, numel, dtype)


@check
def dequantized_sums_are_the_references_bit_for_bit():
    for format in FORMATS:
        for place, numel in enumerate(sizes_for(format)):
            # The kernel reads four ranks at a time.
            for dtype, ranks in [(torch.bfloat16, 2)] if numel > 5000 else in_turn(DTYPES, (1, 4, 11), place):
                guard = Guarded()
                codes = normal(ranks * format.code_bytes(numel), numel).mul_(60).add_(136).clamp_(17, 254)
                codes = codes.to(torch.uint8).view(ranks, format.code_bytes(numel))
                scales = normal(ranks * format.blocks(numel), numel + 1).abs_().view(ranks, format.blocks(numel))
                if numel > 1000:
                    scales[0, 1] = math.inf
                out = guard.of(torch.zeros(numel, dtype=dtype))
                expected = torch.zeros(numel, dtype=dtype)
                quantize.dequantize_sum_triton(codes, scales, out, format)
                quantize.dequantize_sum_reference(codes, scales, expected, format)
                guard.check()
                assert same_bits(out, expected), (format, numel, ranks, dtype)


@check
def stochastic_rounding_is_the_references_bit_for_bit_at_every_block_size():
    for numel in SHORTER:
        for seed, offset in ((0, 0), (1, 1), (2**40 + 12345, 7 * 128 + 2**33)):
            guard = Guarded()
            source = guard.of(with_strangers(normal(numel, 6)))
            out, wide = (guard.of(torch.zeros(numel, dtype=torch.bfloat16)) for _ in range(2))
            expected = torch.zeros(numel, dtype=torch.bfloat16)
            stochastic_kernels.stochastic_triton(source, out, seed, offset)
            stochastic_kernels.stochastic_triton(source, wide, seed, offset, regions_a_program=16)
            stochastic.stochastic_reference(source, expected, seed, offset)
            guard.check()
            assert same_bits(out, expected) and same_bits(wide, expected), (numel, seed, offset)


def main() -> None:
    torch.set_default_device(sys.argv[1])
    if sys.argv[1] == "cpu":
        interpret()
    outcomes = {}
    for name, function in CHECKS.items():
        try:
            function()
            outcomes[name] = ""
        except Exception:
            outcomes[name] = traceback.format_exc()
    json.dump(outcomes, sys.stdout)


if __name__ == "__main__":
    main()
