"""The kernels: the torch references by properties, the Triton forms in Triton's interpreter and in their machine code."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache

import fused_kernels as bench
import kernel_compile
import kernel_interpreted
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from launching import SUPPORT, run_forked
from optimizer_steps import MOMENTS, place_of

from hf_zero.arithmetic.flat import has_triton, runs_triton
from hf_zero.arithmetic.sums import sum_of_squares
from hf_zero.buckets.rows import SIGNED, UNSIGNED, Coded
from hf_zero.kernels import statistics
from hf_zero.kernels.adamw import AdamW, adamw
from hf_zero.kernels.adamw_in_blocks import adamw_in_blocks
from hf_zero.kernels.lion import Lion, lion
from hf_zero.kernels.sgd import SGD, sgd

TIME_LIMIT_S = 240
NEWEST = kernel_compile.ARCHITECTURES[-1]

needs_triton = pytest.mark.skipif(not has_triton(), reason="triton is not installed")


def in_a_new_process(*command: str) -> dict:
    """What a helper prints, in a process that has imported nothing before it."""
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", SUPPORT / command[0], *command[1:]],
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT_S,
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


@pytest.fixture(scope="module")
def interpreted() -> dict[str, str]:
    script = SUPPORT / "kernel_interpreted.py"
    ran = run_forked(script, ["cpu"], environment=os.environ, processes=1, time_limit_s=TIME_LIMIT_S)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


@pytest.fixture(scope="module")
def on_gpu() -> dict[str, str]:
    return in_a_new_process("kernel_interpreted.py", "cuda")


@pytest.fixture(scope="module")
def compiled() -> Callable[[int], dict[str, dict[str, dict]]]:
    """Architecture → kernel → figures by architecture and form of a launch."""
    return cache(lambda architecture: in_a_new_process("kernel_compile.py", str(architecture)))


@needs_triton
@pytest.mark.parametrize("name", kernel_interpreted.CHECKS)
def test_interpreted(interpreted, name):
    assert interpreted[name] == "", interpreted[name]


@needs_triton
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
@pytest.mark.parametrize("name", kernel_interpreted.CHECKS)
def test_on_a_gpu(on_gpu, name):
    assert on_gpu[name] == "", on_gpu[name]


@needs_triton
@pytest.mark.parametrize(
    ("name", "architecture"),
    [
        pytest.param(name, number, marks=[] if number == NEWEST else pytest.mark.slow)
        for name, case in kernel_compile.CASES.items()
        for number in case.architectures
    ],
)
def test_machine_code_keeps_what_the_kernel_was_written_for(compiled, name, architecture):
    figures, promise = compiled(architecture)[name][str(architecture)], kernel_compile.CASES[name].promise
    assert figures["spilled_bytes"] == 0
    assert figures["registers"] <= promise.registers
    assert figures["shared_bytes"] <= promise.shared_bytes
    assert figures["loads"] == promise.loads
    assert figures["stores"] == promise.stores


@needs_triton
@pytest.mark.parametrize("name", kernel_compile.CASES)
def test_every_form_of_a_launch_compiles(compiled, name):
    found = compiled(NEWEST)[name]
    assert found["with_one_element"]["spilled_bytes"] == 0
    assert found["without_options"]["spilled_bytes"] == 0


@needs_triton
def test_a_sum_compiles_to_the_same_for_any_number_of_ranks(compiled):
    by_ranks = compiled(NEWEST)["sum of int8"]["by ranks"]
    print("CPU seconds of compiling by ranks:", {ranks: found["seconds"] for ranks, found in by_ranks.items()})
    assert list(map(int, by_ranks)) == list(kernel_compile.RANKS)
    assert len({(found["registers"], found["spilled_bytes"]) for found in by_ranks.values()}) == 1


@needs_triton
def test_files_with_kernels_do_not_import_triton(compiled):
    assert compiled(NEWEST)["triton is imported with the kernels"] is False


def test_the_host_runs_the_references():
    assert not runs_triton(torch.device("cpu"))


@given(
    sizes=st.lists(st.integers(0, 3000), min_size=1, max_size=4),
    dtype=st.sampled_from(kernel_interpreted.DTYPES),
    seed=st.integers(0, 9),
)
@settings(deadline=None, max_examples=40)
def test_statistics_are_float64s_to_the_sixth_digit(sizes, dtype, seed):
    shards = [kernel_interpreted.normal(numel, seed, dtype) for numel in sizes]
    exact = sum(shard.double().square().sum().item() for shard in shards)
    squares, count = statistics.gradient_statistics(shards).tolist()
    assert squares == pytest.approx(exact, rel=1e-6)
    assert count == 0


@pytest.mark.parametrize("dtype", [*kernel_interpreted.DTYPES, torch.float64])
def test_sum_of_squares_of_a_long_shard_keeps_the_sixth_digit(dtype):
    flat = kernel_interpreted.normal(1_000_003, 0, dtype)
    assert sum_of_squares(flat).item() == pytest.approx(flat.double().square().sum().item(), rel=1e-6)


def test_statistics_tell_overflow_from_elements_that_are_not_finite():
    overflow = torch.full((10,), 1e30)
    assert statistics.gradient_statistics([overflow]).tolist() == [math.inf, 0.0]
    stranger = torch.tensor([1.0, math.nan, -math.inf])
    squares, count = statistics.gradient_statistics([torch.ones(3), stranger]).tolist()
    assert math.isnan(squares) and count == 2


@given(norm=st.floats(0, 1e15), max_norm=st.sampled_from([0.1, 1.0, 1e4, math.inf]), exponent=st.integers(0, 16))
@settings(deadline=None)
def test_scalars_clip_as_torch_does(norm, max_norm, exponent):
    scale = 2.0**exponent
    sums = torch.tensor([(norm * scale) ** 2, 0.0], dtype=torch.float64)
    scalars = statistics.step_scalars(sums, max_norm, torch.tensor([1 / scale]))
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.ones(1)
    torch.nn.utils.clip_grads_with_norm_([parameter], max_norm, scalars[statistics.NORM])
    assert scalars[statistics.NORM].item() == pytest.approx(norm, rel=1e-6, abs=1e-30)
    expected = parameter.grad.item() if math.isfinite(max_norm) else 1.0
    assert scalars[statistics.COEFFICIENT].item() == pytest.approx(expected, rel=2e-7)
    assert scalars[statistics.MULTIPLIER] == scalars[statistics.COEFFICIENT] / scale
    assert scalars[statistics.FOUND_INF] == 0


@pytest.mark.parametrize("sums", [[math.nan, 1.0], [math.inf, 0.0], [1.0, 1.0]])
def test_scalars_say_that_a_step_must_not_be_taken(sums):
    assert statistics.step_scalars(torch.tensor(sums, dtype=torch.float64), 1.0)[statistics.FOUND_INF] == 1


def test_kernels_refuse_what_they_would_misread():
    with pytest.raises(ValueError, match=r"shard 1 has shape \(4, 4\) .* flat contiguous"):
        statistics.gradient_statistics([torch.ones(3), torch.ones(4, 4)])
    with pytest.raises(ValueError, match=r"shard 0 is torch.int64; allowed: torch.float32, "):
        statistics.gradient_statistics([torch.ones(3, dtype=torch.int64)])
    with pytest.raises(ValueError, match="inverse_scale is 2 elements"):
        statistics.step_scalars(torch.zeros(2, dtype=torch.float64), 1.0, torch.ones(2))


def gradients(steps: int, numel: int) -> list[torch.Tensor]:
    return [kernel_interpreted.normal(numel, seed) for seed in range(steps)]


def assert_follows(weights: torch.Tensor, parameter: torch.Tensor) -> None:
    """Within four float32 epsilons of the largest weight after 50 steps; about one is seen."""
    bound = 4 * torch.finfo(torch.float32).eps * parameter.abs().max().item()
    assert (weights - parameter).abs().max().item() <= bound


@pytest.mark.parametrize("options", [{"foreach": False}, {"fused": True}])
def test_adamw_follows_torchs(options):
    parameter = torch.nn.Parameter(kernel_interpreted.normal(5000, 99))
    weights, m, v = parameter.detach().clone(), torch.zeros(5000), torch.zeros(5000)
    optimizer = torch.optim.AdamW([parameter], lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, **options)
    copy = torch.empty(5000, dtype=torch.bfloat16)
    for step, gradient in enumerate(gradients(50, 5000), start=1):
        parameter.grad = gradient.clone()
        optimizer.step()
        setting = AdamW(lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, step=step)
        adamw(place_of(MOMENTS, weights, gradient, m, v, copy=copy), setting)
    assert_follows(weights, parameter.detach())
    assert torch.equal(copy, weights.bfloat16())


def test_adamw_in_blocks_follows_adamw_and_does_not_depend_on_where_it_is_cut():
    numel, cut = 300_000, 1000 * 256
    weights = kernel_interpreted.normal(numel, 99)
    exact, m, v, together, in_two = weights.clone(), torch.zeros(numel), torch.zeros(numel), weights.clone(), weights
    states = [[kernel_interpreted.coded(m, code) for code in (SIGNED, UNSIGNED)] for _ in range(2)]
    copy = torch.empty(numel, dtype=torch.bfloat16)
    for step, gradient in enumerate(gradients(10, numel), start=1):
        setting = AdamW(lr=1e-3, step=step)
        adamw(place_of(MOMENTS, exact, gradient, m, v), setting)
        adamw_in_blocks(place_of(MOMENTS, together, gradient, *states[0], copy=copy), setting)
        for part, blocks in ((slice(0, cut), slice(0, 1000)), (slice(cut, numel), slice(1000, None))):
            moments = [Coded(state.codes[part], state.scales[blocks]) for state in states[1]]
            adamw_in_blocks(place_of(MOMENTS, in_two[part], gradient[part], *moments), setting)
    assert torch.equal(together, in_two) and torch.equal(copy, together.bfloat16())
    for one, other in zip(*states):
        assert torch.equal(one.codes, other.codes) and torch.equal(one.scales, other.scales)
    # Ten steps of about 1e-3.
    assert 0 < (together - exact).abs().max() < 2e-3
    assert (together - exact).square().mean().sqrt() < 1e-4


@pytest.mark.parametrize(
    "options",
    [
        {"momentum": 0.0, "weight_decay": 0.01},
        {"momentum": 0.9, "dampening": 0.3},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    ],
)
def test_sgd_follows_torchs(options):
    parameter = torch.nn.Parameter(kernel_interpreted.normal(5000, 99))
    weights, states = parameter.detach().clone(), [torch.zeros(5000)] if options["momentum"] else []
    optimizer = torch.optim.SGD([parameter], lr=0.01, **options)
    for step, gradient in enumerate(gradients(50, 5000)):
        parameter.grad = gradient.clone()
        optimizer.step()
        place = place_of(["momentum_buffer"][: len(states)], weights, gradient, *states)
        sgd(place, SGD(lr=0.01, first_step=step == 0, **options))
    assert_follows(weights, parameter.detach())


@given(exponent=st.integers(-8, 16), coefficient=st.sampled_from([1.0, 0.5, 0.125]))
@settings(deadline=None, max_examples=20)
def test_a_scaled_and_clipped_gradient_steps_as_the_plain_one(exponent, coefficient):
    gradient = kernel_interpreted.normal(300, 3)
    multiplier = torch.tensor([coefficient * 2.0**-exponent])
    for step, states in ((adamw, 2), (lion, 1)):
        setting = AdamW(lr=1e-3, step=3) if step is adamw else Lion(lr=1e-3)
        plain, scaled = (
            [kernel_interpreted.normal(300, 4), *torch.full((2, 300), 0.01).unbind()][: 1 + states] for _ in range(2)
        )
        names = MOMENTS[:states]
        step(place_of(names, plain[0], gradient * coefficient, *plain[1:]), setting)
        step(place_of(names, scaled[0], gradient * 2.0**exponent, *scaled[1:], multiplier=multiplier), setting)
        for one, other in zip(plain, scaled):
            assert torch.equal(one, other)


def test_one_minus_beta_is_taken_in_double():
    assert AdamW(lr=1.0, betas=(0.9, 0.999), step=1).scalars[3] == 1 - 0.999
    assert abs(float(torch.tensor(1.0) - torch.tensor(0.999)) - 0.001) > 1e-9


def test_optimizers_refuse_what_cannot_be_meant():
    w, g, m = torch.zeros(4), torch.zeros(4), torch.zeros(4)
    with pytest.raises(ValueError, match=r"exp_avg_sq has 3 elements, but must have 4"):
        adamw(place_of(MOMENTS, w, g, m, torch.zeros(3)), AdamW(lr=1e-3, step=1))
    with pytest.raises(ValueError, match=r"exp_avg is torch.bfloat16; allowed: torch.float32"):
        lion(place_of(MOMENTS[:1], w, g, m.bfloat16()), Lion(lr=1e-3))
    short = Coded(torch.zeros(4, dtype=torch.uint8), torch.zeros(2))
    with pytest.raises(ValueError, match="exp_avg's scales has 2 elements, but must have 1"):
        adamw_in_blocks(place_of(MOMENTS, w, g, short, short), AdamW(lr=1e-3, step=1))
    with pytest.raises(ValueError, match="AdamW's step is 0"):
        AdamW(lr=1e-3, step=0)
    with pytest.raises(ValueError, match=r"Nesterov momentum with momentum 0\.0"):
        SGD(lr=0.1, nesterov=True)
    with pytest.raises(ValueError, match=r"momentum is 0\.9 and there is no momentum buffer"):
        sgd(place_of((), w, g), SGD(lr=0.1, momentum=0.9))
    with pytest.raises(ValueError, match="found_inf is 2 elements"):
        sgd(place_of((), w, g, found_inf=torch.zeros(2)), SGD(lr=0.1))


def test_the_benchmark_measures_all_kernels_beside_a_copy(tmp_path, capsys):
    figures_path = tmp_path / "figures.json"
    command = ["--device", "cpu", "--numel", "4096", "--rounds", "2", "--json", str(figures_path)]
    assert bench.main(command) == 0
    figures = json.loads(figures_path.read_text())["figures"]
    assert [figure["name"] for figure in figures][:2] == ["copy, fp32", "gradient statistics"]
    assert figures[0]["copy_fraction"] == 1.0
    assert all(figure["ms"] > 0 and figure["copy_fraction"] > 0 for figure in figures)
    assert "torch references on CPU" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device, and the benchmark would run")
def test_the_benchmark_says_why_it_does_not_run(capsys):
    assert bench.main([]) == 0
    assert capsys.readouterr().out.startswith("skipped: no CUDA device")
