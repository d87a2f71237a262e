"""What runs on a GPU: the same losses as without the engine, memory back after the step. Skipped where there is none."""

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from training import adamw_in_two_groups, fused_adamw, gpt2, gpt2_batch, save_engine

from hf_zero.arithmetic.flat import has_triton
from hf_zero.buckets.rows import SIGNED, UNSIGNED, dequantize_dynamic, quantize_dynamic
from hf_zero.comm.ledger import Ledger
from hf_zero.comm.transport import Handle
from hf_zero.comm.waits import Label
from hf_zero.engine.engine import ZeroEngine
from hf_zero.engine.loss_scale import GradScaler
from hf_zero.integrations.state_io import load_engine
from hf_zero.layout.blocks import blocks
from hf_zero.queues import clock
from hf_zero.step.nonfinite import NonFiniteGradientError

# cuBLAS reads the variable with its first call.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


needs_triton = pytest.mark.skipif(not has_triton(), reason="triton is not installed")

Make = Callable[[nn.Module], torch.optim.Optimizer]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3)


def losses(
    settings: object, dtype: torch.dtype, steps: int = 6, max_norm: float = 100.0, make_optimizer: Make = fused_adamw
) -> list[float]:
    torch.manual_seed(0)
    model = gpt2().to("cuda", dtype)
    optimizer = make_optimizer(model)
    engine = None if settings is None else ZeroEngine(model, [optimizer], settings)
    found = []
    for seed in range(steps):
        loss = loss_of(model, seed)
        loss.backward()
        if engine is None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        else:
            engine.clip_grad_norm_(max_norm)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def loss_of(model: nn.Module, seed: int) -> torch.Tensor:
    batch = gpt2_batch(torch.Generator().manual_seed(seed), 2)
    return model(**{name: value.cuda() for name, value in batch.items()}).loss


def prepared(
    settings: dict, make_optimizer: Make = fused_adamw, dtype: torch.dtype = torch.float32
) -> tuple[nn.Module, torch.optim.Optimizer, ZeroEngine]:
    torch.manual_seed(0)
    model = gpt2().to("cuda", dtype)
    optimizer = make_optimizer(model)
    return model, optimizer, ZeroEngine(model, [optimizer], settings)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, seeds: Sequence[int]) -> list[float]:
    found = []
    for seed in seeds:
        loss = loss_of(model, seed)
        loss.backward()
        found.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Kernels that add in the same order each time."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_one_gpu_follows_the_plain_loop(stage):
    assert losses({"stage": stage, "kernels": "never"}, torch.float32) == losses(None, torch.float32)


@needs_triton
@pytest.mark.parametrize("make_optimizer", [fused_adamw, adamw_in_two_groups, sgd])
@pytest.mark.parametrize("max_norm", [100.0, 0.5])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_kernels_follow_the_plain_loop_to_the_last_digits(stage, max_norm, make_optimizer):
    run = partial(losses, dtype=torch.float32, max_norm=max_norm, make_optimizer=make_optimizer)
    assert run(stage) == pytest.approx(run(None), rel=1e-5)


@pytest.mark.parametrize("stage", [1, 2])
def test_bf16_parameters_train_through_the_master(stage):
    model, optimizer, _ = prepared({"stage": stage}, dtype=torch.bfloat16)
    found = steps(model, optimizer, [0] * 6)
    assert found[-1] < found[0]


@needs_triton
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_kernels_train_bf16_parameters_as_torch_does(stage, rounding):
    settings = {"stage": stage, "param_dtype": "bfloat16", "rounding": rounding}
    by_torch = losses({**settings, "kernels": "never"}, torch.float32)
    assert losses(settings, torch.float32) == pytest.approx(by_torch, rel=5e-3)
    if rounding == "nearest":
        model, optimizer, engine = prepared(settings)
        steps(model, optimizer, range(2))
        weights = engine.whole_state_dict(wanted=True)
        for row in engine.state.rows():
            if row.kind == "master":
                part = weights[row.name].reshape(-1)[row.interval.start : row.interval.stop]
                assert torch.equal(part.cpu(), row.tensor.bfloat16().cpu())


@contextmanager
def no_waiting() -> Iterator[None]:
    """torch raises where it has the host wait for the device. It does not see waits for a single event."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@needs_triton
@pytest.mark.parametrize("make_optimizer", [fused_adamw, adamw_in_two_groups, sgd])
@pytest.mark.parametrize("param_dtype", ["auto", "bfloat16"])
def test_clip_and_step_by_kernels_do_not_wait_for_the_device(make_optimizer, param_dtype):
    model, optimizer, engine = prepared({"stage": 2, "param_dtype": param_dtype}, make_optimizer)
    report = engine.memory_report().kernels
    assert report.buckets == report.all_buckets == len(engine.buckets)
    for seed in range(4):
        loss_of(model, seed).backward()
        # The first steps make state, compile, and read counts that others may have written.
        with no_waiting() if seed >= 2 else nullcontext():
            engine.clip_grad_norm_(0.5)
            optimizer.step()
        optimizer.zero_grad()


@needs_triton
@pytest.mark.parametrize("clips", [False, True])
def test_a_gradient_that_is_not_finite_changes_nothing_and_is_refused_a_step_later(clips):
    model, optimizer, engine = prepared({"stage": 2, "param_dtype": "bfloat16"})
    steps(model, optimizer, range(2))
    before = [(row.kind, row.tensor.clone()) for row in engine.state.rows()]
    values = [parameter.detach().clone() for parameter in model.parameters()]
    (loss_of(model, 2) * float("inf")).backward()
    if clips:
        engine.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    after = [(row.kind, row.tensor) for row in engine.state.rows()]
    assert all(a[0] == b[0] and torch.equal(a[1], b[1]) for a, b in zip(after, before, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), values))
    loss_of(model, 3).backward()
    with pytest.raises(NonFiniteGradientError, match=r"norm is (nan|inf)"):
        optimizer.step()


@needs_triton
def test_a_loss_scaler_skips_the_step_of_kernels():
    found = {}
    for kernels in ("never", "auto"):
        model, optimizer, engine = prepared({"stage": 2, "kernels": kernels})
        scaler, found[kernels] = GradScaler("cuda", init_scale=2.0**10), []
        for seed in range(5):
            loss = loss_of(model, seed)
            found[kernels].append(loss.item())
            scaler.scale(loss * (float("inf") if seed == 2 else 1.0)).backward()
            scaler.unscale_(optimizer)
            engine.clip_grad_norm_(0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert {state["step"].item() for state in engine.state.scalars().values()} == {4.0}
    assert found["auto"] == pytest.approx(found["never"], rel=1e-5)


@needs_triton
@pytest.mark.parametrize("make_optimizer", [fused_adamw, adamw_in_two_groups, sgd])
@pytest.mark.parametrize("writes", ["never", "auto"])
def test_checkpoints_go_on_with_and_without_kernels(writes, make_optimizer, tmp_path):
    model, optimizer, engine = prepared({"stage": 2, "kernels": writes}, make_optimizer)
    steps(model, optimizer, range(2))
    save_engine(engine, tmp_path)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    expected = steps(model, optimizer, range(2, 4))
    for reads in ("never", "auto"):
        model, optimizer, engine = prepared({"stage": 1, "kernels": reads}, make_optimizer)
        model.load_state_dict(weights)
        load_engine(engine, tmp_path / "zero")
        assert steps(model, optimizer, range(2, 4)) == pytest.approx(expected, rel=1e-5)


@needs_triton
def test_what_no_kernel_does_is_left_to_torch_and_said(caplog):
    with caplog.at_level(logging.INFO, "hf_zero"):
        model, optimizer, engine = prepared({"stage": 2}, partial(adamw_in_two_groups, amsgrad=True))
    steps(model, optimizer, range(2))
    assert engine.memory_report().kernels.buckets == 0
    assert caplog.text.count("`amsgrad` is True") == 1


@needs_triton
def test_state_in_host_memory_is_stepped_there_and_the_rest_by_kernels():
    offload = {"optimizer": "cpu"}
    expected = losses({"stage": 2, "kernels": "never"}, torch.float32)
    for ratio in (1.0, 0.4):
        found = losses({"stage": 2, "offload": {**offload, "ratio": ratio}}, torch.float32)
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("stage", [0, 2])
def test_moments_in_8_bits_follow_those_in_32(stage):
    assert losses({"stage": stage, "moments": "8bit"}, torch.float32) == pytest.approx(
        losses(stage, torch.float32), rel=0.02
    )


@pytest.mark.parametrize("code", [SIGNED, UNSIGNED], ids=["signed", "unsigned"])
def test_blocks_are_those_of_the_host_bit_for_bit(code):
    values = torch.randn(100_000, generator=torch.Generator().manual_seed(0)).mul_(1e-3).abs_()
    values *= 1.0 if not code.signed else torch.tensor([1.0, -1.0]).repeat(50_000)
    packed = []
    for device in ("cpu", "cuda"):
        codes = torch.empty(len(values), dtype=torch.uint8, device=device)
        scales = torch.empty(blocks(len(values)), device=device)
        out = torch.empty(len(values), device=device)
        quantize_dynamic(values.to(device), codes, scales, code)
        dequantize_dynamic(codes, scales, out, code)
        packed.append([tensor.cpu() for tensor in (codes, scales, out)])
    assert all(torch.equal(here, there) for here, there in zip(*packed))


CLOSING = """
import torch
from test_gpu import prepared, steps

def train(stage):
    model, optimizer, engine = prepared({"stage": stage})
    steps(model, optimizer, range(2))
    engine.close()


# Workspaces of libraries stay.
train(0)
before = torch.cuda.memory_allocated()
train(2)
torch.cuda.synchronize()
assert torch.cuda.memory_allocated() - before < 2**20
"""


def test_closing_gives_memory_back():
    # In a process of its own: what other tests drop comes back meanwhile.
    paths = os.pathsep.join(filter(None, [str(Path(__file__).parent), *sys.path]))
    ran = subprocess.run(
        [sys.executable, "-c", CLOSING],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ran.returncode == 0, ran.stderr


def test_a_wait_is_counted_by_the_devices_own_clock():
    device = torch.device("cuda")
    ledger = Ledger(clock(device))
    label = Label(kind="all-gather of parameters", subject="bucket 0")
    ledger.count(label, 1, 0)
    torch.cuda.synchronize()
    Handle(label, ledger, lambda: torch.cuda._sleep(200_000_000)).finish()
    assert ledger.rows()[0].wait_seconds == 0
    torch.cuda.synchronize()
    assert ledger.rows()[0].wait_seconds > 0.02
