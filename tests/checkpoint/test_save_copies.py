"""What a save copies from an accelerator: a part at a time, beside training, through two pinned buffers."""

import os
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import standin_device
import torch
from ranks import run_ranks
from shared_ranks import on_ranks
from standin_runs import EXACT, INEXACT, prepared, steps

from hf_zero.checkpoint import pieces
from hf_zero.checkpoint.commit import Background
from hf_zero.checkpoint.pieces import BUFFERS, LivePieces, Piece, write_all
from hf_zero.engine.engine import ZeroEngine
from hf_zero.integrations.state_io import plan_state
from hf_zero.optimizer.loss_scale import GradScaler

pytestmark = [pytest.mark.timeout(150), standin_device.needs_compiler]

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

    os.pwrite, pieces._CHUNK_BYTES = slow, PART_BYTES


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
    pieces._CHUNK_BYTES = PART_BYTES
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


def test_a_save_pins_two_buffers_whatever_the_model_and_waits_for_their_copies_alone(library, tmp_path):
    arguments = {"library": library, "folder": str(tmp_path)}
    [(waits, pinned, state)] = run_ranks(saves_at_once, world_size=1, time_limit_s=60, keyword_arguments=arguments)
    assert waits == {SIDE}
    assert pinned == BUFFERS * PART_BYTES < state / 5
