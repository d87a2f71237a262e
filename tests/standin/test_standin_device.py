"""What runs on an accelerator only, run on a stand-in for one: see standin_device.cpp for how it misbehaves."""

import copy
import gc
import math
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
import standin_device
import torch
import torch.distributed as dist
from cells import short_of, slow
from packed_bases import PLAIN, Coded
from ranks import run_ranks
from shared_ranks import on_ranks, run_on_ranks
from standin_runs import EXACT, HOST, INEXACT, SMALL, own_device, prepared, steps
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from training import backward_on_device, bert, bert_batch, built_in_bf16, fused_adamw, gpt2, gpt2_batch, save_engine

import hf_zero
from hf_zero.allocation import PAGE_BYTES
from hf_zero.arithmetic.sums import sums_of_squares
from hf_zero.checkpoint.background import Background
from hf_zero.device import accelerators, alias, with_index
from hf_zero.engine.engine import ZeroEngine
from hf_zero.engine.loss_scale import GradScaler
from hf_zero.extras import is_installed
from hf_zero.integrations.state_io import ZERO_FOLDER, load_engine
from hf_zero.offload.copies import PART_BYTES
from hf_zero.offload.host_memory import HostCores, ShareOfCores
from hf_zero.offload.host_tiers import HostTier
from hf_zero.offload.shards import FileMover
from hf_zero.offload.walk import Window
from hf_zero.pinned_memory import PinnedPool, pinned
from hf_zero.presence.arrivals import CommunicationError
from hf_zero.queues import HostValue
from hf_zero.stage3.agreed_order import AgreedOrder

pytestmark = [pytest.mark.timeout(400), standin_device.needs_compiler]
SCALED = ["stage 2", "state in host memory", "half of it", "state in files", "state in files, on a small device"]
SAVED = ["stage 1", "state in files", "parameters in cpu, state in none"]


def train(settings: dict | None, *, scaled: bool = False) -> list[torch.Tensor]:
    """Losses of three steps on the device, and the weights behind them as they are pushed and gathered, in host memory.

    A scale of 256 changes no digit.
    """
    model, optimizer, engine = prepared(settings)
    losses = steps(
        model, optimizer, engine, GradScaler(standin_device.NAME, init_scale=2.0**8, enabled=scaled), range(3)
    )
    named = model.named_parameters()
    walk = named if engine is None else engine.sharded.gathered.one_by_one(named, "a push of weights")
    losses += [parameter.detach().cpu() for _, parameter in walk]
    with nullcontext() if engine is None else engine.gathered():
        return losses + [parameter.detach().cpu() for parameter in model.parameters()]


def train_under_name(rank: int, world_size: int, library: Path, folder: str, name: str) -> list[list]:
    """Losses and weights of a plain loop, of stage 2, and of stage 3 with state in host memory, on a device with this name."""
    compiled = standin_device.register(library, name)
    backend = f"cpu:gloo,{name}:{standin_device.BACKEND}"
    with mock.patch.object(standin_device, "NAME", name):
        with standin_device.process_group(rank, world_size, folder, backend):
            assert accelerators() == (name, 4)
            runs = [train(settings) for settings in (None, {"stage": 2}, {"stage": 3, "offload": HOST})]
            # Lists, because tensors would travel through a process that has ended.
            found = [[tensor.tolist() for tensor in run] for run in runs]
    assert compiled.hazards() == compiled.crossings() == []
    return found


# `cuda` and `xpu` are missing because torch lets no other device have the names of its own devices.
@pytest.mark.slow
@pytest.mark.parametrize("name", ["npu", "hpu", "mlu", "musa"])
def test_a_device_with_the_name_of_each_kind_trains_as_a_plain_loop(name, library, tmp_path):
    arguments = {"library": library, "folder": str(tmp_path), "name": name}
    for plain, *ours in run_ranks(train_under_name, world_size=2, time_limit_s=400, keyword_arguments=arguments):
        assert len(plain) > 3 and ours == [plain, plain]


def goes_on(settings: dict, folder: Path) -> bool:
    """Whether a run that reads a checkpoint takes the steps of the one that wrote it."""
    unscaled = GradScaler(standin_device.NAME, enabled=False)
    model, optimizer, engine = prepared(settings)
    steps(model, optimizer, engine, unscaled, range(2))
    save_engine(engine, folder)
    with engine.gathered():
        weights = [parameter.detach().cpu() for parameter in model.parameters()]
    expected = steps(model, optimizer, engine, unscaled, range(2, 4))
    model, optimizer, engine = prepared(settings)
    with engine.gathered(writeback=True):
        for parameter, values in zip(model.parameters(), weights):
            parameter.data.copy_(values)
    load_engine(engine, folder / ZERO_FOLDER)
    return steps(model, optimizer, engine, unscaled, range(2, 4)) == expected


# What is run on one rank, where there are no collectives, and on two; the latter in the short run. Together with what changes
# digits every stage and way of stepping, and places of parameters and of state that have code of their own.
ON_ONE_RANK = ["stage 3", "state in files", "parameters in cpu, state in cpu"]
ON_TWO_RANKS = ["stage 3", "state in host memory", "state in files", "state in files, on a small device"]
ON_THE_WIRE = ["blocks on the wire"] if is_installed("wire") else []
ON_TWO_RANKS += ["parameters in cpu, state in nvme", "activations in host memory"]


@dataclass(frozen=True, kw_only=True)
class Cells:
    """Names of what is trained: settings that change no digit, those that do, both with a loss scale, both resumed."""

    exact: Sequence[str] = tuple(EXACT)
    inexact: Sequence[str] = tuple(INEXACT)
    scaled: Sequence[str] = tuple(SCALED)
    saved: Sequence[str] = (*SAVED, *INEXACT)


CELLS = [
    pytest.param(
        1,
        Cells(
            exact=ON_ONE_RANK, inexact=["8-bit moments", "8-bit moments in files"], scaled=SCALED[1:2], saved=SAVED[:1]
        ),
        id="1",
    ),
    pytest.param(
        2,
        Cells(exact=ON_TWO_RANKS, inexact=ON_THE_WIRE, scaled=["half of it"], saved=["state in host memory"]),
        id="2",
    ),
    pytest.param(1, Cells(), id="1-all", marks=pytest.mark.slow),
    pytest.param(2, Cells(), id="2-all", marks=pytest.mark.slow),
]


def _placed(settings: dict, folder: str) -> dict:
    offload = settings.get("offload", {})
    files = {"nvme_path": folder} if "nvme" in offload.values() else {}
    return {"bucket_bytes": "20KiB", **settings, "offload": offload | files}


@pytest.mark.short_cells("2")
@pytest.mark.parametrize(("world_size", "cells"), CELLS)
@on_ranks(time_limit_s=300)
def test_training_on_a_device_that_does_everything_late(rank, world_size, cells, library, tmp_path):
    folder = str(tmp_path)
    compiled = standin_device.register(library)
    compiled.keep_to(rank + 1)

    def run(settings: dict | None) -> list[torch.Tensor]:
        return train(settings and _placed(settings, folder))

    with standin_device.process_group(rank, world_size, folder):
        plain = run(None)
        for name in cells.exact:
            assert all(map(torch.equal, run(EXACT[name]), plain)), name
        for name in cells.inexact:
            settings, elsewhere = INEXACT[name]
            found = run(settings)
            assert all(map(torch.equal, run(settings | elsewhere), found)), name
            assert torch.stack(found[:3]).tolist() == pytest.approx(torch.stack(plain[:3]).tolist(), rel=0.02), name
        for name in cells.scaled:
            assert all(map(torch.equal, train(_placed(EXACT[name], folder), scaled=True), plain)), f"{name}, scaled"
        for number, name in enumerate(cells.saved):
            settings = EXACT[name] if name in EXACT else INEXACT[name][0] | INEXACT[name][1]
            assert goes_on(_placed(settings, folder), Path(folder) / f"checkpoint-{number}"), name
    assert compiled.deferred() > 0
    assert compiled.hazards() == compiled.crossings() == []
    assert compiled.contexts() == {rank + 1}
    assert torch.get_device_module(standin_device.NAME).spins == 0


def misbehaves(rank: int, world_size: int, library: Path) -> None:
    compiled = standin_device.register(library)
    there, here = torch.ones(8, device=standin_device.NAME), torch.empty(8, pin_memory=True)
    assert torch.empty(1, device=standin_device.NAME).isnan().item()
    here.copy_(there, non_blocking=True)
    assert here.isnan().all(), "a copy that nobody waited for has been made"
    event = torch.Event(device=standin_device.NAME)
    event.record()
    event.synchronize()
    assert (here == 1).all()
    stream = torch.Stream(device=standin_device.NAME)
    torch.accelerator.set_stream(stream)
    here.copy_(there, non_blocking=True)
    assert compiled.hazards() == []
    del there
    assert compiled.hazards() == ["memory of a copy under way was freed"]
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(2, device=standin_device.NAME) + torch.ones(2)


def _refusal(module: ModuleType) -> str:
    with pytest.raises(RuntimeError) as refused:
        module.Event().record(module.current_stream())
    return str(refused.value).splitlines()[0]


@on_ranks(1)
def test_each_thread_begins_on_the_first_of_the_devices(rank, world_size, library):
    compiled, module = standin_device.register(library), torch.get_device_module(standin_device.NAME)
    second = torch.device(standin_device.NAME, 1)
    there = torch.ones(8, device=second)
    assert (there + there).device == second and compiled.contexts() == {1}
    with pytest.raises(RuntimeError, match="same device"):
        there + torch.ones(8, device=f"{standin_device.NAME}:2")
    compiled.keep_to(1)
    module.set_device(1)
    torch.ones(8, device=standin_device.NAME).add_(there)
    found = []
    thread = threading.Thread(target=lambda: found.append((module.current_device(), _refusal(module))))
    thread.start()
    thread.join()
    assert found == [(0, "a context would be made on device 0, and this process is to keep to device 1")]


def test_the_stand_in_shows_what_would_go_wrong_on_a_gpu(library):
    run_on_ranks(misbehaves, world_size=1, library=library)


@pytest.mark.extra("kernels")
@on_ranks(1)
def test_threads_pins_events_and_launches_go_by_the_engines_device(rank, world_size, library):
    from hf_zero.kernels.base import Kernel

    compiled, module = standin_device.register(library), torch.get_device_module(standin_device.NAME)
    compiled.keep_to(2)
    device, current = torch.device(standin_device.NAME, 2), module.current_device
    cores, saved = HostCores(1), []
    background = Background(device)
    background.start(lambda: saved.append(current()))
    background.finish()
    threads = [Window(1, cores, device)._threads, FileMover(device, 1)]
    assert saved + [thread.submit(current).result() for thread in threads] == [2, 2, 2]
    launched, step = [], Kernel(lambda: None)
    step.__dict__["jit"] = {(1,): lambda *_, **__: launched.append(current())}
    step[(1,)](3, torch.ones(1, device=device), torch.ones(1, device=device))
    assert launched == [2]
    assert HostValue(torch.ones((), device=device)).value() == 1
    assert HostTier(device, cores).empty(16, torch.float32).shape == (16,)
    assert (alias(torch.ones(4, device=device)) == 1).all()
    module.set_device(2)
    assert with_index(torch.device(standin_device.NAME)) == device
    assert compiled.contexts() == {2}


def held_through_a_step(rank: int, world_size: int, library: Path, folder: str, stage: int) -> tuple[float, float]:
    """Bytes a parameter that the device holds more after backward than before the forward, and behind the step."""
    compiled = standin_device.register(library)
    with standin_device.process_group(rank, world_size, folder):
        model, optimizer, engine = built_in_bf16(stage, device=standin_device.NAME, bucket_bytes="1MiB")
        numel = sum(parameter.numel() for parameter in model.parameters())
        for step in range(3):
            before = compiled.held()
            loss = backward_on_device(model, step)
            del loss
            after = compiled.held()
            optimizer.step()
            optimizer.zero_grad()
            engine.finish_parameters()
        return (after - before) / numel, (compiled.held() - before) / numel


@pytest.mark.extra("kernels")
@pytest.mark.parametrize("stage", [slow(1), 2])
def test_gradients_of_an_accelerator_are_gone_before_the_next_forward(stage, library, tmp_path):
    [(gradients, left)] = run_on_ranks(
        held_through_a_step, world_size=1, library=library, folder=str(tmp_path), stage=stage
    )
    # The device gives out whole pages.
    assert 2 <= gradients < 2.4
    assert left == 0


class CopiedBytes(TorchDispatchMode):
    """Bytes of copies between the host and the device. What changes its dtype on the way may travel in the wider one."""

    def __init__(self) -> None:
        super().__init__()
        self.down = self.up = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name in ("aten::copy_", "aten::_to_copy"):
            target, source = (made, args[0]) if name == "aten::_to_copy" else args[:2]
            if target.device.type != source.device.type:
                nbytes = source.numel() * max(target.itemsize, source.itemsize)
                if target.device.type == "cpu":
                    self.down += nbytes
                else:
                    self.up += nbytes
        return made


def bytes_of_a_step(rank: int, world_size: int, library: Path, folder: str, settings: dict) -> tuple[float, float]:
    """Copied in a backward and a step, for each element of the rank's shards: down and up."""
    standin_device.register(library)
    with standin_device.process_group(rank, world_size, folder):
        is_small = mock.patch("hf_zero.engine.assemble.has_room_to_step", return_value=False)
        with is_small if settings.get(SMALL) else nullcontext():
            wanted = {name: value for name, value in settings.items() if name != SMALL}
            model, optimizer, engine = built_in_bf16(device=standin_device.NAME, bucket_bytes="100KiB", **wanted)
        # The first two steps look at the parameters besides.
        for seed in range(2):
            backward_on_device(model, seed)
            optimizer.step()
            optimizer.zero_grad()
        copied = CopiedBytes()
        batch = {n: v.to(standin_device.NAME) for n, v in gpt2_batch(torch.Generator().manual_seed(1), 2).items()}
        loss = model(**batch).loss
        with copied, ExitStack() as stack:
            for part in ("hooks.modes", "hooks.weak", "step.backward", "stage3.unsharding"):
                # Otherwise the engine hides its operations from modes.
                stack.enter_context(mock.patch(f"hf_zero.{part}.dispatch_modes", return_value=0))
            loss.backward()
            optimizer.step()
        engine.finish_parameters()
        numel = sum(bucket.layout.shard_numel for bucket in engine.buckets)
        return copied.down / numel, copied.up / numel


OFFLOADED = {
    f"stage {stage}{', on a small device' * is_small}": {
        "stage": stage,
        "offload": {"optimizer": "cpu"},
        SMALL: is_small,
    }
    for stage in (1, 2, 3)
    for is_small in (False, True)
}


@pytest.mark.extra("kernels")
@pytest.mark.parametrize("way", short_of(OFFLOADED, ["stage 2", "stage 2, on a small device"]))
def test_offload_moves_state_to_the_device_and_back_or_2_bytes_of_a_16_bit_parameter_and_its_gradient(
    way, library, tmp_path
):
    """On one rank, since the stand-in's collectives go through the host, too."""
    [(down, up)] = run_on_ranks(
        bytes_of_a_step, world_size=1, library=library, folder=str(tmp_path), settings=OFFLOADED[way]
    )
    # Or master and both moments. Scalars of the step and alignment are copied too, and moments have no padding.
    expected = 2 if OFFLOADED[way][SMALL] else 12
    assert down == pytest.approx(expected, rel=0.01)
    assert up == pytest.approx(expected, rel=0.01)


@on_ranks(1)
def test_a_clip_in_host_memory_has_the_ranks_share_of_cores(rank, world_size, library):
    standin_device.register(library)
    found = []

    def seen(gradients):
        found.append(torch.get_num_threads())
        return sums_of_squares(gradients)

    before = torch.get_num_threads()
    cores = mock.patch("hf_zero.offload.choice.choose_host_cores", lambda device: ShareOfCores(before + 1))
    with cores, mock.patch("hf_zero.step.norm.sums_of_squares", seen):
        model, optimizer, engine = prepared({"stage": 2, "offload": HOST, SMALL: True})
        batch = gpt2_batch(torch.Generator().manual_seed(0), 2)
        model(**{name: values.to(own_device()) for name, values in batch.items()}).loss.backward()
        engine.clip_grad_norm_(1.0)
        assert found == [before + 1]
        optimizer.step()
    assert torch.get_num_threads() == before


# ---- `nonfinite: skip` ----

SETTINGS = [{"stage": 1}, {"stage": 2, "offload": HOST}, {"stage": 3}]


def trained(settings: dict, rank: int, numbers: list[int], bad: int | None = None) -> list[torch.Tensor]:
    """Parameters behind some steps, in host memory."""
    model, optimizer, engine = prepared({"bucket_bytes": "20KiB", **settings})
    for number in numbers:
        batch = gpt2_batch(torch.Generator().manual_seed(100 * number + rank), 2)
        loss = model(**{name: values.to(own_device()) for name, values in batch.items()}).loss
        (loss * float("nan") if number == bad and rank == 0 else loss).backward()
        engine.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert engine.bad_steps.skipped == int(bad is not None)
    with engine.gathered():
        return [parameter.detach().cpu() for parameter in model.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "cells"), [(2, SETTINGS), slow(1, SETTINGS)])
@on_ranks(time_limit_s=300)
def test_what_is_left_out_leaves_no_trace(rank, world_size, cells, library, tmp_path):
    folder = str(tmp_path)
    compiled = standin_device.register(library)
    compiled.keep_to(rank + 1)
    with standin_device.process_group(rank, world_size, folder):
        for settings in cells:
            found = trained({**settings, "nonfinite": "skip"}, rank, [0, 1, 2, 3], bad=2)
            assert all(map(torch.equal, found, trained(settings, rank, [0, 1, 3]))), settings
    assert compiled.hazards() == compiled.crossings() == []


HOST_STATE = {"optimizer": "cpu"}


# ---- pinned memory ----


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [slow(1), 2])
@on_ranks()
def test_pinned_memory_is_that_of_masters_and_gradients(rank, world_size, library, tmp_path):
    folder = str(tmp_path)
    compiled = standin_device.register(library)
    found = []
    with standin_device.process_group(rank, world_size, folder):
        for stage in (2, 3):
            for dtype in (torch.float32, torch.bfloat16):
                gc.collect()
                before = compiled.pinned()
                torch.manual_seed(0)
                model = gpt2().to(standin_device.NAME, dtype)
                optimizer = fused_adamw(model)
                settings = {"stage": stage, "offload": HOST_STATE, "bucket_bytes": "20KiB"}
                with mock.patch("hf_zero.engine.assemble.has_room_to_step", return_value=False):
                    engine = ZeroEngine(model, [optimizer], settings)
                for step in range(2):
                    for micro in range(2):
                        batch = gpt2_batch(torch.Generator().manual_seed(2 * step + micro), 2)
                        model(
                            **{name: values.to(standin_device.NAME) for name, values in batch.items()}
                        ).loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                shards = sum(bucket.layout.shard_numel for bucket in engine.buckets)
                name = f"stage {stage}, {dtype}"
                found.append((name, compiled.pinned() - before, shards * (4 + 4), shards * dtype.itemsize))
                engine.close()
                del engine, optimizer, model
    for name, there, needed, sums in found:
        # Numbers that the host reads are pinned too.
        passing = 2 * PART_BYTES if "bfloat16" in name else 0
        assert needed <= there - passing <= needed + sums + PAGE_BYTES, name


@on_ranks(1)
def test_pinned_memory_is_given_back_or_out_again_when_its_last_view_has_gone(rank, world_size, library):
    compiled = standin_device.register(library)
    device = torch.device(standin_device.NAME, 0)
    view = pinned(5000, device)[100:200].view(torch.float32)
    assert compiled.pinned() == 5000
    del view
    assert compiled.pinned() == 0
    pool = PinnedPool(device)
    one, other = pool.take(5000), pool.take(5000)
    assert one.data_ptr() != other.data_ptr() and compiled.pinned() == pool.nbytes == 10_000
    address, part = one.data_ptr(), one[10:]
    del one
    third = pool.take(5000)
    assert compiled.pinned() == 15_000, "memory was given out again while a view of it was there"
    del part
    assert pool.take(5000).data_ptr() == address and compiled.pinned() == 15_000
    del third, other, pool
    assert compiled.pinned() == 0


# ---- models that come from the host ----


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
    "frozen parameters": (half_frozen_bert, bert_batch, {}),
    "adapters": (with_adapters, gpt2_batch, {}),
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


# Together most that a model can have: buffers of integers, frozen parameters, parameters on the host.
SOME = ["frozen parameters", "parameters in host memory"]


def from_host_memory(rank: int, world_size: int, library: Path, folder: str, names: list[str]) -> None:
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
        with hf_zero.init(3):
            found = losses(lambda: half_frozen_bert(saved), bert_batch, {}, device)
        assert found == plain, "from files"
    assert compiled.hazards() == compiled.crossings() == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "names"),
    [(2, SOME), slow(2, list(CASES)), slow(1, list(CASES))],
    ids=["2", "2-every", "1-every"],
)
def test_a_model_in_host_memory_is_trained_on_the_device_at_stage_3(world_size, names, library, tmp_path):
    bert().save_pretrained(tmp_path / "saved")
    run_on_ranks(
        from_host_memory,
        world_size=world_size,
        time_limit_s=200,
        library=library,
        folder=str(tmp_path),
        names=names,
    )


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


# The stand-in takes no complex numbers apart.
REAL = [dtype for dtype in PLAIN if not dtype.is_complex]


@pytest.mark.parametrize("dtypes", [[torch.int8, torch.int16, torch.bool], slow(REAL)], ids=["some", "all"])
@on_ranks(2)
def test_frozen_parameters_of_any_dtype_are_gathered_as_they_are(rank, world_size, dtypes, library, tmp_path):
    """NCCL sends few dtypes: the others travel as bytes."""
    standin_device.register(library)
    seen: list[list[int]] = []
    with standin_device.process_group(rank, world_size, str(tmp_path)):
        for dtype in dtypes:
            torch.manual_seed(0)
            model = Coded(dtype)
            expected = in_bytes(model.codes)
            model.inner.register_forward_pre_hook(lambda *_, model=model: seen.append(in_bytes(model.codes.cpu())))
            optimizer = torch.optim.SGD(model.inner.parameters(), lr=0.1)
            ZeroEngine(model.to(own_device()), [optimizer], {"stage": 3})
            for _ in range(2):
                model(torch.ones(2, 16, device=own_device())).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            assert seen[-2:] == [expected, expected]


def in_bytes(values: torch.Tensor) -> list[int]:
    return values.contiguous().view(-1).view(torch.uint8).tolist()


# ---- ranks that run layers in different orders ----


class Twins(nn.Module):
    """Two layers of one size, run in the order that the caller says."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, hidden: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
        for index in order:
            hidden = self.layers[index](hidden)
        return hidden.sum()


@on_ranks(2)
def test_ranks_run_layers_in_orders_of_their_own_and_none_gets_the_values_of_another_layer(
    rank, world_size, library, tmp_path, monkeypatch
):
    folder = str(tmp_path)
    standin_device.register(library)
    device = torch.device(standin_device.NAME, rank)
    torch.get_device_module(device).set_device(rank)
    with standin_device.process_group(rank, world_size, folder, timeout_s=60.0):
        model = Twins()
        optimizer = fused_adamw(model)
        settings = {"stage": 3, "unit_modules": ["Linear"], "prefetch_units": 0, "reshard_after_forward": False}
        ZeroEngine(model, [optimizer], settings, device=device)
        batch = torch.ones(2, 8).to(device)
        for order in ((0, 1), (1, 0)):
            # Alike on all ranks, each order is a good one.
            model(batch, order).backward()
            optimizer.step()
            optimizer.zero_grad()
        on_host = copy.deepcopy(model).to("cpu")
        loss = model(batch, (rank, 1 - rank))
        torch.testing.assert_close(loss.cpu(), on_host(batch.cpu(), (rank, 1 - rank)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        # Without the agreed order a backend without tags would mix the two up in silence.
        monkeypatch.setattr(AgreedOrder, "reach", lambda self, number, wanted=True: None)
        with pytest.raises(CommunicationError, match="gathered parameters in different orders"):
            model(batch, (rank, 1 - rank)).backward()


@pytest.mark.parametrize("trains", [True, False], ids=["training", "evaluation"])
@on_ranks(2)
def test_absent_values_read_as_nan_again_after_a_kernel_has_written_to_them(
    rank, world_size, trains, library, tmp_path
):
    """A script's kernel bypasses the guards, and a check of the marks would stop the device's queue."""
    standin_device.register(library)
    with standin_device.process_group(rank, world_size, str(tmp_path)):
        model = Twins().to(own_device())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = ZeroEngine(model, [optimizer], {"stage": 3, "unit_modules": ["Linear"]})
        marks = [unit.memories[slot.bucket].absent for unit, slot in engine.sharded.unit_of.values()]
        for mark in marks:
            mark.zero_()
        with torch.set_grad_enabled(trains):
            loss = model(torch.ones(2, 8, device=own_device()), (0, 1))
        if trains:
            loss.backward()
            optimizer.step()
        assert all(math.isnan(mark.item()) for mark in marks)


@on_ranks(1)
def test_freed_memory_is_given_out_again_only_while_the_stand_in_keeps_it(rank, world_size, library):
    compiled = standin_device.register(library)
    empty = partial(torch.empty, device=own_device())
    before = compiled.held()
    with standin_device.keeping_freed(compiled):
        blocks = [empty(100), empty(100)]
        addresses, held = sorted(block.data_ptr() for block in blocks), compiled.held()
        blocks.clear()
        # The lowest address first, for any size that fits; another size is new memory.
        blocks += [empty(200), empty(50)]
        assert [block.data_ptr() for block in blocks] == addresses and compiled.held() == held
        blocks.append(empty(100_000))
        assert compiled.held() > held
        blocks.clear()
    assert compiled.held() == before
