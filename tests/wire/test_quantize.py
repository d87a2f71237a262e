"""Quantized blocks: what their torch reference promises; test_kernels.py holds the Triton forms."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_interpreted import DTYPES, normal

from hf_zero.wire.block_kernels import LARGEST_CODE
from hf_zero.wire.quantize import BlockFormat, dequantize, dequantize_sum, quantize

EPSILON = torch.finfo(torch.float32).eps
FORMATS = st.builds(BlockFormat, block_numel=st.sampled_from([32, 128, 256, 4096]))
ALL_CODES = torch.arange(-LARGEST_CODE, LARGEST_CODE + 1.0)


def send(values: torch.Tensor, format: BlockFormat, residual: torch.Tensor | None = None):
    """Codes and scales of `values`, and what comes out of them."""
    numel = values.numel()
    codes = torch.full((format.code_bytes(numel),), 255, dtype=torch.uint8)
    scales, out = torch.full((format.blocks(numel),), -1.0), torch.full((numel,), 77.0)
    quantize(values, codes, scales, format, residual)
    dequantize(codes, scales, out, format)
    return codes, scales, out


def half_steps(out: torch.Tensor, scales: torch.Tensor, format: BlockFormat) -> torch.Tensor:
    """Half of the distance from what came out to what else its code could have written, and float32's rounding, (n,) float64."""
    scale = scales.double().repeat_interleave(format.block_numel)[: out.numel()]
    return scale / 2 + 2 * LARGEST_CODE * EPSILON * scale


@given(
    format=FORMATS,
    numel=st.integers(0, 9000),
    seed=st.integers(0, 99),
    dtype=st.sampled_from(DTYPES),
    exponent=st.integers(-140, 120),
)
@settings(deadline=None)
def test_no_element_is_off_by_more_than_half_a_step(format, numel, seed, dtype, exponent):
    values = (normal(numel, seed).double() * 2.0**exponent).to(dtype)
    values = torch.where(values.isfinite(), values, torch.zeros_like(values))
    _, scales, out = send(values, format)
    error = (values.double() - out.double()).abs()
    assert bool((error <= half_steps(out, scales, format)).all())


@given(format=FORMATS, numel=st.integers(1, 5000), seed=st.integers(0, 99))
@settings(deadline=None)
def test_codes_survive_packing(format, numel, seed):
    generator = torch.Generator().manual_seed(seed)
    values = ALL_CODES[torch.randint(len(ALL_CODES), (numel,), generator=generator)]
    # One largest code a block makes the scale 1.
    values[:: format.block_numel] = LARGEST_CODE
    codes, scales, out = send(values, format)
    assert codes.numel() == format.code_bytes(numel)
    assert bool((scales == 1).all())
    assert torch.equal(out, values)


def test_what_lies_between_two_codes_goes_to_the_nearest():
    known = ALL_CODES[ALL_CODES >= 0]
    low, high = known[:-1], known[1:]
    middle = (low + high) / 2
    values = torch.cat([torch.nextafter(middle, low), middle, torch.nextafter(middle, high)])
    # Of the values from 0 up every other one ends in a zero, 0 and the one that makes the scale 1 among them.
    even = torch.where(torch.arange(len(low)) % 2 == 0, low, high)
    block = torch.zeros(-(-(len(values) + 1) // 4096) * 4096)
    block[::4096] = LARGEST_CODE
    block[1 : 1 + len(values)] = values
    for sign in (1, -1):
        _, scales, out = send(sign * block, BlockFormat(block_numel=4096))
        assert bool((scales == 1).all())
        assert torch.equal(sign * out[1 : 1 + len(values)], torch.cat([low, even, high]))


@given(format=FORMATS, numel=st.integers(1, 5000), steps=st.integers(1, 40), seed=st.integers(0, 99))
@settings(deadline=None, max_examples=40)
def test_with_error_feedback_what_is_sent_sums_to_what_was_given(format, numel, steps, seed):
    residual, given_sum, sent_sum = torch.zeros(numel), torch.zeros(numel).double(), torch.zeros(numel).double()
    for step in range(steps):
        values = normal(numel, seed * 1000 + step)
        _, scales, out = send(values, format, residual)
        given_sum += values
        sent_sum += out
    # All that is missing is the last residual, which is at most half a step; the rest is rounding.
    assert (given_sum - sent_sum - residual).abs().max().item() <= 20 * steps * EPSILON
    assert bool((residual.abs() <= half_steps(out, scales, format)).all())


@given(format=FORMATS, numel=st.integers(1, 5000), steps=st.integers(1, 40), seed=st.integers(0, 99))
@settings(deadline=None, max_examples=40)
def test_a_residual_of_16_bits_loses_a_256th_of_half_a_step_each_time(format, numel, steps, seed):
    residual, given_sum, sent_sum = (
        torch.zeros(numel).bfloat16(),
        torch.zeros(numel).double(),
        torch.zeros(numel).double(),
    )
    bound = torch.zeros(numel).double()
    for step in range(steps):
        values = normal(numel, seed * 1000 + step)
        _, scales, out = send(values, format, residual)
        given_sum += values
        sent_sum += out
        bound += half_steps(out, scales, format) / 256 + 20 * EPSILON
    assert bool(((given_sum - sent_sum - residual.double()).abs() <= bound).all())


def test_without_error_feedback_what_is_small_beside_its_block_never_arrives():
    format = BlockFormat(block_numel=32)
    values = torch.full((32,), 0.003)
    values[0] = 1.0
    residual, with_feedback, without = torch.zeros(32), torch.zeros(32), torch.zeros(32)
    for _ in range(100):
        with_feedback += send(values, format, residual)[2]
        without += send(values, format)[2]
    assert not without[1:].any()
    assert torch.allclose(with_feedback[1:], torch.tensor(0.3), atol=0.006)


@given(format=FORMATS, numel=st.integers(0, 3000), ranks=st.integers(1, 5), dtype=st.sampled_from(DTYPES))
@settings(deadline=None, max_examples=50)
def test_sums_are_taken_in_rank_order(format, numel, ranks, dtype):
    sent = [send(normal(numel, rank) * 3.0**rank, format) for rank in range(ranks)]
    expected = sent[0][2]
    for _, _, part in sent[1:]:
        expected = expected + part
    out = torch.full((numel,), 77.0, dtype=dtype)
    dequantize_sum(torch.stack([s[0] for s in sent]), torch.stack([s[1] for s in sent]), out, format)
    assert torch.equal(out, expected.to(dtype))


def test_a_block_of_zeros_comes_out_as_zeros():
    _, scales, out = send(torch.zeros(600), BlockFormat())
    assert torch.equal(out, torch.zeros(600))
    assert bool((scales > 0).all())


@pytest.mark.parametrize("stranger", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_block_that_is_not_finite_comes_out_as_nan_and_leaves_its_residual(stranger, dtype):
    values, residual = normal(700, 1, dtype), normal(700, 2) * 0.01
    values[300] = stranger
    before = residual.clone()
    codes, scales, out = send(values, BlockFormat(), residual)
    assert scales[1] == math.inf and scales[0].isfinite() and scales[2].isfinite()
    assert bool(out[256:512].isnan().all()) and bool(out[:256].isfinite().all()) and bool(out[512:].isfinite().all())
    assert torch.equal(residual[256:512], before[256:512])
    assert not torch.equal(residual[:256], before[:256])
    total = torch.zeros(700)
    finite_codes, finite_scales, _ = send(normal(700, 3), BlockFormat())
    dequantize_sum(torch.stack([finite_codes, codes]), torch.stack([finite_scales, scales]), total, BlockFormat())
    assert bool(total[256:512].isnan().all())


def test_long_tensors_are_quantized_as_their_parts():
    format = BlockFormat()
    values = normal(300_001, 7)
    codes, scales, out = send(values, format)
    part = slice(131_072, 262_144)
    part_codes, part_scales, part_out = send(values[part], format)
    assert torch.equal(codes[131_072:262_144], part_codes)
    assert torch.equal(scales[512:1024], part_scales)
    assert torch.equal(out[part], part_out)


def test_formats_and_buffers_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="blocks of 48 elements; a power of two"):
        BlockFormat(block_numel=48)
    format = BlockFormat()
    with pytest.raises(ValueError, match="codes has 100 elements, but must have 256"):
        quantize(torch.zeros(100), torch.zeros(100, dtype=torch.uint8), torch.zeros(1), format)
    with pytest.raises(ValueError, match="scales has 2 elements, but must have 1"):
        dequantize(torch.zeros(256, dtype=torch.uint8), torch.zeros(2), torch.zeros(100), format)
