"""Checkpoints written behind training: the bytes of a save that training waits for, and copies from an accelerator in parts."""

import os
import signal
import threading
import time
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import standin_device
import torch
from cells import short_of
from safetensors import safe_open
from safetensors.torch import load_file
from shared_ranks import on_ranks, run_on_ranks
from standin_runs import EXACT, INEXACT, prepared, steps
from trainer_job import as_launched, make_trainer
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, TrainerCallback

from hf_zero.checkpoint import writer
from hf_zero.checkpoint.commit import Background
from hf_zero.checkpoint.files import CheckpointError
from hf_zero.checkpoint.manifest import Manifest
from hf_zero.checkpoint.structure import checkpoint_faults
from hf_zero.checkpoint.writer import BUFFERS, LivePieces, Piece, lay_out, write_all
from hf_zero.engine.engine import ZeroEngine
from hf_zero.integrations import trainer_saves
from hf_zero.integrations.state_io import plan_state
from hf_zero.optimizer.loss_scale import GradScaler

pytestmark = pytest.mark.timeout(150)
SAVING = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
AUTO_CLASSES = {"bert": AutoModelForSequenceClassification, "gpt2": AutoModelForCausalLM}


class Snapshots:
    """Has the disk wait for the step behind a save, which so comes while that is under way, and notes what had to be copied."""

    def __init__(self) -> None:
        self.copied_bytes = self.written_bytes = 0

    def install(self) -> None:
        pwrite, snapshot, secure = os.pwrite, writer._snapshot, LivePieces.secure
        step_comes = threading.Event()

        def waiting(handle, data, at):
            if threading.current_thread() is not threading.main_thread():
                step_comes.wait(60)
            return pwrite(handle, data, at)

        def secured(live):
            step_comes.set()
            secure(live)

        def noted(*arguments):
            now, copies = snapshot(*arguments)
            self.copied_bytes += sum(piece.nbytes for piece in copies)
            self.written_bytes += sum(piece.nbytes for piece in now)
            return now, copies

        os.pwrite, writer._snapshot, writer._CHUNK_BYTES = waiting, noted, 8192
        LivePieces.secure = secured


def saves(
    rank: int, world_size: int, output_dir: str, settings: str, model: str = "gpt2", free: int | None = None
) -> tuple[int, int]:
    as_launched(rank, world_size)
    if free is not None:
        trainer_saves.free_bytes = lambda device: free
    snapshots = Snapshots()
    snapshots.install()
    make_trainer(f"flag {settings}", model, output_dir, **SAVING).train()
    return snapshots.copied_bytes, snapshots.written_bytes


def contents(checkpoint: Path) -> dict[str, bytes]:
    """The files that do not tell the time."""
    names = ["model.safetensors", "scheduler.pt", *(f"zero/rank-{rank:05d}-of-00002.safetensors" for rank in range(2))]
    return {name: (checkpoint / name).read_bytes() for name in names}


@pytest.mark.short_cells("3")
@pytest.mark.parametrize(
    "stage", [pytest.param(0, marks=pytest.mark.slow), 1, pytest.param(2, marks=pytest.mark.slow), 3]
)
def test_what_is_written_behind_training_is_what_was_there_at_the_save(stage, tmp_path):
    at_once, copying, tight = (tmp_path / name for name in ("at once", "copying", "tight"))
    run_on_ranks(saves, output_dir=str(at_once), settings=f"stage={stage},checkpoint.async_save=false")
    by_copying = run_on_ranks(saves, output_dir=str(copying), settings=f"stage={stage}")
    limited = run_on_ranks(saves, output_dir=str(tight), settings=f"stage={stage}", free=2 * 8192)
    assert all(copied > 0 and written == 0 for copied, written in by_copying[:1])
    assert all(copied <= 2 * 8192 and written > 0 for copied, written in limited[:1])
    for folder in (copying, tight):
        for step in (2, 4):
            checkpoint = folder / f"checkpoint-{step}"
            assert checkpoint_faults(checkpoint, "zero") == []
            assert contents(checkpoint) == contents(at_once / checkpoint.name)


class Leaves(TrainerCallback):
    def on_save(self, args, state, control, **kwargs):
        os.chdir("/")


def leaves_its_folder(rank: int, world_size: int, folder: str) -> None:
    as_launched(rank, world_size)
    os.chdir(folder)
    Snapshots().install()
    make_trainer("flag 2", "gpt2", "run", callbacks=[Leaves()], **{**SAVING, "max_steps": 3}).train()


def test_a_script_may_go_to_another_folder_while_a_save_is_under_way(tmp_path):
    run_on_ranks(leaves_its_folder, world_size=1, folder=str(tmp_path))
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["checkpoint-2"]
    assert checkpoint_faults(tmp_path / "run" / "checkpoint-2", "zero") == []


class Interrupted(TrainerCallback):
    """Ctrl-C in the step behind the second save."""

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 4:
            os.kill(os.getpid(), signal.SIGINT)


def is_interrupted(rank: int, world_size: int, output_dir: str) -> None:
    as_launched(rank, world_size)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    trainer_saves._PATIENCE_S, writer._CHUNK_BYTES = 0.5, 1024
    trainer = make_trainer("flag 2", "gpt2", output_dir, callbacks=[Interrupted()], **{**SAVING, "max_steps": 6})
    pwrite = os.pwrite

    def slow(handle, data, at):
        # Thousands of parts: to write them all would take minutes.
        if threading.current_thread() is not threading.main_thread() and trainer.state.global_step == 4:
            time.sleep(1.0)
        return pwrite(handle, data, at)

    os.pwrite = slow
    with pytest.raises(KeyboardInterrupt):
        trainer.train()


def test_an_interrupted_run_ends_soon_without_the_save_under_way(tmp_path):
    run_on_ranks(is_interrupted, output_dir=str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-2"]
    assert checkpoint_faults(tmp_path / "checkpoint-2", "zero") == []


class Watches(TrainerCallback):
    """Compares each checkpoint's weights with the live model's, and counts what was gathered for it."""

    def __init__(self):
        self.trainer = None
        self.gathered_bytes: list[int] = []

    def on_step_end(self, args, state, control, **kwargs):
        [engine] = self.trainer.accelerator.zero_engines
        engine.finish_parameters()
        self._before = engine.comm_report().bytes_by_verb().get("all-gather", 0)

    def on_save(self, args, state, control, **kwargs):
        [engine] = self.trainer.accelerator.zero_engines
        self.gathered_bytes.append(engine.comm_report().bytes_by_verb().get("all-gather", 0) - self._before)
        live = {name: value.clone() for name, value in self.trainer.model.state_dict().items()}
        self.trainer._checkpoint_saver.finish()
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        saved = load_file(folder / "model.safetensors")
        for name, value in saved.items():
            assert value.dtype == live[name].dtype and torch.equal(value, live[name]), name
        # As save_pretrained names them, ties and all.
        self.trainer.save_model(f"{args.output_dir}/whole-{self.trainer.args.process_index}")
        if self.trainer.args.should_save:
            whole = load_file(f"{args.output_dir}/whole-0/model.safetensors")
            assert whole.keys() == saved.keys()
            assert all(torch.equal(whole[name], saved[name]) for name in saved)
            with safe_open(folder / "model.safetensors", framework="pt") as opened:
                assert opened.metadata() == {"format": "pt"}


def saves_as_transformers_does(rank: int, world_size: int, output_dir: str, settings: str, model: str) -> list[int]:
    as_launched(rank, world_size)
    watches = Watches()
    trainer = make_trainer(f"flag {settings}", model, output_dir, callbacks=[watches], **SAVING)
    watches.trainer = trainer
    if "param_dtype" not in settings:
        # Frozen parameters keep their dtype, and layers refuse a mixture.
        next(iter(trainer.model.parameters())).requires_grad_(False)
    trainer.model.register_buffer("extra", torch.arange(5.0))
    trainer.train()
    assert len(watches.gathered_bytes) == 2
    return watches.gathered_bytes


@pytest.mark.parametrize("model", [pytest.param("bert", marks=pytest.mark.slow), "gpt2"])
@pytest.mark.parametrize(
    "settings",
    short_of(
        ["stage=0", "stage=1", "stage=2,param_dtype=bfloat16", "stage=3"], ["stage=2,param_dtype=bfloat16", "stage=3"]
    ),
)
def test_every_rank_writes_its_part_of_the_files_that_transformers_would_write(settings, model, tmp_path):
    gathered = run_on_ranks(saves_as_transformers_does, output_dir=str(tmp_path), settings=settings, model=model)
    assert gathered == [[0, 0], [0, 0]]
    loaded = AUTO_CLASSES[model].from_pretrained(tmp_path / "checkpoint-4")
    assert not any(parameter.isnan().any() for parameter in loaded.parameters())
    assert Manifest.read(tmp_path / "checkpoint-4" / "zero").files["model.safetensors"].size > 0


class Edits(TrainerCallback):
    """Between a save and the next step. A callback behind the save itself would come when all has been written."""

    def on_step_begin(self, args, state, control, model, **kwargs):
        if state.global_step == 2:
            with torch.no_grad():
                next(iter(model.parameters())).add_(1.0)


def edits_while_saving(rank: int, world_size: int, output_dir: str) -> str:
    as_launched(rank, world_size)
    Snapshots().install()
    trainer = make_trainer("flag 1", "gpt2", output_dir, callbacks=[Edits()], **SAVING)
    with pytest.raises(CheckpointError) as raised:
        trainer.train()
    return str(raised.value)


def test_an_edit_while_a_save_is_under_way_is_an_error_and_no_checkpoint(tmp_path):
    said = run_on_ranks(edits_while_saving, output_dir=str(tmp_path))
    assert all("was edited between a save and the next optimizer step" in each for each in said)
    assert list(tmp_path.iterdir()) == []


def test_pieces_that_cannot_be_copied_or_written_fail_the_save_and_not_the_step(tmp_path):
    begins = lay_out(tmp_path / "f.safetensors", {"w": (torch.float32, (10,))})
    values = torch.arange(10.0)
    live = LivePieces(
        [Piece(path=tmp_path / "f.safetensors", offset=begins["w"], values=values)], 0, refuse_edits=lambda: None
    )
    with mock.patch("os.pwrite", side_effect=OSError(28, "No space left on device")):
        live.secure()
    with pytest.raises(OSError, match="No space left"):
        live.write()


def test_a_file_laid_out_and_filled_by_pieces_is_what_safetensors_reads(tmp_path):
    tensors = {
        "half": torch.randn(3, 5).bfloat16(),
        "byte": torch.tensor([True, False, True]),
        "wide": torch.randn(4, 2, dtype=torch.float64),
        "empty": torch.zeros(0, 3),
        "one": torch.tensor(7, dtype=torch.int64),
    }
    path = tmp_path / "f.safetensors"
    begins = lay_out(path, {n: (t.dtype, t.shape) for n, t in tensors.items()}, {"format": "pt"})
    for name, tensor in reversed(tensors.items()):
        flat = tensor.reshape(-1)
        for i in range(flat.numel()):
            Piece(path=path, offset=begins[name] + i * flat.itemsize, values=flat[i : i + 1]).write()
    read = load_file(path)
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensor) and read[name].dtype == tensor.dtype for name, tensor in tensors.items())
    assert all(begins[name] % tensor.itemsize == 0 for name, tensor in tensors.items())


# ---- copies from an accelerator ----

PART_BYTES = 8192
SAVED = {
    "stage 2": EXACT["stage 2"],
    "stage 3": EXACT["stage 3"],
    "half of it in host memory": EXACT["half of it"],
    "8-bit moments": INEXACT["8-bit moments"][0],
    "bf16": INEXACT["bf16"][0],
}
MORE = ("stage 3", "bf16")


def in_small_parts() -> None:
    """Parts of a save are small, and the disk is slow."""
    pwrite = os.pwrite

    def slow(handle, data, at):
        time.sleep(0.001)
        return pwrite(handle, data, at)

    os.pwrite, writer._CHUNK_BYTES = slow, PART_BYTES


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, engine: ZeroEngine, seeds: range) -> list:
    return steps(model, optimizer, engine, GradScaler(standin_device.NAME, enabled=False), seeds)


def values_of(found: list[Piece]) -> list[bytes]:
    return [piece.values.detach().cpu().view(torch.uint8).numpy().tobytes() for piece in found]


def bytes_at(found: list[Piece]) -> list[bytes]:
    return [piece.path.read_bytes()[piece.offset : piece.offset + piece.nbytes] for piece in found]


def waits_of(compiled, since: int, thread: int) -> set[str]:
    return {what for waiter, what in compiled.waits()[since:] if waiter == thread}


class Savers:
    """The threads that have written parts of a save."""

    def __init__(self) -> None:
        self.threads: set[int] = set()

    def __call__(self, _nbytes: int) -> None:
        self.threads.add(threading.get_native_id())


def secure(live: LivePieces, *_: object) -> None:
    live.secure()


SIDE = "an event of a side stream"


@standin_device.needs_compiler
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in MORE else n for n in SAVED])
@on_ranks(1)
def test_a_save_behind_training_has_the_bytes_of_the_moment_and_stops_no_queue(
    rank, world_size, name, library, tmp_path
):
    folder = str(tmp_path)
    compiled = standin_device.register(library)
    in_small_parts()
    with standin_device.process_group(rank, world_size, folder):
        model, optimizer, engine = prepared({"bucket_bytes": "20KiB", **SAVED[name]})
        train(model, optimizer, engine, range(2))
        noted, pinned = len(compiled.waits()), compiled.pinned()
        _, found = plan_state(engine, Path(folder) / "zero")
        # `step` of all parameters at once, where a fused optimizer has it on the device.
        assert [what for _, what in compiled.waits()[noted:]].count("a value") == 0
        assert any(piece.values.device.type != "cpu" for piece in found)
        for snapshot_bytes in (1 << 30, 3 * PART_BYTES):
            expected = values_of(found)
            live = LivePieces(found, snapshot_bytes, refuse_edits=lambda: None)
            savers, background = Savers(), Background(engine.device)
            live.on_written = savers
            secured = optimizer.register_step_pre_hook(partial(secure, live))
            noted = len(compiled.waits())
            background.start(live.write)
            train(model, optimizer, engine, range(2, 4))
            background.finish()
            secured.remove()
            assert bytes_at(found) == expected != values_of(found)
            for saver in savers.threads - {threading.get_native_id()}:
                assert waits_of(compiled, noted, saver) <= {SIDE}
        assert compiled.pinned() == pinned
        assert compiled.hazards() == []


def saves_at_once(rank: int, world_size: int, library: Path, folder: str) -> tuple[set[str], int, int]:
    """What the host waits for in a save that training waits for, and the memory that it pins, and that the state takes."""
    compiled = standin_device.register(library)
    writer._CHUNK_BYTES = PART_BYTES
    with standin_device.process_group(rank, world_size, folder):
        model, optimizer, engine = prepared({"bucket_bytes": "20KiB", "stage": 2})
        train(model, optimizer, engine, range(1))
        _, found = plan_state(engine, Path(folder) / "zero")
        noted, pinned = len(compiled.waits()), compiled.pinned()
        write_all(found)
        waits = {what for _, what in compiled.waits()[noted:]}
        assert bytes_at(found) == values_of(found)
        assert compiled.pinned() == pinned and compiled.hazards() == []
        return waits, compiled.most_pinned() - pinned, sum(piece.nbytes for piece in found)


@standin_device.needs_compiler
def test_a_save_pins_two_buffers_whatever_the_model_and_waits_for_their_copies_alone(library, tmp_path):
    [(waits, pinned, state)] = run_on_ranks(saves_at_once, world_size=1, library=library, folder=str(tmp_path))
    assert waits == {SIDE}
    assert pinned == BUFFERS * PART_BYTES < state / 5
