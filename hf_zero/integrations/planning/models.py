"""Models without memory, by a Hub name, a folder or a config.json, and the optimizer that Trainer would make for them."""

import os
import re
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModel, PretrainedConfig, PreTrainedModel

from ...plan.errors import PlanError
from ..reasons import reason

_META = torch.device("meta")


def model_without_memory(
    name: str | Path, *, dtype: torch.dtype, checkpointing: bool = False, lora_rank: int | None = None
) -> nn.Module:
    """The model of a config on the meta device, of the class that its `architectures` names.

    Args:
        name: a Hub name, a folder with a config.json, or such a file.
        dtype: of its parameters.
        checkpointing: activations are recomputed in backward.
        lora_rank: of adapters on all linear layers; None trains all parameters.

    Raises:
        PlanError: there is no such config, or it cannot be fetched; or peft is wanted and not there.
    """
    config = read_config(name)
    kind = _class_of(config)
    try:
        with _META:
            model = kind(config)
    except Exception as error:
        # Any class of transformers may refuse the values of a config in its own way.
        raise PlanError(f"hf_zero: the model of {name} cannot be made ({reason(error)}).") from error
    model = model.to(dtype)
    if lora_rank is not None:
        model = _with_adapters(model, lora_rank)
    if checkpointing:
        _checkpoint(model, name)
    return model.train()


def read_config(name: str | Path) -> PretrainedConfig:
    """The config of a folder, of a file, or of the Hub, where its cache has none and the net can be used.

    Raises:
        PlanError: see `model_without_memory`.
    """
    text, path = str(name), Path(name)
    here = path.exists()
    if not here and (path.suffix == ".json" or text.count("/") > 1 or not re.fullmatch(r"[\w.\-]+(/[\w.\-]+)?", text)):
        raise PlanError(f"hf_zero: {text} is no folder or config.json here, and no name of the Hub (OWNER/MODEL).")
    if path.is_dir() and not (path / "config.json").is_file():
        raise PlanError(f"hf_zero: {text} has no config.json.")
    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON")
    tries = [True] if here or offline else [True, False]
    fault: Exception | None = None
    for only_here in tries:
        try:
            return AutoConfig.from_pretrained(text, local_files_only=only_here, trust_remote_code=False)
        except Exception as error:
            # What a config holds decides which error it is.
            fault = error
    if here:
        raise PlanError(f"hf_zero: the config of {text} cannot be read ({reason(fault)}).") from fault
    why = "HF_HUB_OFFLINE is set" if offline else reason(fault)
    raise PlanError(
        f"hf_zero: the config of {text} is not in the Hub's cache on this machine, and the Hub could not be asked ({why}). "
        "Give a folder or a config.json, or allow the network."
    ) from fault


def optimizer_like_trainers(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW, fused, in two groups: decay for matrices, none for the rest."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [[p for p in trained if (p.dim() > 1) is matrix] for matrix in (True, False)]
    if not trained:
        raise PlanError("hf_zero: no parameter of the model requires a gradient, so there is nothing to train.")
    named = [{"params": group, "weight_decay": decay} for group, decay in zip(groups, (0.01, 0.0)) if group]
    return torch.optim.AdamW(named, fused=True)


def _class_of(config: PretrainedConfig) -> Any:
    named = getattr(config, "architectures", None)
    name = named[0] if isinstance(named, list) and named else None
    if name is None:
        return AutoModel.from_config
    found = getattr(transformers, str(name), None)
    if not (isinstance(found, type) and issubclass(found, PreTrainedModel)):
        raise PlanError(
            f"hf_zero: the config names the architecture {str(name)[:200]!r}, which is no model of transformers "
            f"{transformers.__version__}. Models with code of their own are planned from Python: make_plan(model, ...)."
        )
    return found


def _with_adapters(model: nn.Module, rank: int) -> nn.Module:
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise PlanError("hf_zero: --lora needs the package peft: pip install peft.") from error
    try:
        with _META:
            return get_peft_model(model, LoraConfig(r=rank, target_modules="all-linear"))
    except Exception as error:
        # PEFT refuses models that it finds no layers in, each in its own way.
        raise PlanError(f"hf_zero: no adapters for {type(model).__name__} ({reason(error)}).") from error


def _checkpoint(model: nn.Module, name: str | Path) -> None:
    enable: Any = getattr(model, "gradient_checkpointing_enable", None)
    try:
        if enable is None:
            raise ValueError("it has no gradient_checkpointing_enable")
        enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    except ValueError as error:
        raise PlanError(f"hf_zero: {name} does not support activation checkpointing ({reason(error)}).") from error
