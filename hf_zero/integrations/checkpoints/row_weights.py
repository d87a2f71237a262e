"""Weights that lie in rows, not in files for `from_pretrained`: back into a model that trains."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch

from ...checkpoint.folder.on_all_ranks import on_all_ranks
from ...checkpoint.format.manifest import WEIGHTS, CheckpointError, Manifest
from ...checkpoint.reader import CheckpointReader
from ...comm.transport import Label
from ...engine.engine import ZeroEngine
from ...engine.units.split_model import read_part
from ...layout.intervals import Interval
from .checkpointing import ZERO_FOLDER
from .progress import progress_bar

_THEN = "Nothing was trained; resume from another checkpoint."


def has_row_weights(checkpoint: Path) -> bool:
    """Whether a checkpoint of ours is of layout `sharded`."""
    return (checkpoint / ZERO_FOLDER).is_dir() and bool(Manifest.read(checkpoint / ZERO_FOLDER).weights)


def load_row_weights(engine: ZeroEngine, checkpoint: Path) -> None:
    """Replaces the model's values by those of a checkpoint of layout `sharded`. Collective.

    Every rank reads its own part; what lies in no bucket (buffers, and below stage 3 frozen parameters) rank 0 reads for all.

    Raises:
        CheckpointError: on every rank: damaged, of another model, or with files that a rank's disk does not have.
    """
    from .placed_weights import saved_tensors_of

    tensors = saved_tensors_of(engine.model)
    bucketed = {id(parameter) for parameter in engine.state.bucketed_parameters()}

    def load_own() -> list[str]:
        with CheckpointReader(checkpoint / ZERO_FOLDER) as reader:
            saved = {name: weight.shape for name, weight in reader.manifest.weights.items()}
            name_of = names_in(
                saved, tensors, {n: engine.state.box_of(t).shape for n, t in tensors.items()}, checkpoint
            )
            with progress_bar("reading weights", is_main=engine.world_groups.rank == 0) as show:

                def read(parameter: torch.Tensor, interval: Interval) -> torch.Tensor:
                    values = reader.read(WEIGHTS, name_of[id(parameter)], interval)
                    show(values.nbytes)
                    return values

                engine.state.load_weights(read)
            others = [name for name in reader.manifest.weights if id(tensors[name]) not in bucketed]
            for name in others:
                if engine.state.group_of(tensors[name]).all_groups.rank > 0:
                    continue
                box = engine.state.box_of(tensors[name])
                values = read_part(box, Interval(0, box.numel), partial(reader.read, WEIGHTS, name))
                tensors[name].detach().copy_(values.view(tensors[name].shape))
            return others

    others = on_all_ranks(engine.world.exchange, load_own, doing=f"read {checkpoint}", then=_THEN)[0]
    engine.state.share_weights()
    for name in others:
        transport = engine.state.group_of(tensors[name]).all_transport
        transport.broadcast(tensors[name].detach(), Label(kind="broadcast loaded", subject=name))


def names_in(
    saved: Mapping[str, tuple[int, ...]],
    tensors: Mapping[str, torch.Tensor],
    shapes: Mapping[str, tuple[int, ...]],
    checkpoint: Path,
) -> dict[int, str]:
    """id of a tensor of the model → its name in the checkpoint.

    Args:
        saved: shapes there.
        shapes: of the model's whole tensors.
    """
    name_of = {id(tensors[name]): name for name in saved if name in tensors}
    strange = [name for name, shape in saved.items() if name not in tensors or shapes[name] != shape]
    missing = [name for name, tensor in tensors.items() if id(tensor) not in name_of]
    if strange or missing:
        name = (strange or missing)[0]
        here = shapes.get(name, "no such tensor")
        raise CheckpointError(
            f"{checkpoint} is of another model: {name!r} has shape {saved.get(name, 'none')} there, and the model has {here}. "
            "Resume with the model config that the checkpoint was made with"
        )
    return name_of
