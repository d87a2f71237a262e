"""Which dtype parameters, gradients and masters have, and who casts: the one place that decides."""

from dataclasses import dataclass

import torch

from ...config import AUTO, ConfigError, ZeroConfig
from ...kernels.quantise import BlockFormat


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The dtypes of one bucket.

    Attributes:
        param: of the parameters in forward and backward.
        reduce: in which gradients travel.
        master: of the copy that the optimizer updates; the parameters themselves where it equals `param`. The shard of
            the reduced gradient has this dtype too, since optimizers ask for equal dtypes.
        weights: the blocks in which parameters come to every rank, and which leave them fewer digits than the master; None
            where they come as they are, and for parameters of which a rank keeps an exact shard (stage 3).
        apart: masters live in other memory than the parameters, so that there is one even where the dtypes are equal.
        stochastic: parameters are their master rounded by chance, so that it is there for the step only.
        adds_in_master: gradients are summed over the ranks in the master dtype, whatever they travel in.
    """

    param: torch.dtype
    reduce: torch.dtype
    master: torch.dtype
    weights: BlockFormat | None = None
    apart: bool = False
    stochastic: bool = False
    adds_in_master: bool = False

    @property
    def reduced(self) -> torch.dtype:
        """In which the sum over the ranks arrives. Another one that is wider holds no more digits of it."""
        return self.master if self.adds_in_master else self.reduce

    @property
    def has_master(self) -> bool:
        """Whether the optimizer steps on other tensors than the parameters."""
        return self.apart or self.master != self.param or self.weights is not None

    @property
    def keeps_master(self) -> bool:
        """Whether these last from step to step."""
        return self.has_master and not self.stochastic

    @property
    def rounds(self) -> bool:
        """Whether the master has digits that the parameter has not, so that a checkpoint needs both."""
        return self.keeps_master and self.master != self.param


def resolve_precision(
    config: ZeroConfig,
    model_dtype: torch.dtype,
    *,
    apart: bool = False,
    weights: BlockFormat | None = None,
    adds_in_master: bool = False,
) -> Precision:
    """The dtypes for parameters that the model holds in `model_dtype`. A 16-bit parameter gets an fp32 master.

    Raises:
        ConfigError: `rounding: stochastic` for other dtypes than bfloat16; `moments: 8bit` for float64.
    """
    param = model_dtype if config.param_dtype == AUTO else getattr(torch, config.param_dtype)
    stochastic = config.rounding == "stochastic"
    if stochastic and param != torch.bfloat16:
        raise ConfigError(
            f"hf_zero config: `rounding: stochastic` is for bfloat16 parameters, and some are trained in {param}. Set "
            "`param_dtype: bfloat16`, or leave `rounding` at nearest."
        )
    master = torch.float32 if param.itemsize < 4 else param
    if config.quantises_moments and master != torch.float32:
        raise ConfigError(
            f"hf_zero config: `moments: {config.moments}` is for moments in float32, and some parameters are trained in {param}. "
            "Leave `moments` at 32bit, or set `param_dtype: float32`."
        )
    reduce = param if config.reduce_dtype == AUTO else getattr(torch, config.reduce_dtype)
    return Precision(
        param=param,
        reduce=reduce,
        master=master,
        weights=weights,
        apart=apart,
        stochastic=stochastic,
        adds_in_master=adds_in_master,
    )


def untrained_precision(dtype: torch.dtype) -> Precision:
    """Of frozen parameters: they stay as they are."""
    return Precision(param=dtype, reduce=dtype, master=dtype)


def check_cast_owner(config: ZeroConfig, mixed_precision: str) -> str:
    """Who casts parameters or activations to a lower precision, in words for the plan. Refuses two owners, and fp8.

    Args:
        mixed_precision: accelerate's or Trainer's setting: "no", "bf16", "fp16" or "fp8".
    """
    if mixed_precision == "fp8":
        raise ConfigError(
            "hf_zero: mixed_precision='fp8' is not built yet. Use mixed_precision='bf16' (Trainer: --bf16), or `param_dtype: "
            "bfloat16` in the hf_zero config without it."
        )
    if mixed_precision != "no" and config.param_dtype != AUTO:
        dtype = {"bf16": "bfloat16", "fp16": "float16"}[mixed_precision]
        raise ConfigError(
            f"hf_zero: two owners of the cast: mixed_precision={mixed_precision!r} autocasts and the config says `param_dtype: "
            f"{config.param_dtype}`. Keep one: mixed_precision={mixed_precision!r} with `param_dtype: auto` for fp32 parameters "
            f"under autocast, or `param_dtype: {dtype}` without mixed_precision for {dtype} parameters with an fp32 master."
        )
    if mixed_precision != "no":
        return f"autocast to {mixed_precision} (accelerate)"
    if config.param_dtype != AUTO:
        return f"the engine, parameters to {config.param_dtype}"
    return "nobody: parameters stay in the model's dtype"
