"""Weights files of a plain folder into a model that is split over ranks: each rank reads its own part."""

from functools import partial
from pathlib import Path

import torch

from ...checkpoint.folder.on_all_ranks import on_all_ranks
from ...checkpoint.format.mapped import mapped_tensors
from ...engine.engine import ZeroEngine
from ...engine.units.split_model import read_part
from ...layout.intervals import Interval
from .placed_weights import saved_tensors_of
from .row_weights import has_row_weights, load_row_weights, names_in
from .weights import weight_files

_THEN = "Nothing was trained; resume from another checkpoint."


def load_weights_into(engine: ZeroEngine, checkpoint: Path) -> None:
    """Replaces the model's values by those of a checkpoint, in whichever layout it has them. Collective.

    Raises:
        CheckpointError: on every rank: damaged, or of another model.
    """
    if has_row_weights(checkpoint):
        load_row_weights(engine, checkpoint)
    else:
        _load_file_weights(engine, checkpoint)


def _load_file_weights(engine: ZeroEngine, checkpoint: Path) -> None:
    """Replaces the values of a model that is split over ranks by those of files that `from_pretrained` reads. Collective.

    Every rank reads its own part.

    Raises:
        CheckpointError: on every rank: damaged, or of another model.
    """
    tensors = saved_tensors_of(engine.model)
    bucketed = {id(parameter) for parameter in engine.state.bucketed_parameters()}

    def load_own() -> None:
        files = [mapped_tensors(checkpoint / file) for file in weight_files(checkpoint)]
        held = {name: values for file in files for name, values in file.items()}
        shapes = {name: engine.state.box_of(tensor).shape for name, tensor in tensors.items()}
        name_of = names_in({name: tuple(v.shape) for name, v in held.items()}, tensors, shapes, checkpoint)

        def read(parameter: torch.Tensor, interval: Interval) -> torch.Tensor:
            return held[name_of[id(parameter)]].reshape(-1)[interval.start : interval.stop]

        engine.state.load_weights(read)
        for tensor in tensors.values():
            if id(tensor) not in bucketed:
                box = engine.state.box_of(tensor)
                values = read_part(box, Interval(0, box.numel), partial(read, tensor))
                tensor.detach().copy_(values.view(tensor.shape))

    on_all_ranks(engine.everyone.exchange, load_own, doing=f"read {checkpoint}", then=_THEN)
    engine.state.share_weights()
