"""What a model has is where it is trained, whichever way it came: parameters, and buffers of every dtype."""

from collections.abc import Callable
from pathlib import Path

import pytest
import standin_device
import torch
import torch.distributed as dist
from cells import slow
from ranks import run_ranks
from shared_ranks import on_ranks
from torch import nn
from training import bert, bert_batch, fused_adamw, gpt2, gpt2_batch

import hf_zero
from hf_zero.engine.engine import ZeroEngine

pytestmark = [pytest.mark.timeout(400), standin_device.needs_compiler]


def with_adapters() -> nn.Module:
    """GPT-2 whose own parameters are frozen."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False)
    return peft.get_peft_model(gpt2(), config)


def half_frozen_bert(folder: str | None = None) -> nn.Module:
    """Its embeddings are frozen; of `folder`, it lies in files."""
    model = bert() if folder is None else type(bert()).from_pretrained(folder)
    model.bert.embeddings.requires_grad_(False)
    return model


class Counting(nn.Module):
    """A layer with a buffer of each dtype that backends lack, a scalar among them."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)
        for number, dtype in enumerate([torch.int16, torch.uint16, torch.bool, torch.uint32, torch.complex64]):
            self.register_buffer(f"several_{number}", torch.arange(5).to(dtype))
        self.register_buffer("one", torch.tensor(3, dtype=torch.int8))
        self.register_buffer("doubles", torch.arange(3, dtype=torch.float64))
        self.register_buffer("none", torch.empty(0, dtype=torch.int16))


Make = Callable[[], nn.Module]

# What is trained, by name: how it is made, its batches, and settings.
CASES: dict[str, tuple[Make, Callable, dict]] = {
    "buffers of integers": (bert, bert_batch, {}),
    "small parameters kept whole": (bert, bert_batch, {"persist_below_numel": 100}),
    "frozen parameters": (half_frozen_bert, bert_batch, {}),
    "small frozen parameters kept whole": (half_frozen_bert, bert_batch, {"persist_below_numel": 100}),
    "adapters": (with_adapters, gpt2_batch, {"persist_below_numel": 100}),
    "parameters in host memory": (bert, bert_batch, {"offload": {"params": "cpu", "optimizer": "cpu"}}),
}


def losses(make: Make, make_batch: Callable, settings: dict | None, device: torch.device) -> list[float]:
    """Of two steps on `device`; with settings of an engine that is given the model as it is, else of a plain loop."""
    torch.manual_seed(0)
    model = make() if settings is not None else make().to(device)
    model.train()
    optimizer = fused_adamw(model)
    engine = None
    if settings is not None:
        engine = ZeroEngine(model, [optimizer], {"stage": 3, **settings}, device=device)
        placed = {value.device for value in [*model.parameters(), *model.buffers()]}
        assert placed == {device}, "a part of the model is elsewhere"
    found = []
    for seed in range(2):
        batch = make_batch(torch.Generator().manual_seed(10 * seed + dist.get_rank()), 2)
        loss = model(**{name: values.to(device) for name, values in batch.items()}).loss
        loss.backward()
        if engine is None:
            for parameter in (p for p in model.parameters() if p.requires_grad):
                dist.all_reduce(parameter.grad)
                parameter.grad.div_(dist.get_world_size())
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    if engine is not None:
        engine.close()
    return found


# Together most that a model can have: buffers of integers, frozen parameters, small ones, parameters on the host.
SOME = ["small frozen parameters kept whole", "parameters in host memory"]


def from_host_memory(
    rank: int, world_size: int, library: Path, folder: str, names: list[str], from_files: list[dict]
) -> None:
    compiled = standin_device.register(library)
    compiled.keep_to(rank + 1)
    device = torch.device(standin_device.NAME, rank + 1)
    with standin_device.process_group(rank, world_size, folder):
        for name in names:
            make, make_batch, settings = CASES[name]
            plain = losses(make, make_batch, None, device)
            assert losses(make, make_batch, settings, device) == plain, name
        saved = f"{folder}/saved"
        plain = losses(lambda: half_frozen_bert(saved), bert_batch, None, device)
        for settings in from_files:
            with hf_zero.init(3):
                found = losses(lambda: half_frozen_bert(saved), bert_batch, settings, device)
            assert found == plain, f"from files, {settings}"
    assert compiled.hazards() == compiled.crossings() == []


FROM_FILES = [{"persist_below_numel": 100}, {}]


@pytest.mark.parametrize(
    ("world_size", "names", "from_files"),
    [(2, SOME, FROM_FILES[:1]), slow(2, list(CASES), FROM_FILES), slow(1, list(CASES), FROM_FILES)],
    ids=["2", "2-every", "1-every"],
)
def test_a_model_in_host_memory_is_trained_on_the_device_at_stage_3(world_size, names, from_files, library, tmp_path):
    bert().save_pretrained(tmp_path / "saved")
    arguments = {"library": library, "folder": str(tmp_path), "names": names, "from_files": from_files}
    run_ranks(from_host_memory, world_size=world_size, time_limit_s=200, keyword_arguments=arguments)


@pytest.mark.parametrize("on_device", [True, False], ids=["device", "host"])
@pytest.mark.short_cells("device")
@on_ranks(2)
def test_buffers_of_all_dtypes_become_rank_0s(rank, world_size, on_device, library, tmp_path):
    folder = str(tmp_path)
    standin_device.register(library)
    device = torch.device(standin_device.NAME, rank) if on_device else torch.device("cpu")
    with standin_device.process_group(rank, world_size, folder):
        for stage in range(4):
            model, expected = Counting(), dict(Counting().named_buffers())
            for buffer in model.buffers() if rank else ():
                buffer.zero_()
            held = list(model.buffers())
            ZeroEngine(model, [fused_adamw(model)], {"stage": stage}, device=device)
            assert {parameter.device for parameter in model.parameters()} == {device}
            for name, buffer in model.named_buffers():
                assert buffer.device == device and torch.equal(buffer.cpu(), expected[name]), (stage, name)
            assert all(now is was for now, was in zip(model.buffers(), held))
