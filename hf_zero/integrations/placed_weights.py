"""Model files that all ranks write at once, laid out by transformers itself.

transformers decides about names, tied weights, files and index: `save_pretrained` runs on rank 0 with tensors of the right
shapes that nobody ever touches, and where it would write a file, that file is laid out instead. Each rank then writes the
bytes of its own shard. Nothing is gathered, and no rank holds more than it held.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, Trainer, modeling_utils

from ..checkpoint.pieces import Piece, lay_out
from ..checkpoint.together import Exchange, together
from ..engine.engine import ZeroEngine

Places = dict[str, tuple[str, int]]
"""Tensor's first name in the model → its file, and the byte at which it begins."""


def can_be_placed(trainer: Trainer, stock_save: Any) -> bool:
    """Whether the Trainer's model is saved by transformers' own code, tensor by tensor as the model has them.

    Args:
        stock_save: the `save_model` that the Trainer has below the engine's.
    """
    model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    return (
        isinstance(model, PreTrainedModel)
        and model is trainer.model
        and type(model).save_pretrained is PreTrainedModel.save_pretrained
        and type(model).state_dict is nn.Module.state_dict
        and not getattr(model, "_hf_peft_config_loaded", False)
        and getattr(model, "hf_quantizer", None) is None
        and stock_save is Trainer.save_model
        and type(trainer)._save is Trainer._save
        and not trainer.args.save_on_each_node
        and all(_has_plain_state(module) for module in model.modules())
    )


def plan_weights(trainer: Trainer, engine: ZeroEngine, folder: Path, exchange: Exchange) -> list[Piece] | None:
    """Saves everything of the model but its values; returns this rank's part of those. Collective.

    Returns:
        None on every rank where transformers would put the model's tensors together or take them apart (experts that are
        one tensor in the model and many in its files): nothing useful is in the folder then.

    Raises:
        CheckpointError: on every rank, when rank 0 could not make the files.
    """
    tensors = _saved_tensors(engine.model)

    def make_files() -> Places | None:
        return _lay_out(trainer, tensors, folder) if trainer.args.should_save else None

    then = "The former checkpoints are as they were, and training state is unharmed."
    places = together(exchange, make_files, doing=f"write the model to {folder}", then=then)[0]
    return None if places is None else list(_pieces(engine, tensors, places, folder))


def _has_plain_state(module: nn.Module) -> bool:
    return (
        type(module)._save_to_state_dict is nn.Module._save_to_state_dict
        and type(module).get_extra_state is nn.Module.get_extra_state
        and not module._state_dict_hooks
        and not module._state_dict_pre_hooks
    )


def _saved_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """What `state_dict` has, by name, tied weights under each of theirs; nothing of a sharded model is gathered."""
    found: dict[str, torch.Tensor] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        kept = {n: b for n, b in module._buffers.items() if n not in module._non_persistent_buffers_set}
        for name, tensor in [*module._parameters.items(), *kept.items()]:
            if tensor is not None:
                found[f"{prefix}.{name}" if prefix else name] = tensor
    return found


def _lay_out(trainer: Trainer, tensors: Mapping[str, torch.Tensor], folder: Path) -> Places | None:
    # Memory that is never touched is never given: these cost addresses, and tied weights stay one tensor.
    empty: dict[int, torch.Tensor] = {}
    for tensor in tensors.values():
        empty.setdefault(id(tensor), torch.empty(tensor.shape, dtype=tensor.dtype))
    first_name: dict[int, str] = {}
    for name, tensor in tensors.items():
        first_name.setdefault(id(empty[id(tensor)]), name)
    places: Places = {}
    is_whole = True

    def lay_out_instead(saved: dict[str, torch.Tensor], path: str, metadata: dict | None = None) -> None:
        nonlocal is_whole
        if not all(id(tensor) in first_name for tensor in saved.values()):
            is_whole = False
            return
        begins = lay_out(Path(path), {n: (t.dtype, t.shape) for n, t in saved.items()}, metadata)
        for name, tensor in saved.items():
            places[first_name[id(tensor)]] = Path(path).name, begins[name]

    with _written_by(lay_out_instead):
        trainer._save(str(folder), state_dict={name: empty[id(tensor)] for name, tensor in tensors.items()})
    return places if is_whole else None


@contextmanager
def _written_by(save_file: Any) -> Iterator[None]:
    """Has `save_pretrained` call this for each weights file."""
    stock = modeling_utils.safe_save_file
    modeling_utils.safe_save_file = save_file
    try:
        yield
    finally:
        modeling_utils.safe_save_file = stock


def _pieces(engine: ZeroEngine, tensors: Mapping[str, torch.Tensor], places: Places, folder: Path) -> Iterator[Piece]:
    name_of: dict[int, str] = {}
    for name, tensor in tensors.items():
        name_of.setdefault(id(tensor), name)
    for own in engine.own_weights():
        name = name_of[id(own.parameter)]
        if name in places:
            file, begin = places[name]
            offset = begin + own.interval.start * own.values.itemsize
            yield Piece(path=folder / file, offset=offset, values=own.values)
    if engine.groups.rank == 0:
        # Buffers, and below stage 3 frozen parameters, are the same on every rank.
        sharded = {id(p) for p in engine.parameters_in_buckets()}
        for name, (file, begin) in places.items():
            if id(tensors[name]) not in sharded:
                yield Piece(path=folder / file, offset=begin, values=tensors[name].detach().reshape(-1))
