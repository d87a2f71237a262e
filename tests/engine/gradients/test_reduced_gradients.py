"""The dtype and the memory that a reduced gradient waits for its step in, where kernels step masters of bfloat16 parameters."""

import pytest
import torch
from bf16_runs import backward, built
from torch.utils._python_dispatch import TorchDispatchMode

from hf_zero.engine.engine import ZeroEngine
from hf_zero.integrations.announce import state_plan

pytestmark = pytest.mark.timeout(120)

MAX_NORM = 1.0


def state_after(stage: int, *, accumulation: int = 1, clips: bool = True, looks: bool = False, **settings) -> list:
    """Losses, norms, masters and moments of a few steps."""
    model, optimizer, engine = built(stage, **settings)
    found = []
    for step in range(3):
        found += [backward(model, 10 * step + micro) for micro in range(accumulation)]
        if clips:
            found.append(engine.clip_grad_norm_(MAX_NORM))
        if looks:
            found += [engine.full_grad(parameter).dtype for parameter in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return found + state_of(engine)


def state_of(engine: ZeroEngine) -> list[torch.Tensor]:
    return [torch.as_tensor(row.tensor.detach()) for row in engine.state.rows()]


WIDE = {"reduce_dtype": "float32", "bucket_bytes": "40KiB"}
"""The same buckets, with gradients that become float32 when they have been computed."""


def are_equal(ones: list, others: list) -> bool:
    return all(
        torch.equal(one, other) if torch.is_tensor(one) else one == other
        for one, other in zip(ones, others, strict=True)
    )


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.short_cells("1-1", "1-3", "2-0", "2-2")
def test_one_gpu_steps_on_bfloat16_gradients_to_the_bits_of_float32_ones(stage, accumulation):
    # On the host torch adds squares of 16-bit elements in another order, and a norm has another last digit.
    kept = state_after(stage, accumulation=accumulation, clips=False)
    widened = state_after(stage, accumulation=accumulation, clips=False, **WIDE)
    assert are_equal(kept, widened)


def test_a_look_at_a_clipped_gradient_changes_no_bit_and_is_float32():
    looked, plain = state_after(2, looks=True), state_after(2)
    assert {each for each in looked if isinstance(each, torch.dtype)} == {torch.float32}
    assert are_equal([each for each in looked if torch.is_tensor(each)], plain)


@pytest.mark.parametrize("moments", ["32bit", "8bit"])
def test_a_setting_that_no_kernel_has_a_form_for_gets_float32_gradients(moments):
    def steps(**settings) -> list:
        model, optimizer, engine = built(2, moments=moments, **settings)
        optimizer.param_groups[0]["maximize"] = True
        for step in range(2):
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
        return state_of(engine)

    assert are_equal(steps(), steps(**WIDE))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_gpu_with_a_master_holds_16_bytes_a_parameter(stage):
    model, optimizer, engine = built(stage, bucket_bytes="1MiB")
    numel = sum(parameter.numel() for parameter in model.parameters())
    backward(model, 0)
    optimizer.step()
    optimizer.zero_grad()
    backward(model, 1)
    held = {row.kind: row.bytes / numel for row in engine.memory_report().rows}
    expected = {"parameters": 2, "fp32 master": 4, "optimizer state": 8, "gradients": 2, "gradient buffers": 0}
    # Padding is 1.3 % of so small a model.
    assert {kind: held[kind] for kind in expected} == pytest.approx(expected, rel=0.02)
    plan = state_plan(engine)
    assert (plan.gradients + plan.gradient_buffers) / numel == pytest.approx(2, rel=0.02)


class Operations(TorchDispatchMode):
    """Names of what is done on tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


def test_one_gpu_neither_multiplies_gradients_nor_casts_them():
    model, _, engine = built(2)
    operations = Operations()
    for name in ("put", "start", "finish", "finish_all"):
        method = getattr(engine._step.store, name)

        def noted(*args, _method=method):
            with operations:
                return _method(*args)

        setattr(engine._step.store, name, noted)
    backward(model, 0)
    large = [slot for bucket in engine.buckets for slot in bucket.slots if not slot.is_small]
    assert operations.names.count("copy_") == len(large)
    assert operations.names.count("_foreach_copy_") == len(engine.buckets)
    assert not {"mul", "mul_", "_foreach_mul", "_to_copy", "add_"} & set(operations.names)
