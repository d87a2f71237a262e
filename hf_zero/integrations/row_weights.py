"""Weights in the ranks' shards, loaded into a model in training instead of `from_pretrained` files."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..checkpoint.faults import CheckpointError
from ..checkpoint.manifest import WEIGHTS, Manifest, SaveIdentity
from ..checkpoint.on_all_ranks import on_all_ranks
from ..checkpoint.reader import CheckpointReader
from ..comm.waits import Label
from ..engine.engine import ZeroEngine
from ..engine.split_model import read_part
from ..layout.intervals import Interval
from .progress_bars import progress_bar
from .state_io import AFTER_A_FAILED_LOAD, ZERO_FOLDER, refuse_mixed_parts
from .weight_rows import tensors_by_saved_name

if TYPE_CHECKING:
    pass


def has_row_weights(checkpoint: Path, folder: str = ZERO_FOLDER) -> bool:
    """Whether one of our checkpoints has layout `sharded`. `folder`: the model's engine folder inside the checkpoint."""
    return (checkpoint / folder).is_dir() and bool(Manifest.read(checkpoint / folder).weights)


def load_row_weights(engine: ZeroEngine, checkpoint: Path, folder: str = ZERO_FOLDER) -> None:
    """Replaces the model's values by those of a checkpoint with layout `sharded`. Collective.

    Every rank reads its own part. Tensors outside of all buckets (buffers, and below stage 3 frozen parameters) are read by
    rank 0 and broadcast.

    Raises:
        CheckpointError: on every rank, if the checkpoint is damaged, belongs to a different model, or a rank's disk lacks
            files.
    """
    tensors = tensors_by_saved_name(engine.model)
    parameters = engine.state.bucketed_parameters()
    bucketed = {id(parameter) for parameter in parameters}
    saved_here = {id(tensor) for tensor in tensors.values()}
    # For adapters, a checkpoint stores only a checksum of the base model, so the parameters of the base model are left out.
    left_out = {parameter for parameter in parameters if id(parameter) not in saved_here}

    def load_own() -> tuple[list[str], SaveIdentity]:
        with CheckpointReader(checkpoint / folder) as reader:
            saved = {name: weight.shape for name, weight in reader.manifest.weights.items()}
            name_of = names_in(
                saved, tensors, {n: engine.state.box_of(t).shape for n, t in tensors.items()}, checkpoint
            )
            with progress_bar("reading weights", is_main=engine.world_groups.rank == 0) as show:

                def read(parameter: torch.Tensor, interval: Interval) -> torch.Tensor:
                    values = reader.read(WEIGHTS, name_of[id(parameter)], interval)
                    show(values.nbytes)
                    return values

                engine.state.load_weights(read, left_out)
            others = [name for name in reader.manifest.weights if id(tensors[name]) not in bucketed]
            for name in others:
                if engine.state.group_of(tensors[name]).all_groups.rank > 0:
                    continue
                box = engine.state.box_of(tensors[name])
                values = read_part(box, Interval(0, box.numel), partial(reader.read, WEIGHTS, name))
                # Only the first rank with this tensor reads it; the other ranks get the values in the broadcast below.
                tensors[name].detach().copy_(values.view(tensors[name].shape))
            return others, reader.manifest.identity

    # All ranks finish reading before any broadcast: otherwise a rank with a damaged file would leave the others waiting.
    read = on_all_ranks(engine.world.exchange, load_own, doing=f"read {checkpoint}", then=AFTER_A_FAILED_LOAD)
    refuse_mixed_parts(checkpoint, [identity for _, identity in read])
    others, _ = read[0]
    # After the read, each rank has only its own part, and stages 0 to 2 need whole parameters.
    engine.state.share_weights()
    for name in others:
        transport = engine.state.group_of(tensors[name]).all_transport
        transport.broadcast(tensors[name].detach(), Label(kind="broadcast of loaded values", subject=name))


def names_in(
    saved: Mapping[str, tuple[int, ...]],
    tensors: Mapping[str, torch.Tensor],
    shapes: Mapping[str, tuple[int, ...]],
    checkpoint: Path,
) -> dict[int, str]:
    """Maps the id of each of the model's tensors to its name in the checkpoint.

    Args:
        saved: the checkpoint's names and shapes.
        tensors: the model's tensors, by name.
        shapes: shapes of the model's whole tensors.
        checkpoint: the checkpoint's folder, for the error.
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
