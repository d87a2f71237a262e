"""Writes DeepSpeed ZeRO folders by the layout in hf_zero/foreign/FORMATS.md, from whole tensors, without DeepSpeed."""

import sys
import types
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any
from unittest import mock

import torch

VERSION = "0.19.8"


@dataclass
class WholeState:
    """A model's weights, and for each group the settings and each parameter's whole optimizer state.

    Attributes:
        weights: every tensor of the model.
        groups: (settings, names in the order of the flat group).
        state: name → `step` and tensors of the parameter's shape.
        buffers: names in `weights` that are buffers.
        frozen: names in `weights` that are not trained.
    """

    weights: dict[str, torch.Tensor]
    groups: list[tuple[dict[str, Any], list[str]]]
    state: dict[str, dict[str, Any]]
    buffers: list[str] = field(default_factory=list)
    frozen: list[str] = field(default_factory=list)


class ZeroStageEnum(int, Enum):
    gradients = 2


class LossScaler:
    def __init__(self) -> None:
        self.cur_scale = 1.0


class fragment_address:
    def __init__(self) -> None:
        self.start = 0


_HOMES = {
    "deepspeed.runtime.zero.config": ZeroStageEnum,
    "deepspeed.runtime.fp16.loss_scaler": LossScaler,
    "deepspeed.utils.tensor_fragment": fragment_address,
}


def write_deepspeed(
    folder: Path, whole: WholeState, *, stage: int, world_size: int, sub_group_numel: int = 10**9, spaced: bool = False
) -> None:
    """Writes `folder/global_step1` and `folder/latest`.

    Args:
        sub_group_numel: stage 3 closes a sub-group when its parameters have this many elements.
        spaced: pads each parameter of a group to a multiple of four elements, as `parameter_alignment` does.
    """
    step_folder = folder / "global_step1"
    step_folder.mkdir(parents=True)
    (folder / "latest").write_text("global_step1")
    if stage == 3:
        banks, states = _stage_3(whole, world_size, sub_group_numel)
    else:
        banks, states = _stages_1_and_2(whole, stage, world_size, spaced)
    module = {n: torch.empty(0) if stage == 3 and n not in whole.buffers else t for n, t in whole.weights.items()}
    for rank in range(world_size):
        fragments = {
            n: _partition(whole.weights[n], world_size)[rank] if stage == 3 else whole.weights[n] for n in whole.frozen
        }
        model = {
            "module": module,
            "buffer_names": whole.buffers,
            "param_shapes": [{name: whole.weights[name].shape for name in bank} for bank in banks],
            "frozen_param_shapes": {name: whole.weights[name].shape for name in whole.frozen},
            "frozen_param_fragments": fragments,
            "shared_params": {},
            "mp_world_size": 1,
            "ds_version": VERSION,
        }
        states[rank] |= {"loss_scaler": LossScaler(), "zero_stage": _stage(stage)}
        if stage == 3 or rank == 0:
            name = f"zero_pp_rank_{rank}_mp_rank_00" if stage == 3 else "mp_rank_00"
            _save(model, step_folder / f"{name}_model_states.pt")
        optimizer = {"optimizer_state_dict": states[rank], "ds_config": {}, "ds_version": VERSION}
        _save(optimizer, step_folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")


def _stages_1_and_2(whole: WholeState, stage: int, world_size: int, spaced: bool) -> tuple[list, list[dict]]:
    """Concatenates each group, pads it to a multiple of 2 x world size, and cuts it equally; masters lack the final padding."""
    states = [
        {
            "base_optimizer_state": {"state": {}, "param_groups": []},
            "single_partition_of_fp32_groups": [],
            "group_paddings": [],
            "param_alignment_paddings": [],
            "partition_count": [world_size] * len(whole.groups),
            "param_slice_mappings": [{"a": fragment_address()}],
        }
        for _ in range(world_size)
    ]
    for number, (settings, names) in enumerate(whole.groups):
        kinds = [k for k, v in whole.state[names[0]].items() if k != "step"]
        gaps = [-whole.weights[n].numel() % 4 if spaced and n != names[-1] else 0 for n in names]
        flat = {}
        for kind in ["master", *kinds]:
            parts = []
            for name, gap in zip(names, gaps):
                tensor = whole.weights[name] if kind == "master" else whole.state[name][kind]
                parts += [tensor.reshape(-1), torch.full((gap,), 7.0)]
            flat[kind] = torch.cat(parts)
        numel = flat["master"].numel()
        size = -(-numel // (2 * world_size)) * 2
        for rank, state in enumerate(states):
            padding = min(max((rank + 1) * size - numel, 0), size)
            part = {
                kind: torch.cat([values, torch.full((size * world_size - numel,), 9.0)])[
                    rank * size : (rank + 1) * size
                ]
                for kind, values in flat.items()
            }
            state["single_partition_of_fp32_groups"].append(part.pop("master")[: size - padding].clone())
            state["group_paddings"].append(padding)
            state["param_alignment_paddings"].append(gaps)
            base = state["base_optimizer_state"]
            base["state"][number] = {"step": whole.state[names[0]]["step"], **{k: v.clone() for k, v in part.items()}}
            base["param_groups"].append({**settings, "params": [number]})
    return [names for _, names in whole.groups], states


def _stage_3(whole: WholeState, world_size: int, sub_group_numel: int) -> tuple[list, list[dict]]:
    """Cuts every parameter into ceil(numel / world size) elements per rank; sub-groups concatenate the parts of parameters."""
    banks: list[list[str]] = []
    indices: list[list[int]] = []
    for _, names in whole.groups:
        first, open_bank = len(banks), []
        for name in names:
            open_bank.append(name)
            if sum(whole.weights[n].numel() for n in open_bank) >= sub_group_numel or name == names[-1]:
                banks.append(open_bank)
                open_bank = []
        indices.append(list(range(first, len(banks))))
    states = []
    for rank in range(world_size):

        def flat(kind: str, bank: list[str], rank: int = rank) -> torch.Tensor:
            tensors = (whole.weights[n] if kind == "master" else whole.state[n][kind] for n in bank)
            return torch.cat([_partition(tensor, world_size)[rank] for tensor in tensors])

        kept = {
            number: {"step": whole.state[bank[0]]["step"]}
            | {kind: flat(kind, bank) for kind in whole.state[bank[0]] if kind != "step"}
            for number, bank in enumerate(banks)
        }
        groups = [{**settings, "params": numbers} for (settings, _), numbers in zip(whole.groups, indices)]
        states.append(
            {
                "partition_count": world_size,
                "optimizer_state_dict": {"state": kept, "param_groups": groups},
                "fp32_flat_groups": [flat("master", bank) for bank in banks],
            }
        )
    return banks, states


def _partition(tensor: torch.Tensor, world_size: int) -> list[torch.Tensor]:
    size = -(-tensor.numel() // world_size)
    padded = torch.cat([tensor.reshape(-1), torch.full((size * world_size - tensor.numel(),), 5.0)])
    return [part.clone() for part in padded.split(size)]


def _stage(stage: int) -> Any:
    """Makes an object which pickles like DeepSpeed's enum."""
    return ZeroStageEnum.gradients if stage == 2 else stage


def _save(content: dict[str, Any], path: Path) -> None:
    """Pickles with DeepSpeed's class names, without DeepSpeed."""
    parents = ("deepspeed", "deepspeed.utils", "deepspeed.runtime", "deepspeed.runtime.zero", "deepspeed.runtime.fp16")
    homes = {name: types.ModuleType(name) for name in parents}
    for name, kind in _HOMES.items():
        homes[name] = types.ModuleType(name)
        setattr(homes[name], kind.__name__, kind)
        kind.__module__ = name
    with mock.patch.dict(sys.modules, homes):
        torch.save(content, path)
