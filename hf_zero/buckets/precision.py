"""The dtypes of parameters, gradients and master weights, and the owner of the cast."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from ..config import AUTO, ConfigError, ZeroConfig


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The dtypes of one bucket.

    Attributes:
        param: dtype of the parameters in forward and backward.
        kept: dtype of saved parameters, and of the shard from which stage 3 gathers and casts to `param`. Equal to `param`
            otherwise.
        reduce: dtype of gradients in collectives.
        master: dtype of the copy updated by the optimizer, and of the shard of the reduced gradient, because optimizers need
            equal dtypes. If equal to `kept`, the optimizer updates the parameters themselves.
        weights: rounds parameters in place to the quantized blocks in which they are gathered; None for an exact gather, and
            if each rank keeps an exact shard of the parameters (stage 3).
        separate_master: whether the master and the parameters have different memory (offload), even with equal dtypes.
        stochastic: whether parameters are the stochastically rounded master, which exists only during the step.
        adds_in_master: whether ranks sum gradients in the master dtype, regardless of `reduce`.
        copies: whether a master with the parameters' own dtype is a copy of the parameters that exists only during the step.
    """

    param: torch.dtype
    kept: torch.dtype
    reduce: torch.dtype
    master: torch.dtype
    weights: Callable[[torch.Tensor], None] | None = None
    separate_master: bool = False
    stochastic: bool = False
    adds_in_master: bool = False
    copies: bool = False

    @cached_property
    def reduced(self) -> torch.dtype:
        """Returns the dtype of the arriving sum over the ranks. A wider dtype would hold no more digits."""
        return self.master if self.adds_in_master else self.reduce

    @cached_property
    def has_master(self) -> bool:
        """Whether the optimizer steps on tensors different from the parameters."""
        return self.separate_master or self.master != self.kept or self.weights is not None

    @cached_property
    def keeps_master(self) -> bool:
        """Whether the master persists between steps."""
        return self.has_master and not self.stochastic and not self.is_copied

    @cached_property
    def is_copied(self) -> bool:
        """Whether the master is copied from the parameters for each step."""
        # Parameters rounded to blocks have lost digits of their master.
        return self.copies and self.separate_master and self.master == self.kept and self.weights is None

    @cached_property
    def rounds(self) -> bool:
        """Whether the master has more digits than the saved parameter. A checkpoint then needs both."""
        return self.keeps_master and self.master != self.kept

    @cached_property
    def casts(self) -> bool:
        """Whether forward and backward use the parameters in a dtype different from `kept`."""
        return self.kept != self.param


def resolve_precision(
    config: ZeroConfig,
    model_dtype: torch.dtype,
    *,
    gathered: torch.dtype | None = None,
    separate_master: bool = False,
    adds_in_master: bool = False,
    copies: bool = False,
) -> Precision:
    """Chooses the dtypes for parameters of `model_dtype`. A 16-bit parameter gets an fp32 master.

    Args:
        config: the engine's settings.
        model_dtype: the parameters' dtype in the model.
        gathered: the dtype to which stage 3 casts for forward and backward; None for no cast.
        separate_master, adds_in_master, copies: see `Precision`.

    Raises:
        ConfigError: `rounding: stochastic` with a dtype other than bfloat16, or `moments: 8bit` with float64.
    """
    kept = kept_dtype(config, model_dtype)
    param = gathered or kept
    stochastic = config.rounding == "stochastic"
    if stochastic and kept != torch.bfloat16:
        raise ConfigError(
            f"hf_zero config: `rounding: stochastic` needs bfloat16 parameters, but some are trained in {kept}. Set "
            "`param_dtype: bfloat16`, or leave `rounding` at nearest."
        )
    # In 16 bits most updates are smaller than half of a parameter's last digit and would be rounded away.
    master = torch.float32 if kept.itemsize < 4 else kept
    if config.quantizes_moments and master != torch.float32:
        raise ConfigError(
            f"hf_zero config: `moments: {config.moments}` needs moments in float32, but some parameters are trained in {kept}. "
            "Leave `moments` at 32bit, or set `param_dtype: float32`."
        )
    reduce = param if config.reduce_dtype == AUTO else getattr(torch, config.reduce_dtype)
    return Precision(
        param=param,
        kept=kept,
        reduce=reduce,
        master=master,
        separate_master=separate_master,
        stochastic=stochastic,
        adds_in_master=adds_in_master,
        copies=copies,
    )


def kept_dtype(config: ZeroConfig, model_dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which trained parameters of `model_dtype` are stored and saved."""
    return model_dtype if config.param_dtype == AUTO else getattr(torch, config.param_dtype)


def untrained_precision(dtype: torch.dtype, gathered: torch.dtype | None = None) -> Precision:
    """Returns the dtypes of frozen parameters. They are unchanged, but stage 3 may gather in a different dtype."""
    param = gathered or dtype
    return Precision(param=param, kept=dtype, reduce=param, master=dtype)


_AUTOCAST_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp8": "bfloat16"}
"""Maps accelerate's `mixed_precision` to a dtype. Under fp8, linear layers cast to float8, other layers to bfloat16."""


def resolve_casts(config: ZeroConfig, mixed_precision: str) -> ZeroConfig:
    """Completes the config under mixed precision with the dtype in which stage 3 gathers.

    Under bf16, autocast would keep a cast copy of each whole layer from its forward to its backward, and gathers would send
    float32. If layers are gathered in bfloat16, their weights need no cast and no copy is kept.

    Raises:
        ConfigError: like `check_cast_owner`.
    """
    check_cast_owner(config, mixed_precision)
    # `param_dtype: float32` requests float32 in forward and backward, so autocast does the casts.
    is_open = config.stage == 3 and config.gather_dtype == AUTO == config.param_dtype
    return replace(config, gather_dtype="bfloat16") if mixed_precision == "bf16" and is_open else config


def for_evaluation(config: ZeroConfig) -> ZeroConfig:
    """Completes the config of a model used only for evaluation: frozen parameters are gathered in the dtype of trained ones.

    A reference model with the same weights as the trained model then computes the same values.
    """
    if config.param_dtype != "bfloat16":
        return config
    return replace(config, param_dtype=AUTO, gather_dtype=config.param_dtype)


def check_cast_owner(config: ZeroConfig, mixed_precision: str) -> str:
    """Returns the owner of the cast to lower precision, for the plan. Refuses two owners with different dtypes.

    Args:
        config: the engine's settings.
        mixed_precision: accelerate's or Trainer's setting: "no", "bf16", "fp16" or "fp8".
    """
    if mixed_precision == "no":
        if config.param_dtype != AUTO:
            return f"the engine, parameters to {config.param_dtype}"
        return "nobody: parameters stay in the model's dtype"
    dtype, autocast = _AUTOCAST_DTYPES[mixed_precision], f"autocast to {mixed_precision} (accelerate)"
    if mixed_precision == "fp8":
        autocast = "linear layers to fp8 (torchao), autocast to bf16 (accelerate)"
    if mixed_precision == "fp16" and config.gather_dtype == "bfloat16":
        raise ConfigError(
            "hf_zero: the cast is set twice: mixed_precision='fp16' autocasts to float16, and the config has `gather_dtype: "
            "bfloat16`. Keep one: mixed_precision='bf16' with `gather_dtype: bfloat16`, or mixed_precision='fp16' with "
            "`gather_dtype: auto`."
        )
    if config.param_dtype in (AUTO, "float32"):
        return autocast
    if config.param_dtype == dtype == "bfloat16":
        return f"the engine, parameters to bfloat16; {autocast} for other tensors"
    both = ", or both" if dtype == "bfloat16" else ""
    raise ConfigError(
        f"hf_zero: the cast is set twice: mixed_precision={mixed_precision!r} autocasts to {dtype}, and the config has "
        f"`param_dtype: {config.param_dtype}`. Keep one: mixed_precision={mixed_precision!r} with `param_dtype: auto`, or "
        f"`param_dtype: {dtype}` without mixed_precision for {dtype} parameters with an fp32 master{both}."
    )
