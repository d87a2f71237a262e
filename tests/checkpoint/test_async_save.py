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
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, Trainer, TrainerCallback

from hf_zero.checkpoint import live_pieces
from hf_zero.checkpoint.background import Background
from hf_zero.checkpoint.faults import CheckpointError
from hf_zero.checkpoint.hashes import refuse_changed
from hf_zero.checkpoint.live_pieces import LivePieces, Piece, lay_out, write_all
from hf_zero.checkpoint.manifest import Manifest
from hf_zero.checkpoint.staging import BUFFERS
from hf_zero.checkpoint.verify import checkpoint_faults
from hf_zero.engine.engine import ZeroEngine
from hf_zero.engine.loss_scale import GradScaler
from hf_zero.integrations import trainer_saves
from hf_zero.integrations.state_io import plan_state

pytestmark = pytest.mark.timeout(150)
SAVING = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
AUTO_CLASSES = {"bert": AutoModelForSequenceClassification, "gpt2": AutoModelForCausalLM}


class Snapshots:
    """Has the disk wait for the step behind a save, which so comes while that is under way, and notes what had to be copied."""

    def __init__(self) -> None:
        self.copied_bytes = self.written_bytes = 0
        self.step_comes = threading.Event()

    def install(self) -> None:
        pwrite, snapshot, secure = os.pwrite, live_pieces._snapshot, LivePieces.secure

        def waiting(handle, data, at):
            if threading.current_thread() is not threading.main_thread():
                self.step_comes.wait(60)
            return pwrite(handle, data, at)

        def secured(live):
            self.step_comes.set()
            secure(live)

        def noted(*arguments):
            now, copies = snapshot(*arguments)
            self.copied_bytes += sum(piece.nbytes for piece in copies)
            self.written_bytes += sum(piece.nbytes for piece in now)
            return now, copies

        os.pwrite, live_pieces._snapshot, live_pieces._CHUNK_BYTES = waiting, noted, 8192
        # The models of tests have small tensors only, all of which would be copied at once.
        live_pieces._SMALL_BYTES = 512
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
    """The files that do not tell the time; of ranks' files the tensors, since their headers have the ID of the save."""
    found = {name: (checkpoint / name).read_bytes() for name in ("model.safetensors", "scheduler.pt")}
    for rank in range(2):
        name = f"rank-{rank:05d}-of-00002.safetensors"
        tensors = load_file(checkpoint / "zero" / name)
        found |= {f"{name}: {key}": value.numpy().tobytes() for key, value in tensors.items()}
    return found


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
    trainer_saves._PATIENCE_S, live_pieces._CHUNK_BYTES = 0.5, 1024
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

    def __init__(self, what: str):
        self._what = what

    @torch.no_grad()
    def on_step_begin(self, args, state, control, model, optimizer, **kwargs):
        if state.global_step != 2:
            return
        if self._what == "in place":
            next(iter(model.parameters())).add_(1.0)
        elif self._what == "data":
            next(iter(model.parameters())).data.add_(1.0)
        elif self._what == "numpy":
            next(iter(model.parameters())).numpy()[:] += 1.0
        else:
            next(each["exp_avg"] for each in optimizer.state.values() if each["exp_avg"].nbytes > 4096).data.zero_()


def edits_while_saving(rank: int, world_size: int, output_dir: str, edits: list[str]) -> list[str]:
    as_launched(rank, world_size)
    snapshots = Snapshots()
    snapshots.install()
    said = []
    for what in edits:
        snapshots.step_comes.clear()
        trainer = make_trainer("flag 1", "gpt2", f"{output_dir}/{what}", callbacks=[Edits(what)], **SAVING)
        with pytest.raises(CheckpointError) as raised:
            trainer.train()
        said.append(str(raised.value))
    return said


def test_an_edit_while_a_save_is_under_way_is_an_error_and_no_checkpoint(tmp_path):
    edits = ["in place", "data", "numpy", "optimizer state"]
    for of_rank in run_on_ranks(edits_while_saving, output_dir=str(tmp_path), edits=edits):
        for what, said in zip(edits, of_rank, strict=True):
            assert "was edited while a save was writing it" in said, what
            assert ("'exp_avg of " in said) == (what == "optimizer state")
    assert not any(path.name.startswith("checkpoint-") for path in tmp_path.glob("*/*"))


def count_forward(model: torch.nn.Module, _inputs: tuple) -> None:
    model.forwards.add_(1)


def with_a_counting_buffer(model: torch.nn.Module) -> torch.nn.Module:
    model.register_buffer("forwards", torch.zeros(1000))
    model.register_forward_pre_hook(count_forward)
    return model


class Switches(torch.optim.SGD):
    """Evaluates at half of the weights, as schedule-free optimizers do at an average of them."""

    is_halved = False

    @torch.no_grad()
    def _scale(self, factor: float) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(factor)

    def eval(self) -> None:
        if not self.is_halved:
            self._scale(0.5)
        self.is_halved = True

    def train(self) -> None:
        if self.is_halved:
            self._scale(2.0)
        self.is_halved = False


class SwitchesTrainer(Trainer):
    def create_optimizer(self):
        self.optimizer = Switches(self.model.parameters(), lr=0.1)
        return self.optimizer


def saves_with_forwards_before_the_step(rank: int, world_size: int, output_dir: str, settings: str, **more) -> None:
    as_launched(rank, world_size)
    Snapshots().install()
    make_trainer(
        f"flag {settings}",
        "gpt2",
        output_dir,
        adapt=with_a_counting_buffer,
        gradient_accumulation_steps=2,
        **SAVING,
        **more,
    ).train()


@pytest.mark.parametrize("stage", [2, 3])
def test_buffers_that_the_next_forward_changes_are_saved_as_they_were(stage, tmp_path):
    run_on_ranks(saves_with_forwards_before_the_step, output_dir=str(tmp_path), settings=f"stage={stage}")
    for step in (2, 4):
        saved = load_file(tmp_path / f"checkpoint-{step}" / "model.safetensors")
        assert saved["forwards"].tolist() == [2.0 * step] * 1000


class EditsSmall(TrainerCallback):
    @torch.no_grad()
    def on_step_begin(self, args, state, control, model, **kwargs):
        for parameter in model.parameters():
            if parameter.nbytes <= live_pieces._SMALL_BYTES:
                parameter.add_(1.0)


def test_switches_of_weights_and_edits_of_small_ones_come_after_their_copies_for_a_save(tmp_path):
    switching = {"trainer_class": SwitchesTrainer, "eval_strategy": "steps", "eval_steps": 2}
    switching["callbacks"] = [EditsSmall()]
    for way in ("true", "false"):
        run_on_ranks(
            saves_with_forwards_before_the_step,
            output_dir=str(tmp_path / way),
            settings=f"stage=2,checkpoint.async_save={way}",
            **switching,
        )
    behind, at_once = (load_file(tmp_path / way / "checkpoint-2" / "model.safetensors") for way in ("true", "false"))
    assert all(torch.equal(behind[name], at_once[name]) for name in at_once if name != "forwards")


def test_small_tensors_are_copied_at_once_and_writes_to_large_ones_are_seen(tmp_path):
    def begun(numel: int) -> tuple[torch.Tensor, LivePieces]:
        values = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
        begins = lay_out(tmp_path / "f.safetensors", {"w": (torch.float32, (numel,))})
        piece = Piece(path=tmp_path / "f.safetensors", offset=begins["w"], values=values, name="w")
        return values, LivePieces([piece], 1 << 30, refuse_edits=lambda: None)

    values, live = begun(live_pieces._SMALL_BYTES // 4)
    at_save = values.clone()
    values.zero_()
    live.write()
    assert torch.equal(load_file(tmp_path / "f.safetensors")["w"], at_save)
    rows, columns = 600, 512
    # A run of 2 KiB, a column of a matrix, and one element in a hundred.
    edits = [slice(begin, begin + 512) for begin in (0, 1, 77, 100_000, rows * columns - 512)]
    edits += [slice(column, None, columns) for column in range(0, columns, 50)] + [slice(3, None, 100)]
    for edit in edits:
        for is_secured in (False, True):
            values, live = begun(rows * columns)
            values[edit] += 1.0
            if is_secured:
                live.secure()
            with pytest.raises(CheckpointError, match="'w' was edited while"):
                live.write()


def test_a_bit_that_flips_between_memory_and_file_fails_the_save(tmp_path):
    numel = live_pieces._SMALL_BYTES
    tensors = {name: torch.randn(numel) for name in ("a", "b")}
    path = tmp_path / "f.safetensors"
    begins = lay_out(path, dict.fromkeys(tensors, (torch.float32, (numel,))))
    pieces = [Piece(path=path, offset=begins[name], values=values, name=name) for name, values in tensors.items()]
    write = os.pwrite

    def writes_another_bit(handle: int, content: memoryview, at: int) -> int:
        changed = bytearray(content)
        changed[numel] ^= 1 << 3
        return write(handle, changed, at)

    with mock.patch("os.pwrite", writes_another_bit):
        written = write_all(pieces)
    with pytest.raises(CheckpointError, match="'a' in f\\.safetensors differs from its values in memory"):
        refuse_changed(written)
    # A copy waits for a slow disk, and changes meanwhile.
    live = LivePieces(pieces, 1 << 30, refuse_edits=lambda: None)
    live.secure()
    live.on_written = lambda _: [piece.values.view(torch.uint8)[7].bitwise_xor_(4) for piece in live._left]
    live.write()
    with pytest.raises(CheckpointError, match="'b' in f\\.safetensors differs from its values in memory"):
        refuse_changed(live.written)
    refuse_changed(write_all(pieces))


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

    os.pwrite, live_pieces._CHUNK_BYTES, live_pieces._SMALL_BYTES = slow, PART_BYTES, 512


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
            # Views of state in host memory do not wait for a step's copies, so the state is looked up again, as in each save.
            _, found = plan_state(engine, Path(folder) / "zero")
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
            _, after = plan_state(engine, Path(folder) / "after")
            assert bytes_at(found) == expected != values_of(after)
            for saver in savers.threads - {threading.get_native_id()}:
                assert waits_of(compiled, noted, saver) <= {SIDE}
        assert compiled.pinned() == pinned
        assert compiled.hazards() == []


def saves_at_once(rank: int, world_size: int, library: Path, folder: str) -> tuple[set[str], int, int]:
    """What the host waits for in a save that training waits for, and the memory that it pins, and that the state takes."""
    compiled = standin_device.register(library)
    live_pieces._CHUNK_BYTES = PART_BYTES
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
