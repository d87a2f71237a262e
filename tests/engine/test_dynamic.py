"""The dynamic 8-bit data type: nearest values, bounded errors, and nothing that drifts."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_zero.buckets.rows import SIGNED, UNSIGNED, DynamicCode, dequantize_dynamic, quantize_dynamic, tables_of
from hf_zero.layout.blocks import BLOCK_NUMEL, blocks

CODES = pytest.mark.parametrize("code", [SIGNED, UNSIGNED], ids=["signed", "unsigned"])
LARGEST, SMALLEST = torch.finfo(torch.float32).max, torch.finfo(torch.float32).tiny


def packed(values: torch.Tensor, code: DynamicCode) -> tuple[torch.Tensor, torch.Tensor]:
    codes = torch.empty(len(values), dtype=torch.uint8)
    scales = torch.empty(blocks(len(values)))
    before = values.clone()
    quantize_dynamic(values, codes, scales, code)
    assert torch.equal(values.view(torch.int32), before.view(torch.int32))
    return codes, scales


def unpacked(codes: torch.Tensor, scales: torch.Tensor, code: DynamicCode) -> torch.Tensor:
    out = torch.empty(len(codes))
    dequantize_dynamic(codes, scales, out, code)
    return out


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@st.composite
def moments(draw) -> torch.Tensor:
    """Values over as many magnitudes as float32 has, with runs of zeros and blocks that one element dominates."""
    numel, seed = draw(st.integers(0, 5 * BLOCK_NUMEL)), draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)
    low, high = sorted(draw(st.tuples(st.integers(-45, 37), st.integers(-45, 37))))
    magnitudes = 10.0 ** (low + (high - low) * torch.rand(numel, generator=generator, dtype=torch.float64))
    values = (torch.randn(numel, generator=generator, dtype=torch.float64).clamp(-8, 8) * magnitudes).float()
    large = st.floats(-(2.0**126), 2.0**126, width=32)
    for place, value in draw(st.lists(st.tuples(st.integers(0, 5 * BLOCK_NUMEL), large), max_size=4)):
        values[place : place + 1] = value
    zeros = draw(st.integers(0, numel))
    values[zeros : zeros + 300 * draw(st.booleans())] = 0.0
    return values


def for_code(values: torch.Tensor, code: DynamicCode) -> torch.Tensor:
    return values if code.signed else values.abs()


def scale_of_each(scales: torch.Tensor, numel: int) -> torch.Tensor:
    return scales.repeat_interleave(BLOCK_NUMEL)[:numel].double()


@CODES
def test_the_values_are_those_of_the_paper(code):
    values = code.values().tolist()
    expected = {0.0, 1.0}
    for decade in range(7):
        count = 2**decade if code.signed else 2 ** (decade + 1)
        for place in range(count):
            magnitude = (0.1 + 0.9 * (place + 0.5) / count) * 10.0 ** (decade - 6)
            expected |= {magnitude, -magnitude} if code.signed else {magnitude}
    assert len(values) == len(set(values)) == len(expected) == 256
    assert values == pytest.approx(sorted(expected), rel=1e-12)
    assert values[code.zero] == 0.0


@CODES
@settings(max_examples=80, deadline=None)
@given(values=moments())
def test_what_comes_out_goes_in_again_bit_for_bit(code, values):
    codes, scales = packed(for_code(values, code), code)
    once = unpacked(codes, scales, code)
    again, scales_again = packed(once, code)
    assert same_bits(codes, again) and same_bits(scales, scales_again)
    assert same_bits(unpacked(again, scales_again, code), once)


@CODES
@settings(max_examples=40, deadline=None)
@given(values=moments(), cuts=st.sets(st.integers(1, 4)))
def test_cutting_between_blocks_changes_nothing(code, values, cuts):
    values = for_code(values, code)
    codes, scales = packed(values, code)
    edges = [0, *(cut * BLOCK_NUMEL for cut in sorted(cuts) if cut * BLOCK_NUMEL < len(values)), len(values)]
    parts = [packed(values[a:b], code) for a, b in itertools.pairwise(edges)]
    assert same_bits(torch.cat([part for part, _ in parts]), codes)
    assert same_bits(torch.cat([part for _, part in parts]), scales)


@CODES
@settings(max_examples=40, deadline=None)
@given(values=moments())
def test_each_element_gets_the_nearest_value(code, values):
    values = for_code(values, code)
    codes, scales = packed(values, code)
    out, scale = unpacked(codes, scales, code).double(), scale_of_each(scales, len(values))
    error = (out - values).abs()
    all_values = code.values() if code.signed else code.values()[1:]
    nearest = (all_values[None, :] * scale[:, None] - values[:, None].double()).abs().min(dim=1).values
    # Float32 divides, and multiplies, with a relative error of 2^-24, and has steps of 2^-149 near zero.
    slack = torch.maximum(values.abs(), out.abs()) * 2**-21 + 2.0**-148
    kept = scale != 0
    may_be_zero = torch.full_like(kept, not code.signed) & (values == 0)
    assert (error <= nearest + slack)[kept & ~may_be_zero].all()
    assert (out == 0)[may_be_zero | ~kept].all()
    assert (error <= scale.abs() / (142 if code.signed else 284) + slack)[kept].all()
    assert (error < SMALLEST)[~kept].all()


@CODES
@settings(max_examples=40, deadline=None)
@given(values=moments())
def test_the_largest_element_of_a_block_comes_out_as_it_went_in(code, values):
    values = for_code(values, code)
    out = unpacked(*packed(values, code), code)
    for start in range(0, len(values), BLOCK_NUMEL):
        block, decoded = values[start : start + BLOCK_NUMEL], out[start : start + BLOCK_NUMEL]
        most = block.abs().max()
        # Of two of one magnitude and other signs, the positive one.
        largest = int(torch.where(block == most, 2, torch.where(block.abs() == most, 1, 0)).argmax())
        if most >= SMALLEST:
            assert decoded[largest] == block[largest]


@CODES
def test_every_code_stands_at_every_scale(code):
    signs = (1.0, -1.0) if code.signed else (1.0,)
    codes = torch.arange(256, dtype=torch.uint8)
    for exponent in range(-126, 128):
        for sign in signs:
            scales = torch.tensor([sign * 1.37 * 2.0**exponent])
            again, scales_again = packed(unpacked(codes, scales, code), code)
            assert same_bits(scales, scales_again)
            assert same_bits(codes, again), (exponent, sign)


def test_a_second_moment_above_zero_stays_above_zero():
    values = torch.logspace(-37, 0, BLOCK_NUMEL)
    out = unpacked(*packed(values, UNSIGNED), UNSIGNED)
    assert (out > 0).all() and (out[1:] >= out[:-1]).all()
    assert unpacked(*packed(torch.tensor([1.0, 0.0, -1.0]), UNSIGNED), UNSIGNED).tolist() == [1.0, 0.0, 0.0]


@CODES
def test_a_block_with_what_is_not_finite_comes_out_as_nan_and_the_others_as_they_are(code):
    for strange in (float("nan"), float("inf"), -float("inf")):
        values = torch.linspace(0.1, 1.0, 3 * BLOCK_NUMEL)
        expected = unpacked(*packed(values, code), code)
        values[BLOCK_NUMEL + 7] = strange
        out = unpacked(*packed(values, code), code)
        assert out[BLOCK_NUMEL : 2 * BLOCK_NUMEL].isnan().all()
        rest = torch.cat([torch.arange(BLOCK_NUMEL), torch.arange(2 * BLOCK_NUMEL, 3 * BLOCK_NUMEL)])
        assert same_bits(out[rest], expected[rest])


@CODES
def test_nothing_and_next_to_nothing_become_zero_and_the_largest_stay(code):
    assert len(unpacked(*packed(torch.empty(0), code), code)) == 0
    for values in (torch.zeros(300), torch.full((300,), 1e-40)):
        assert same_bits(unpacked(*packed(values, code), code), torch.zeros(300))
    for value in (LARGEST, SMALLEST):
        assert unpacked(*packed(torch.full((300,), value), code), code).tolist() == [value] * 300


def test_what_is_larger_than_a_chunk_is_the_same(monkeypatch):
    values = torch.randn(300_000, generator=torch.Generator().manual_seed(0))
    codes, scales = packed(values, SIGNED)
    expected = unpacked(codes, scales, SIGNED)
    monkeypatch.setattr("hf_zero.buckets.rows._HOST_CHUNK_NUMEL", 2 * BLOCK_NUMEL)
    other, other_scales = packed(values, SIGNED)
    assert same_bits(codes, other) and same_bits(scales, other_scales)
    assert same_bits(unpacked(codes, scales, SIGNED), expected)


def test_tensors_that_do_not_fit_are_refused():
    codes, scales = torch.empty(300, dtype=torch.uint8), torch.empty(2)
    with pytest.raises(ValueError, match="codes has 300 elements, but must have 299"):
        quantize_dynamic(torch.zeros(299), codes, scales, SIGNED)
    with pytest.raises(ValueError, match="scales has 2 elements, but must have 3"):
        dequantize_dynamic(torch.empty(600, dtype=torch.uint8), scales, torch.empty(600), SIGNED)
    with pytest.raises(ValueError, match=r"values is torch\.bfloat16"):
        quantize_dynamic(torch.zeros(300, dtype=torch.bfloat16), codes, scales, SIGNED)


@CODES
def test_tables_are_the_same_under_another_default_device(code):
    expected = tables_of(code, torch.device("cpu"))
    tables_of.cache_clear()
    with torch.device("meta"):
        found = tables_of(code, torch.device("cpu"))
    for name in ("values", "first", "thresholds"):
        assert torch.equal(getattr(found, name), getattr(expected, name))
