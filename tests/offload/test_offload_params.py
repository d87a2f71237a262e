"""Parameters and activations in host memory or in files, alone and beside other settings: the same training."""

import errno
import itertools
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from cells import short_of, slow
from shared_ranks import run_on_ranks
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from training import VOCABULARY, Job, Outcome, fused_adamw, gpt2, gpt2_batch, of_trained, train

import hf_zero
from hf_zero import device
from hf_zero.allocation import PAGE_BYTES, ResizedReservation
from hf_zero.buckets import gathered_memory
from hf_zero.buckets.offloaded_memory import OffloadedMemory
from hf_zero.config import ConfigError, ZeroConfig
from hf_zero.engine.engine import ZeroEngine
from hf_zero.integrations.announce import announce, state_plan
from hf_zero.offload.files import OffloadError

pytestmark = pytest.mark.timeout(180)
BASE = {"stage": 3, "bucket_bytes": "20KiB"}


def moved(params: str, optimizer: str, path: object, **more) -> dict:
    """Settings with parameters and optimizer state in these places."""
    offload = {"params": params, "optimizer": optimizer}
    if "nvme" in offload.values():
        offload["nvme_path"] = str(path)
    return {**BASE, "offload": offload, **more}


CLIPPED = Job(max_norm=0.3, accumulation=2)
FUSED_OF_TRAINED = partial(of_trained, partial(torch.optim.AdamW, lr=1e-3, fused=True))


def compared(rank: int, world_size: int, jobs: dict[str, Job], variants: list[dict], plain: dict) -> list[tuple]:
    """(job, settings, outcome, outcome without offload), in one process group."""
    found = []
    for name, job in jobs.items():
        expected = train(rank, world_size, replace(job, settings=plain))
        found += [(name, s, train(rank, world_size, replace(job, settings=s)), expected) for s in variants]
    return found


def assert_bitwise(found: list[tuple[str, dict, Outcome, Outcome]]) -> None:
    for name, settings, ours, theirs in found:
        assert ours.equals(theirs), f"{name}, {settings}: losses differ by {ours.loss_error(theirs)}"
        assert ours.norms == theirs.norms, f"{name}, {settings}"


PAIRS = list(itertools.product(("cpu", "nvme"), ("none", "cpu", "nvme")))


def test_memory_that_an_accelerators_allocator_takes_back_changes_nothing(tmp_path):
    def resized(
        numel: int, dtype: torch.dtype, device: torch.device, kept: slice, *, separate_own: bool = False
    ) -> ResizedReservation:
        return ResizedReservation(numel, dtype, kept, device)

    with mock.patch.object(gathered_memory, "reserve", resized):
        variants = [moved("cpu", "cpu", tmp_path), moved("nvme", "nvme", tmp_path)]
        assert_bitwise(compared(0, 1, {"clipped": replace(CLIPPED, steps=2)}, variants, BASE))


# Scripts


def built(settings: dict, make=gpt2):
    torch.manual_seed(0)
    model = make().train()
    optimizer = fused_adamw(model)
    return model, optimizer, ZeroEngine(model, [optimizer], settings)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int = 0) -> float:
    loss = model(**gpt2_batch(torch.Generator().manual_seed(seed), 2)).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def what_a_script_sees(rank: int, settings: dict, folder: Path) -> dict[str, object]:
    """Everything that a script does with whole parameters, between steps; what it saw."""
    model, optimizer, engine = built(settings)
    seen: dict[str, object] = {"losses": [step(model, optimizer, rank)]}
    with hf_zero.gathered(model.transformer.h[1]):
        seen["a look"] = model.transformer.h[1].attn.c_attn.weight.detach().clone()
    with hf_zero.gathered(model.transformer.wpe, writeback=True), torch.no_grad():
        model.transformer.wpe.weight.mul_(0.5)
    seen["losses"].append(step(model, optimizer, 10 + rank))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    state["transformer.h.0.mlp.c_fc.bias"] += 1.0
    model.load_state_dict(state)
    seen["losses"].append(step(model, optimizer, 20 + rank))
    with hf_zero.unsharded(model), torch.no_grad():
        model.eval()
        prompt = torch.arange(4)[None] + rank
        seen["tokens"] = model.generate(input_ids=prompt, max_new_tokens=4, do_sample=False, pad_token_id=0)
        model.train()
    # transformers writes on the main process alone.
    model.save_pretrained(folder)
    seen["saved"] = type(model).from_pretrained(folder).state_dict() if rank == 0 else {}
    seen["weights"] = {
        (id_of(model, own.parameter), own.interval.start): own.values.clone() for own in engine.state.own_weights()
    }
    seen["rows"] = {(row.kind, row.name): row.tensor.clone() for row in engine.state.rows()}
    seen["gradient state"] = engine.full_state(model.transformer.wte.weight)["exp_avg"]
    torch.manual_seed(3)
    engine.resize_embeddings(VOCABULARY + 16)
    seen["losses"].append(step(model, optimizer, 30 + rank))
    engine.close()
    seen["closed"] = [parameter.detach().clone() for parameter in model.parameters()]
    return seen


def id_of(model: nn.Module, parameter: nn.Parameter) -> str:
    return next(name for name, p in model.named_parameters() if p is parameter)


def scripts(rank: int, world_size: int, path: str, more: dict) -> list[tuple[tuple, list[str]]]:
    """Each pair of places, and what was seen otherwise than without offload."""
    folder = Path(path) / f"saved-{rank}"
    expected = what_a_script_sees(rank, {**BASE, **more}, folder)
    found = []
    for pair in PAIRS:
        seen = what_a_script_sees(rank, moved(*pair, path, **more), folder)
        found.append((pair, [what for what in expected if not equal(seen[what], expected[what])]))
    return found


def equal(ours: object, theirs: object) -> bool:
    if isinstance(theirs, torch.Tensor):
        return torch.equal(ours, theirs)
    if isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(equal(ours[key], theirs[key]) for key in theirs)
    if isinstance(theirs, list):
        return len(ours) == len(theirs) and all(equal(a, b) for a, b in zip(ours, theirs))
    return ours == theirs


@pytest.mark.parametrize("more", [{}, slow({"param_dtype": "bfloat16"}, id="bf16")], ids=["fp32", None])
@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_script_sees_what_it_sees_without_offload(world_size, more, tmp_path):
    for found in run_on_ranks(scripts, world_size=world_size, path=str(tmp_path), more=more):
        assert found == [(pair, []) for pair in PAIRS]
    assert not list(tmp_path.glob("hf_zero-run-*"))


# Where everything is


def resident_pages(tensor: torch.Tensor) -> int:
    with open("/proc/self/pagemap", "rb") as pagemap:
        first = tensor.data_ptr() // PAGE_BYTES
        pages = -(-(tensor.data_ptr() + tensor.nbytes) // PAGE_BYTES) - first
        pagemap.seek(8 * first)
        entries = pagemap.read(8 * pages)
    return sum(int.from_bytes(entries[at : at + 8], "little") >> 63 for at in range(0, len(entries), 8))


@pytest.mark.parametrize(("params", "optimizer"), PAIRS)
def test_between_steps_nothing_of_a_layer_is_on_the_device(params, optimizer, tmp_path, capsys):
    model, stock, engine = built(moved(params, optimizer, tmp_path))
    for seed in range(2):
        step(model, stock, seed)
    numel = sum(bucket.layout.shard_numel for bucket in engine.buckets)
    for bucket in engine.buckets:
        assert isinstance(bucket.memory, OffloadedMemory)
        assert resident_pages(bucket.flat) == 0
        assert bucket.own.untyped_storage().nbytes() >= bucket.own.nbytes if params == "cpu" else True
        assert bucket.own.untyped_storage().nbytes() == 4 if params == "nvme" else True
    report = engine.memory_report()
    rows = {row.kind: row for row in report.rows}
    assert rows["parameters"].where == {"cpu": "host memory", "nvme": "NVMe"}[params]
    assert rows["parameters"].bytes == 4 * numel
    # A shard that lies where the optimizer steps, or in the file of its state, is its own master.
    assert rows["fp32 master"].bytes == (4 * numel if optimizer == "none" else 0)
    assert rows["optimizer state"].bytes == 8 * sum(row.tensor.numel() for b in engine.buckets for row in b.rows)
    root, *layers = engine.sharded.schedule.units
    gathered = rows["gathered parameters, at most"].bytes
    assert gathered <= root.passing_bytes + 2 * max(layer.passing_bytes for layer in layers)
    in_files = {("nvme", "nvme"): 12, ("nvme", "cpu"): 4, ("nvme", "none"): 4, ("cpu", "nvme"): 8}
    per_element = in_files.get((params, optimizer), 0)
    assert (report.traffic is not None) is bool(per_element)
    if per_element:
        padding = 3 * PAGE_BYTES * len(engine.buckets)
        assert 0 <= report.traffic.held_bytes - per_element * numel <= padding
        assert 0 <= report.traffic.written_bytes_a_step - per_element * numel <= padding
    assert report.total_bytes == sum(row.bytes for row in report.rows if row.where != "NVMe")
    assert state_plan(engine).parameters == rows["parameters"].bytes
    announce(engine, "nobody")
    said = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert {"cpu": "iB a rank in host memory", "nvme": "iB a rank, with all in files: "}[params] in said
    assert ("in files" in said) is bool(per_element)


def with_lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False)
    return get_peft_model(gpt2(), config)


@pytest.mark.parametrize("optimizer", short_of(["none", "cpu", "nvme"], ["nvme"]))
def test_a_frozen_base_in_files_is_read_and_never_written_back(optimizer, tmp_path):
    job = Job(make_model=with_lora, steps=3, make_optimizer=FUSED_OF_TRAINED)
    [(_, _, ours, theirs)] = compared(0, 1, {"lora": job}, [moved("nvme", optimizer, tmp_path)], BASE)
    assert ours.equals(theirs)
    torch.manual_seed(0)
    model = with_lora()
    stock = FUSED_OF_TRAINED(model)
    engine = ZeroEngine(model, [stock], moved("nvme", optimizer, tmp_path))
    files = engine.parameter_tier.files
    frozen = {b.name for u in engine.sharded.schedule.units for b in u.buckets if not b.trained}
    of_base = [
        shard for shard in files.shards if shard.file.path.stem.removesuffix("-parameters").replace("-", " ") in frozen
    ]
    assert len(of_base) == len(frozen)
    step(model, stock)
    before = [shard.written_bytes for shard in of_base], [shard.read_bytes for shard in of_base]
    step(model, stock)
    assert [shard.written_bytes for shard in of_base] == before[0]
    assert all(after > former for after, former in zip([shard.read_bytes for shard in of_base], before[1]))
    rows = {row.kind: row for row in engine.memory_report().rows}
    assert rows["frozen parameters"].where == "NVMe"
    assert rows["frozen parameters"].bytes >= sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    engine.close()


@pytest.mark.parametrize("params", ["cpu", "nvme"])
def test_pretrained_weights_go_from_their_files_to_the_tier(params, tmp_path):
    torch.manual_seed(3)
    gpt2().save_pretrained(tmp_path / "pretrained")
    losses = []
    for settings in (BASE, moved(params, "nvme", tmp_path)):
        with hf_zero.init(settings):
            model = hf_zero_model(tmp_path / "pretrained")
        optimizer = fused_adamw(model)
        engine = ZeroEngine(model, [optimizer], settings)
        losses.append([step(model, optimizer, seed) for seed in range(3)])
        engine.close()
    assert losses[0] == losses[1]


def hf_zero_model(folder: Path) -> nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder).train()


# What goes wrong


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_it_is_of_stage_3(stage):
    with pytest.raises(ConfigError, match=rf"`offload.params: cpu` needs stage 3.*`stage` is {stage}.*Set `stage: 3`"):
        ZeroConfig.from_dict({"stage": stage, "offload": {"params": "cpu"}})


def test_too_little_host_memory_or_disk_is_refused_with_the_setting(monkeypatch, tmp_path):
    torch.manual_seed(0)
    gpt2().save_pretrained(tmp_path / "pretrained")
    monkeypatch.setattr(device.psutil, "virtual_memory", lambda: type("Memory", (), {"available": 1000})())
    with hf_zero.init(BASE):
        model = hf_zero_model(tmp_path / "pretrained")
    with pytest.raises(MemoryError, match=r"`offload.params: cpu` needs .* of host memory for each of 1 ranks"):
        ZeroEngine(model, [torch.optim.SGD(model.parameters(), lr=0.1)], moved("cpu", "none", tmp_path))
    monkeypatch.setattr("hf_zero.engine.room.free_disk_bytes", lambda _: 1000)
    with pytest.raises(OSError, match=r"`offload.params: nvme` needs .* GiB below .* too little"):
        built(moved("nvme", "none", tmp_path))


def test_a_file_that_was_cut_ends_the_run_with_its_path(tmp_path):
    model, optimizer, engine = built(moved("nvme", "none", tmp_path))
    step(model, optimizer)
    # A look has what is being written behind the step on the disk.
    assert all(own.values.isfinite().all() for own in engine.state.own_weights())
    path = max(engine.parameter_tier.files.folder.path.glob("*.state"), key=lambda path: path.stat().st_size)
    os.truncate(path, 0)
    with pytest.raises(OffloadError, match=rf"{path}: only 0 of \d+ bytes .* could be read"):
        step(model, optimizer)


def test_a_write_behind_the_step_that_fails_is_told_at_the_next_forward(monkeypatch, tmp_path):
    model, optimizer, _ = built(moved("nvme", "none", tmp_path))
    step(model, optimizer)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("hf_zero.offload.files.os.pwritev", full)
    with pytest.raises(OffloadError, match=r"could be written \(No space left on device\)"):
        for _ in range(2):
            step(model, optimizer)


# ---- activations ----

MOVED = {"activations": "cpu"}


class Storages(TorchDispatchMode):
    """Every storage that an operation makes."""

    def __init__(self):
        super().__init__()
        self._seen: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if type(tensor) is torch.Tensor:
                storage = tensor.untyped_storage()
                self._seen[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return out

    def alive_bytes(self, but: set[int]) -> int:
        return sum(n for key, (ref, n) in self._seen.items() if key not in but and not ref.expired())


def held_after_forward(offload: dict) -> tuple[int, ZeroEngine, torch.Tensor]:
    torch.manual_seed(0)
    model = gpt2().train()
    engine = ZeroEngine(model, [fused_adamw(model)], {"stage": 2, "offload": offload})
    lasting = [*model.parameters(), *model.buffers(), *(bucket.flat for bucket in engine.buckets)]
    with Storages() as storages:
        loss = model(**gpt2_batch(torch.Generator().manual_seed(0), 8)).loss
    copies = {moved._values.untyped_storage()._cdata for moved in engine.activations.moved()} if offload else set()
    held = storages.alive_bytes(copies | {tensor.untyped_storage()._cdata for tensor in lasting})
    return held, engine, loss


def test_bytes_held_on_the_device_between_forward_and_backward_fall():
    plain, _, _ = held_after_forward({})
    held, engine, loss = held_after_forward(MOVED)
    print(f"\nheld {held} bytes of {plain}; in host memory {engine.activations.held_bytes}")
    assert held < 0.25 * plain
    assert engine.activations.held_bytes > 0.6 * plain
    assert {row.kind: row.where for row in engine.memory_report().rows}["activations, at most"] == "host memory"
    loss.backward()
    assert engine.activations.held_bytes == 0


class Shares(nn.Module):
    """Saves three parts of one storage, and a tensor that it writes into after it was saved."""

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(64, 192)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x).split(64, -1)
        attended = torch.softmax(q @ k.t(), -1) @ v
        out = attended * 2
        kept = out.exp()
        return (kept + out.relu_()).sum()


def test_a_storage_moves_once_and_a_write_after_the_save_is_seen():
    gradients = []
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    for offload in ({}, MOVED):
        torch.manual_seed(0)
        model = Shares()
        engine = ZeroEngine(model, [torch.optim.SGD(model.parameters(), lr=0.1)], {"stage": 0, "offload": offload})
        loss = model(x)
        if offload:
            # The input, the projection once, softmax, exp and relu.
            assert engine.activations.held_bytes == 4 * 64 * (64 + 192 + 64 + 64 + 64)
        loss.backward()
        gradients.append(model.project.weight.grad.clone())
    assert torch.equal(*gradients)
    loss = model(x)
    with torch.no_grad():
        model.project.weight.add_(1.0)
    x.requires_grad_()
    loss = model(x)
    with torch.no_grad():
        model.project.weight.add_(1.0)
    with pytest.raises(RuntimeError, match="was modified after the forward"):
        loss.backward()
