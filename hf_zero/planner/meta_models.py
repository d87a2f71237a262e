"""Models without memory, by Hub name, folder or config.json, and Trainer's optimizer for them."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModel, PretrainedConfig, PreTrainedModel

from ..arithmetic.flat import ceil_div
from ..buckets.packed import is_packed
from ..checkpoint.faults import reason
from ..forecast.fit import PlanError
from ..versions import is_older
from .batches import inner_model

_META = torch.device("meta")


def model_without_memory(
    name: str | Path, *, dtype: torch.dtype, checkpointing: bool = False, lora_rank: int | None = None
) -> nn.Module:
    """Builds the model of a config on the meta device, with the class named in `architectures`.

    Args:
        name: a Hub name, a folder with a config.json, or the path of a config.json.
        dtype: dtype of the parameters.
        checkpointing: whether activations are recomputed in backward.
        lora_rank: rank of adapters on all linear layers; None trains all parameters.

    Raises:
        PlanError: the config does not exist or cannot be downloaded, or peft is needed and missing.
    """
    config = read_config(name)
    kind = _class_of(config)
    try:
        with _META:
            model = kind(config)
    except Exception as error:
        # Each class of transformers may refuse the values of a config with its own error.
        raise PlanError(f"hf_zero: the model of {name} cannot be built ({reason(error)}).") from error
    model = model.to(dtype)
    if getattr(config, "quantization_config", None) is not None:
        if lora_rank is None:
            raise PlanError(
                f"hf_zero: the weights of {name} are quantized, so only adapters on them can be trained. Plan with --lora."
            )
        _quantize(model, name)
    if lora_rank is not None:
        model = _with_adapters(model, lora_rank)
    if checkpointing:
        checkpoint(model)
    return model.train()


def read_config(name: str | Path) -> PretrainedConfig:
    """Returns the config of a folder, of a file, or of the Hub. The Hub is only asked if its cache has no copy.

    Raises:
        PlanError: see `model_without_memory`.
    """
    text, path = str(name), Path(name)
    exists = path.exists()
    if not exists and (
        path.suffix == ".json" or text.count("/") > 1 or not re.fullmatch(r"\w[\w.\-]*(/\w[\w.\-]*)?", text)
    ):
        raise PlanError(
            f"hf_zero: {text} is neither a local folder or config.json nor a name on the Hub (OWNER/MODEL)."
        )
    if path.is_dir() and not (path / "config.json").is_file():
        inside = next(iter(sorted(path.glob("*/config.json"))), None)
        where = "Pass the folder of a model" if inside is None else f"Pass {inside.parent}, which has one"
        raise PlanError(f"hf_zero: {text} has no config.json. {where}.")
    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON")
    tries = [True] if exists or offline else [True, False]
    fault: Exception | None = None
    for only_cached in tries:
        try:
            return AutoConfig.from_pretrained(text, local_files_only=only_cached, trust_remote_code=False)
        except Exception as error:
            # The class of the error depends on the contents of the config.
            fault = error
    if exists:
        raise PlanError(f"hf_zero: the config of {text} cannot be read ({reason(fault)}).") from fault
    why = "HF_HUB_OFFLINE is set" if offline else reason(fault)
    raise PlanError(
        f"hf_zero: the config of {text} is not in the Hub's cache on this machine, and the Hub cannot be reached ({why}). Pass "
        "a folder or a config.json, or allow network access."
    ) from fault


def optimizer_like_trainers(model: nn.Module) -> torch.optim.Optimizer:
    """Returns a fused AdamW with two groups: weight decay for matrices, none for other parameters."""
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
            f"hf_zero: the config names the architecture {str(name)[:200]!r}, which is not in transformers "
            f"{transformers.__version__}. Plan a model with custom code from Python: make_plan(model, ...)."
        )
    return found


def _quantize(model: nn.Module, name: str | Path) -> None:
    """Gives the linear layers of a model on the meta device the packed weights and scales named in its config."""
    from transformers.quantizers import AutoHfQuantizer

    inner: Any = model
    try:
        quantizer = AutoHfQuantizer.from_config(inner.config.quantization_config, pre_quantized=True)
        quantizer.preprocess_model(inner, device_map=None)
    except Exception as error:
        # Each quantization method needs its own packages and settings.
        raise PlanError(f"hf_zero: the weights of {name} cannot be quantized in a plan ({reason(error)}).") from error
    for module in model.modules():
        weight: Any = getattr(module, "weight", None)
        if hasattr(weight, "bnb_quantized"):
            module.weight = _in_four_bits(weight)
        elif hasattr(weight, "SCB"):
            weight.CB, weight.SCB = weight.data, torch.empty(weight.shape[0], device=_META)
        elif isinstance(weight, nn.Parameter) and is_packed(weight):
            kind = type(quantizer).__name__
            raise PlanError(
                f"hf_zero: the weights of {name} are packed by {kind}, whose layout the planner does not know. Load the model, "
                "and plan from Python: make_plan(model, ...)."
            )


def _in_four_bits(weight: Any) -> nn.Parameter:
    """Returns the packed form of a weight of bitsandbytes on the meta device, with the scales of every block."""
    from bitsandbytes.functional import QuantState
    from bitsandbytes.nn import Params4bit

    blocks = ceil_div(weight.numel(), weight.blocksize)
    table = {"code": torch.empty(16, device=_META), "blocksize": weight.blocksize, "quant_type": weight.quant_type}
    scales = torch.empty(blocks, device=_META)
    if weight.compress_statistics:
        inner = QuantState(
            torch.empty(ceil_div(blocks, 256), device=_META),
            code=torch.empty(256, device=_META),
            blocksize=256,
            dtype=torch.float32,
        )
        table |= {"offset": torch.empty((), device=_META), "state2": inner}
        scales = scales.to(torch.uint8)
    state = QuantState(scales, shape=weight.shape, dtype=torch.float32, **table)
    codes = torch.empty(
        ceil_div(weight.numel(), 2 * weight.quant_storage.itemsize), 1, dtype=weight.quant_storage, device=_META
    )
    packed = Params4bit(codes, quant_state=state, quant_storage=weight.quant_storage, bnb_quantized=True)
    weight.module.quant_state = state
    return packed


def _with_adapters(model: nn.Module, rank: int) -> nn.Module:
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise PlanError("hf_zero: --lora needs the package peft: pip install peft.") from error
    try:
        with _META:
            return get_peft_model(model, LoraConfig(r=rank, target_modules="all-linear"))
    except Exception as error:
        # PEFT refuses models without suitable layers, with different errors.
        raise PlanError(f"hf_zero: no adapters can be added to {type(model).__name__} ({reason(error)}).") from error


def checkpoint(model: nn.Module) -> None:
    """Turns activation checkpointing on. Raises `PlanError` if the model does not support it."""
    enable = checkpointing_method(model)
    try:
        if enable is None:
            raise ValueError("it has no activation_checkpointing_enable")
        enable({"use_reentrant": False})
    except ValueError as error:
        name = type(inner_model(model)).__name__
        raise PlanError(f"hf_zero: {name} does not support activation checkpointing ({reason(error)}).") from error


def checkpointing_method(model: nn.Module) -> Callable[[dict[str, Any]], None] | None:
    """Returns the model's method for turning activation checkpointing on; None if there is none.

    transformers 5.23 renamed the method. The old name still works there, but warns.
    """
    for name in ("activation_checkpointing_enable", "gradient_checkpointing_enable"):
        if method := getattr(model, name, None):
            return method
    return None


def checkpointing_argument() -> str:
    """Returns the argument of `TrainingArguments` for activation checkpointing in the installed transformers."""
    return "gradient_checkpointing" if is_older(transformers.__version__, (5, 23)) else "activation_checkpointing"


def is_checkpointed(model: nn.Module) -> bool:
    """Whether activation checkpointing is on."""
    # The layers' attribute has the same name in all supported versions of transformers; the model's property was renamed.
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
