"""State in host memory that visits the device for its step: values, readers while it returns, edits, and its memory there."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import standin_device
import torch
from shared_ranks import on_ranks
from standin_runs import HOST, own_device
from torch import nn
from training import gpt2, gpt2_batch

from hf_zero.config import ZeroConfig
from hf_zero.device import allocated_bytes
from hf_zero.engine.engine import ZeroEngine
from hf_zero.offload.device_window import WINDOW, DeviceWindow, HostBytes
from hf_zero.offload.host_memory import HostCores
from hf_zero.offload.host_tiers import HostTier, WindowTier
from hf_zero.optimizer.bucket_steps import BucketStep
from hf_zero.optimizer.state_on_host import StateOnHost
from hf_zero.planner.layouts import lay_out, ranks_without_a_group

pytestmark = [pytest.mark.timeout(400), standin_device.needs_compiler]

STEPS = 3


def muon_and_adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and ".h." in name]
    others = [p for p in model.parameters() if not any(p is matrix for matrix in matrices)]
    return [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(others, lr=1e-3)]


def one(kind: Callable[..., torch.optim.Optimizer], **settings: Any) -> Callable:
    return lambda model: [kind(model.parameters(), **settings)]


OPTIMIZERS: dict[str, Callable[[nn.Module], list[torch.optim.Optimizer]]] = {
    "AdamW": one(torch.optim.AdamW),
    "fused AdamW": one(torch.optim.AdamW, fused=True),
    "AMSGrad": one(torch.optim.AdamW, amsgrad=True),
    "Adam": one(torch.optim.Adam, foreach=False),
    "momentum": one(torch.optim.SGD, lr=0.01, momentum=0.9),
    "SGD": one(torch.optim.SGD, lr=0.01),
    "NAdam": one(torch.optim.NAdam),
    "RAdam": one(torch.optim.RAdam),
    "Adamax": one(torch.optim.Adamax),
    "RMSprop": one(torch.optim.RMSprop, momentum=0.5, centered=True),
    "Adagrad": one(torch.optim.Adagrad),
    "Adadelta": one(torch.optim.Adadelta),
    "ASGD": one(torch.optim.ASGD),
    "Rprop": one(torch.optim.Rprop),
    "Adafactor": one(torch.optim.Adafactor),
    "Muon": muon_and_adamw,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"param_dtype": "bfloat16"},
    "8-bit": {"moments": "8bit"},
    "half": {},
}
CELLS = [
    *((name, "fp32") for name in OPTIMIZERS),
    *(("fused AdamW", setting) for setting in SETTINGS if setting != "fp32"),
    ("momentum", "8-bit"),
    ("Adafactor", "bf16"),
    ("Muon", "bf16"),
]


def built(
    settings: dict, make_optimizers: Callable = OPTIMIZERS["fused AdamW"]
) -> tuple[nn.Module, list[torch.optim.Optimizer], ZeroEngine]:
    torch.manual_seed(0)
    model = gpt2(layers=2).to(own_device())
    optimizers = make_optimizers(model)
    return model, optimizers, ZeroEngine(model, optimizers, {"stage": 2, "bucket_bytes": "20KiB", **settings})


def backward(model: nn.Module, seed: int) -> torch.Tensor:
    batch = gpt2_batch(torch.Generator().manual_seed(seed), 2)
    loss = model(**{name: values.to(own_device()) for name, values in batch.items()}).loss
    loss.backward()
    return loss.detach()


def step(model: nn.Module, optimizers: list[torch.optim.Optimizer], engine: ZeroEngine, seed: int) -> torch.Tensor:
    with engine.no_sync():
        backward(model, 2 * seed)
    loss = backward(model, 2 * seed + 1)
    engine.clip_grad_norm_(0.1)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return loss.cpu()


def weights(model: nn.Module, engine: ZeroEngine) -> list[torch.Tensor]:
    with engine.gathered():
        return [parameter.detach().cpu() for parameter in model.parameters()]


@pytest.mark.short_cells("2")
@pytest.mark.parametrize("world_size", [1, 2])
@on_ranks(time_limit_s=300)
def test_every_optimizer_has_the_bits_of_state_on_the_device(rank, world_size, library, tmp_path):
    compiled = standin_device.register(library)
    compiled.keep_to(rank + 1)
    with standin_device.process_group(rank, world_size, str(tmp_path)):
        for name, setting in CELLS:
            found = []
            for offload in ({}, HOST | ({"ratio": 0.5} if setting == "half" else {})):
                model, optimizers, engine = built({**SETTINGS[setting], "offload": offload}, OPTIMIZERS[name])
                losses = [step(model, optimizers, engine, seed) for seed in range(STEPS)]
                assert isinstance(engine.tier, WindowTier) == bool(offload)
                found.append([*losses, *weights(model, engine)])
                engine.close()
            assert all(map(torch.equal, *found)), (name, setting)
    assert compiled.hazards() == compiled.crossings() == []


def saved(value: torch.Tensor) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


READERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "an operator": lambda value: value + 0,
    "an operator on several": lambda value: torch._foreach_add([value], 0)[0],
    "a copy": lambda value: torch.empty_like(value).copy_(value),
    "a view": lambda value: value.view(-1)[:].clone().view(value.shape),
    "numpy": lambda value: torch.tensor(value.numpy()),
    "numbers": lambda value: torch.tensor(value.tolist()),
    "deepcopy": copy.deepcopy,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "torch.save": saved,
    "the device": lambda value: value.to(own_device()).cpu(),
    "dlpack": lambda value: torch.from_dlpack(value).clone(),
}


@on_ranks(1)
def test_every_reader_of_state_waits_until_it_is_back_in_host_memory(rank, world_size, library):
    compiled = standin_device.register(library)
    model, optimizers, engine = built({})
    step(model, optimizers, engine, 0)
    # Its bucket is the last of the step, so nobody has waited for the copy to the host.
    expected = optimizers[0].state[model.transformer.ln_f.weight]["exp_avg"].cpu()
    engine.close()
    for name, read in READERS.items():
        model, optimizers, engine = built({"offload": HOST})
        step(model, optimizers, engine, 0)
        moment = optimizers[0].state[model.transformer.ln_f.weight]["exp_avg"]
        assert moment.device.type == "cpu"
        found = read(moment)
        assert type(found) is torch.Tensor and torch.equal(found, expected), name
        engine.close()
    assert compiled.hazards() == []


VIEWS: dict[str, Callable[[torch.Tensor], Any]] = {
    "the tensor": lambda value: value,
    "a part": lambda value: value.view(-1)[:],
    "detached": lambda value: value.detach(),
    "numpy": lambda value: value.numpy(),
    "dlpack": torch.from_dlpack,
    "its storage": lambda value: value.untyped_storage(),
}


@on_ranks(1)
def test_views_of_state_from_before_a_step_have_the_values_after_it(rank, world_size, library):
    compiled = standin_device.register(library)
    model, optimizers, engine = built({})
    for seed in range(2):
        step(model, optimizers, engine, seed)
    expected = optimizers[0].state[model.transformer.ln_f.weight]["exp_avg"].cpu()
    engine.close()
    for name, make in VIEWS.items():
        model, optimizers, engine = built({"offload": HOST})
        step(model, optimizers, engine, 0)
        moment = optimizers[0].state[model.transformer.ln_f.weight]["exp_avg"]
        start, view = moment.storage_offset(), make(moment)
        del moment
        step(model, optimizers, engine, 1)
        if isinstance(view, torch.UntypedStorage):
            view = torch.empty(0).set_(view, start, expected.shape)
        found = torch.as_tensor(view).view(expected.shape)
        assert torch.equal(found, expected), name
        engine.close()
    assert compiled.hazards() == []


@on_ranks(1)
def test_a_step_waits_only_if_a_script_has_views_of_state(rank, world_size, library):
    standin_device.register(library)
    model, optimizers, engine = built({"offload": HOST})
    step(model, optimizers, engine, 0)
    moment, waits = optimizers[0].state[model.transformer.ln_f.weight]["exp_avg"], []
    with mock.patch.object(StateOnHost, "_wait", lambda self: waits.append(self)):
        del moment
        step(model, optimizers, engine, 1)
        assert not waits
        kept = [state["exp_avg"] for state in optimizers[0].state.values()]
        step(model, optimizers, engine, 2)
        assert len(waits) == len(engine.buckets)
        del kept
        waits.clear()
        step(model, optimizers, engine, 3)
        assert not waits
    engine.close()


@on_ranks(1)
def test_a_master_is_read_when_it_is_back_in_host_memory(rank, world_size, library):
    standin_device.register(library)
    found = []
    for offload in ({}, HOST):
        model, optimizers, engine = built({**SETTINGS["bf16"], "offload": offload})
        step(model, optimizers, engine, 0)
        # The bucket that is stepped last.
        row = engine.buckets[0].rows[0]
        found.append(engine._parts.storage.master_view(row).detach().cpu().view(-1).clone())
        engine.close()
    assert torch.equal(*found)


@on_ranks(1)
def test_state_dicts_reports_and_looks_at_shapes_need_no_wait(rank, world_size, library):
    standin_device.register(library)
    model, optimizers, engine = built({"offload": HOST})
    step(model, optimizers, engine, 0)
    with mock.patch.object(HostBytes, "wait", side_effect=AssertionError("waited")):
        moments = [state["exp_avg"] for state in optimizers[0].state.values()]
        assert all(
            moment.shape == p.shape and moment.nbytes == p.nbytes for moment, p in zip(moments, optimizers[0].state)
        )
        found = {row.kind: row.where for row in engine.memory_report().rows}
    assert found["optimizer state"] == "host memory" and found["gradients"] == "device"
    engine.close()


EDITS: dict[str, Callable[[torch.optim.Optimizer], None]] = {
    "in place": lambda optimizer: [state["exp_avg"].mul_(0.5) for state in optimizer.state.values()],
    "replaced": lambda optimizer: [state.update(exp_avg=state["exp_avg"] * 0.5) for state in optimizer.state.values()],
    "loaded": lambda optimizer: optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict())),
    "cleared": lambda optimizer: optimizer.state.clear(),
}


@pytest.mark.parametrize("setting", ["fp32", "8-bit", "bf16"])
@on_ranks(1)
def test_edits_of_state_before_and_after_it_is_fetched_reach_the_step(rank, world_size, setting, library):
    standin_device.register(library)
    for name, edit in EDITS.items():
        if setting == "8-bit" and name in ("in place", "replaced"):
            # Blocks have no float32 values between steps.
            continue
        for is_late in (False, True):
            found = []
            for offload in ({}, HOST):
                model, optimizers, engine = built({**SETTINGS[setting], "offload": offload})
                step(model, optimizers, engine, 0)
                if not is_late:
                    edit(optimizers[0])
                backward(model, 5)
                if is_late:
                    if offload:
                        engine.tier.window.fetch_ahead()
                    edit(optimizers[0])
                optimizers[0].step()
                found.append([backward(model, 6).cpu(), *weights(model, engine)])
                engine.close()
            assert all(map(torch.equal, *found)), (name, is_late)


@on_ranks(1)
def test_after_close_the_optimizer_steps_on_the_device(rank, world_size, library):
    standin_device.register(library)
    found = []
    for offload in ({}, HOST):
        model, optimizers, engine = built({"offload": offload})
        step(model, optimizers, engine, 0)
        engine.close()
        assert {value.device for state in optimizers[0].state.values() for value in state.values()} == {own_device()}
        backward(model, 7)
        optimizers[0].step()
        found.append([parameter.detach().cpu() for parameter in model.parameters()])
    assert all(map(torch.equal, *found))


@on_ranks(1)
def test_a_step_that_fails_loses_no_state(rank, world_size, library):
    standin_device.register(library)
    found = []
    for offload in ({}, HOST):
        model, optimizers, engine = built({"offload": offload})
        step(model, optimizers, engine, 0)
        if offload:
            backward(model, 5)
            failing = mock.patch.object(BucketStep, "step", side_effect=torch.OutOfMemoryError("no memory"))
            with failing, pytest.raises(torch.OutOfMemoryError):
                optimizers[0].step()
            optimizers[0].zero_grad()
        # The first bucket of the step failed, so nothing has been stepped.
        found.append([step(model, optimizers, engine, 1), *weights(model, engine)])
        engine.close()
    assert all(map(torch.equal, *found))


@on_ranks(1)
def test_state_is_not_on_the_device_between_steps(rank, world_size, library):
    standin_device.register(library)
    device, held = own_device(), {}
    for name, offload in (("device", {}), ("host", HOST)):
        before = allocated_bytes(device)
        model, optimizers, engine = built({"offload": offload})
        for seed in range(STEPS):
            step(model, optimizers, engine, seed)
        if offload:
            window = engine.tier.window
            sizes = sorted((each.nbytes for each in window._stored), reverse=True)
            state_bytes = sum(sizes)
            # The state is larger than the window, and activations are smaller.
            assert sum(sizes[:WINDOW]) < state_bytes
            window.close()
        torch.get_device_module(device).synchronize()
        held[name] = allocated_bytes(device) - before
        engine.close()
        del model, optimizers, engine
    assert held["device"] - held["host"] >= 0.9 * state_bytes


@on_ranks(1)
def test_a_window_waits_for_copies_only_if_there_is_no_room(rank, world_size, library):
    standin_device.register(library)
    device, allocated = own_device(), [0]
    window = DeviceWindow(device, HostCores(1))
    with mock.patch("hf_zero.offload.device_window.allocated_bytes", lambda _: allocated[0]):
        states = [HostBytes(window, number) for number in range(2 * WINDOW)]
        marks = []
        for state in states:
            state.start_store(state.new_flat(100))
            # None of the copies ends before somebody waits for it.
            mark = mock.Mock(is_past=False)
            window._landing[-1] = (mark, window._landing[-1][1])
            marks.append(mark)
        waited = [mark.wait.called for mark in marks]
        assert waited == [True] * WINDOW + [False] * WINDOW, "the window is full"
        # Forward has room for 1000 bytes.
        allocated[0] = 400
        window.before_layer("first")
        allocated[0] = 1000
        window.after_forward()
        for mark in marks[WINDOW:]:
            mark.wait()
        window._landing.clear()
        allocated[0] = 0
        window.fetch_ahead()
        assert all(state.is_fetched for state in states)
        window.drop_fetched()
        assert not any(state.is_fetched for state in states)
        allocated[0] = 950
        window.fetch_ahead()
        assert not any(state.is_fetched for state in states), "fetched beyond the memory of a forward"


class Together(torch.optim.SGD):
    """Its step depends on all gradients."""

    def step(self, closure: Any = None) -> None:
        norm = sum(p.grad.square().sum() for group in self.param_groups for p in group["params"] if p.grad is not None)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data.sub_(p.grad / (1 + norm), alpha=group["lr"])


class WithModes(torch.optim.SGD):
    def train(self) -> None:
        pass

    def eval(self) -> None:
        pass


@on_ranks(1)
def test_a_step_on_the_device_needs_room_and_an_optimizer_that_steps_buckets_one_by_one(rank, world_size, library):
    standin_device.register(library)
    kinds = {
        "room": (HOST, {}, OPTIMIZERS["AdamW"]),
        "parameters": (HOST | {"params": "cpu"}, {"stage": 3}, OPTIMIZERS["AdamW"]),
        "together": (HOST, {}, one(Together, lr=0.1)),
        "modes": (HOST, {}, one(WithModes, lr=0.1)),
    }
    found = {}
    for name, (offload, more, make) in kinds.items():
        _, _, engine = built({"offload": offload, **more}, make)
        found[name] = type(engine.tier)
        engine.close()
    # Parameters and gradients may need half of the memory, in which the parameters are already.
    weights_bytes = sum(parameter.nbytes for parameter in gpt2(layers=2).parameters())
    least = 3 * weights_bytes
    for name, free in (("just enough", least), ("too little", least - 1)):
        with mock.patch("hf_zero.engine.room.free_bytes", return_value=free):
            model, optimizers, engine = built({"offload": HOST})
        found[name] = type(engine.tier)
        engine.close()
        # For a device with this much memory, a plan must make the same choice. It also counts the memory of frozen parameters.
        config = ZeroConfig.from_dict({"stage": 2, "offload": HOST})
        model.frozen = nn.Parameter(torch.empty(3), requires_grad=False)
        layout = lay_out(
            model,
            optimizers,
            config,
            ranks_without_a_group(1, 1, config, "standin"),
            own_device(),
            free_bytes=free + weights_bytes + 12,
        )
        assert {cost.visits for cost in layout.costs if cost.trained} == {name == "just enough"}
    on_device = {name for name, tier in found.items() if tier is WindowTier}
    assert on_device == {"room", "just enough"} and set(found.values()) == {WindowTier, HostTier}
