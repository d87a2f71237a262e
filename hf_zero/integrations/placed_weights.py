"""Writes each rank's weights into place in shared safetensors files."""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, Trainer
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, is_peft_available

from ..buckets.sharded import ShardedParametersError
from ..checkpoint.commit import Disk, on_all_ranks
from ..checkpoint.manifest import WEIGHTS, SavedWeight
from ..checkpoint.writer import Piece, dtype_name, lay_out
from ..comm.all_or_none import Exchange
from ..engine.engine import ZeroEngine
from ..hooks import WeakHook, replaced
from ..layout.slots import Interval
from .state_io import WeightsPlan, saved_tensors_of

# ---- Model files that all ranks write at once, laid out by transformers itself ----
#
# transformers decides about names, tied weights, files and index: `save_pretrained` runs with tensors of the right shapes
# that nobody ever touches, and where it would write a file, that file is laid out instead, or only noted. Each rank then
# writes the bytes of its own shard. Nothing is gathered, and no rank holds more than it held.

AFTER_A_FAILED_SAVE = "The former checkpoints are as they were, and training state is unharmed."


@dataclass(frozen=True, kw_only=True)
class _SavedFile:
    """A weights file that `save_pretrained` was about to write: saved name → the tensor's first name in the model."""

    path: Path
    names: dict[str, str]
    metadata: dict[str, str] | None


class Layout(ABC):
    """A layout of the model's values in a checkpoint, chosen for each save."""

    def plan(
        self, trainer: Trainer, engine: ZeroEngine, folder: Path, disk: Disk, exchange: Exchange
    ) -> WeightsPlan | None:
        """Saves everything of the model but its values; returns this rank's part of those. Collective.

        Returns:
            None on every rank where transformers would put the model's tensors together or take them apart (experts that
            are one tensor in the model and many in its files), and where the layout has no place for them: nothing useful is
            in the folder then.

        Raises:
            CheckpointError: on every rank, when one could not make the files.
        """
        tensors = saved_tensors_of(engine.model)

        def make_files() -> dict[str, Any] | None:
            # Parameters have the dtype of their values in here, which is not that of forward and backward everywhere.
            with engine.sharded.gathered.lend_names():
                files = _save_without_values(trainer, tensors, folder) if disk.leads else None
                return None if files is None else self._make(files, tensors, folder)

        # One rank of a disk lays the files out. All ranks need the offsets, and none writes before the files are there.
        places = on_all_ranks(exchange, make_files, doing=f"write the model to {folder}", then=AFTER_A_FAILED_SAVE)[0]
        return None if places is None else self._plan(engine, tensors, places, folder)

    @abstractmethod
    def _make(
        self, files: list[_SavedFile], tensors: Mapping[str, torch.Tensor], folder: Path
    ) -> dict[str, Any] | None:
        """Makes this layout's files; returns the place of each tensor, by its first name in the model.

        None where the layout has no place for each.
        """

    @abstractmethod
    def _plan(
        self, engine: ZeroEngine, tensors: Mapping[str, torch.Tensor], places: dict[str, Any], folder: Path
    ) -> WeightsPlan: ...


class HfLayout(Layout):
    """Straight into the files that `from_pretrained` reads; needs a disk that all ranks see."""

    def _make(
        self, files: list[_SavedFile], tensors: Mapping[str, torch.Tensor], folder: Path
    ) -> dict[str, tuple[str, int]]:
        places = {}
        for file in files:
            shapes = {name: (tensors[first].dtype, tensors[first].shape) for name, first in file.names.items()}
            begins = lay_out(file.path, shapes, file.metadata)
            # Adapters beside the default one have folders of their own.
            below = file.path.relative_to(folder).as_posix()
            places.update({first: (below, begins[name]) for name, first in file.names.items()})
        return places

    def _plan(
        self, engine: ZeroEngine, tensors: Mapping[str, torch.Tensor], places: dict[str, tuple[str, int]], folder: Path
    ) -> WeightsPlan:
        pieces = []
        for name, interval, values in _own_values(engine, tensors, places):
            file, begin = places[name]
            pieces.append(Piece(path=folder / file, offset=begin + interval.start * values.itemsize, values=values))
        return WeightsPlan(pieces=pieces)


class ShardedLayout(Layout):
    """Into each rank's own file, beside its optimizer state."""

    def _make(
        self, files: list[_SavedFile], tensors: Mapping[str, torch.Tensor], folder: Path
    ) -> dict[str, tuple[str, str, list[int]]] | None:
        if any(file.path.parent != folder for file in files):
            # Several adapters have the same names in their files.
            return None
        # save_pretrained has written an index of files that this layout does not have: readers would report them as missing.
        (folder / SAFE_WEIGHTS_INDEX_NAME).unlink(missing_ok=True)
        return {
            first: (name, dtype_name(name, tensors[first].dtype), list(tensors[first].shape))
            for file in files
            for name, first in file.names.items()
        }

    def _plan(
        self,
        engine: ZeroEngine,
        tensors: Mapping[str, torch.Tensor],
        places: dict[str, tuple[str, str, list[int]]],
        folder: Path,
    ) -> WeightsPlan:
        return WeightsPlan(
            rows=[
                (WEIGHTS, places[first][0], interval, values)
                for first, interval, values in _own_values(engine, tensors, places)
            ],
            weights={name: SavedWeight(dtype=dtype, shape=tuple(shape)) for name, dtype, shape in places.values()},
        )


def can_be_placed(trainer: Trainer, stock_save: Any) -> bool:
    """Whether the Trainer's model is saved by transformers' or peft's own code, tensor by tensor as the model has them.

    Args:
        stock_save: the `save_model` that the Trainer has below the engine's.
    """
    model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    return (
        model is trainer.model
        and any(isinstance(model, kind) and type(model).save_pretrained is kind.save_pretrained for kind in _savers())
        # A state_dict of its own may rename, leave out or compute tensors. Here the modules' own tensors are written.
        and type(model).state_dict is nn.Module.state_dict
        # Adapters that `add_adapter` has put into a model of transformers.
        and not (isinstance(model, PreTrainedModel) and hasattr(model, "peft_config"))
        # A quantiser writes tensors of its own in the place of the model's.
        and getattr(model, "hf_quantizer", None) is None
        # What a subclass's own save writes, and on which ranks, cannot be known here.
        and stock_save is Trainer.save_model
        and type(trainer)._save is Trainer._save
        # Each node then has whole files of its own, and a rank would have to write into all of them.
        and not trainer.args.save_on_each_node
        and all(_has_plain_state(module) for module in model.modules())
    )


def _savers() -> dict[Any, str]:
    """Classes whose `save_pretrained` is known, and the function by which each writes a file."""
    known: dict[Any, str] = {PreTrainedModel: "transformers.modeling_utils.safe_save_file"}
    if is_peft_available():
        from peft import PeftModel

        known[PeftModel] = "peft.peft_model.safe_save_file"
    return known


def _has_plain_state(module: nn.Module) -> bool:
    return (
        type(module)._save_to_state_dict is nn.Module._save_to_state_dict
        and type(module).get_extra_state is nn.Module.get_extra_state
        and not module._state_dict_hooks
        # The engine's own look for writes that no rank has sent, and change nothing.
        and all(isinstance(hook, WeakHook) for hook in module._state_dict_pre_hooks.values())
    )


def _save_without_values(
    trainer: Trainer, tensors: Mapping[str, torch.Tensor], folder: Path
) -> list[_SavedFile] | None:
    """Saves the model without its weights files, and returns their contents; None for other tensors."""
    # Memory that is never touched is never given: these cost addresses, and tied weights stay one tensor.
    empty: dict[int, torch.Tensor] = {}
    for tensor in tensors.values():
        empty.setdefault(id(tensor), torch.empty(tensor.shape, dtype=tensor.dtype))
    first_name: dict[int, str] = {}
    for name, tensor in tensors.items():
        first_name.setdefault(id(empty[id(tensor)]), name)
    files: list[_SavedFile] = []
    is_whole = True

    def note(saved: dict[str, torch.Tensor], path: str, metadata: dict | None = None) -> None:
        nonlocal is_whole
        # A tensor that is none of these is a copy or computed, so that no rank has its values as they would be written.
        is_whole = is_whole and all(id(tensor) in first_name for tensor in saved.values())
        if is_whole:
            names = {name: first_name[id(tensor)] for name, tensor in saved.items()}
            files.append(_SavedFile(path=Path(path), names=names, metadata=metadata))

    with _written_by(note):
        try:
            trainer._save(str(folder), state_dict={name: empty[id(tensor)] for name, tensor in tensors.items()})
        except ShardedParametersError:
            # The saved tensors are computed from values that are not here, as a prompt encoder's are.
            return None
    return files if is_whole else None


@contextmanager
def _written_by(save_file: Callable[..., None]) -> Iterator[None]:
    """Replaces the function by which `save_pretrained` writes a file."""
    with ExitStack() as stack:
        for place in _savers().values():
            module, _, name = place.rpartition(".")
            stack.enter_context(replaced(importlib.import_module(module), name, save_file))
        yield


def _own_values(
    engine: ZeroEngine, tensors: Mapping[str, torch.Tensor], places: Mapping[str, Any]
) -> Iterator[tuple[str, Interval, torch.Tensor]]:
    """Returns this rank's part of the saved tensors: first name in the model, run of elements, live values."""
    name_of: dict[int, str] = {}
    for name, tensor in tensors.items():
        name_of.setdefault(id(tensor), name)
    for own in engine.state.own_weights():
        name = name_of[id(own.parameter)]
        if name in places:
            yield name, own.interval, own.values
    if engine.groups.rank == 0:
        # Buffers, and below stage 3 frozen parameters, are the same on every rank.
        sharded = {id(p) for p in engine.state.bucketed_parameters()}
        for name in places:
            if id(tensors[name]) not in sharded:
                yield name, Interval(0, tensors[name].numel()), tensors[name].detach().reshape(-1)
