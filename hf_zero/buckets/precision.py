"""Which dtype parameters, gradients and masters have, and who casts: the one place that decides."""

from dataclasses import dataclass, replace

import torch

from ..config import AUTO, ConfigError, ZeroConfig
from ..kernels.quantise import BlockFormat


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The dtypes of one bucket.

    Attributes:
        param: of the parameters in forward and backward.
        kept: of the parameters outside of both: of the shard that stage 3 gathers from, which it casts to `param`, and of what
            is saved. Equal to `param` everywhere else.
        reduce: in which gradients travel.
        master: of the copy that the optimizer updates; the parameters themselves where it equals `kept`. The shard of
            the reduced gradient has this dtype too, since optimizers ask for equal dtypes.
        weights: the blocks in which parameters come to every rank, and which leave them fewer digits than the master; None
            where they come as they are, and for parameters of which a rank keeps an exact shard (stage 3).
        apart: masters live in other memory than the parameters, so that there is one even where the dtypes are equal.
        stochastic: parameters are their master rounded by chance, so that it is there for the step only.
        adds_in_master: gradients are summed over the ranks in the master dtype, whatever they travel in.
    """

    param: torch.dtype
    kept: torch.dtype
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
        return self.apart or self.master != self.kept or self.weights is not None

    @property
    def keeps_master(self) -> bool:
        """Whether these last from step to step."""
        return self.has_master and not self.stochastic

    @property
    def rounds(self) -> bool:
        """Whether the master has digits that the saved parameter has not, so that a checkpoint needs both."""
        return self.keeps_master and self.master != self.kept

    @property
    def casts(self) -> bool:
        """Whether forward and backward see the parameters in another dtype than the one they are kept in."""
        return self.kept != self.param


def resolve_precision(
    config: ZeroConfig,
    model_dtype: torch.dtype,
    *,
    gathered: torch.dtype | None = None,
    apart: bool = False,
    weights: BlockFormat | None = None,
    adds_in_master: bool = False,
) -> Precision:
    """The dtypes for parameters that the model holds in `model_dtype`. A 16-bit parameter gets an fp32 master.

    Args:
        gathered: that stage 3 casts them to for forward and backward; None leaves them in the dtype that they are kept in.

    Raises:
        ConfigError: `rounding: stochastic` for other dtypes than bfloat16; `moments: 8bit` for float64.
    """
    kept = kept_dtype(config, model_dtype)
    param = gathered or kept
    stochastic = config.rounding == "stochastic"
    if stochastic and kept != torch.bfloat16:
        raise ConfigError(
            f"hf_zero config: `rounding: stochastic` is for bfloat16 parameters, and some are trained in {kept}. Set "
            "`param_dtype: bfloat16`, or leave `rounding` at nearest."
        )
    master = torch.float32 if kept.itemsize < 4 else kept
    if config.quantises_moments and master != torch.float32:
        raise ConfigError(
            f"hf_zero config: `moments: {config.moments}` is for moments in float32, and some parameters are trained in {kept}. "
            "Leave `moments` at 32bit, or set `param_dtype: float32`."
        )
    reduce = param if config.reduce_dtype == AUTO else getattr(torch, config.reduce_dtype)
    return Precision(
        param=param,
        kept=kept,
        reduce=reduce,
        master=master,
        weights=weights,
        apart=apart,
        stochastic=stochastic,
        adds_in_master=adds_in_master,
    )


def kept_dtype(config: ZeroConfig, model_dtype: torch.dtype) -> torch.dtype:
    """The dtype in which trained parameters that the model holds in `model_dtype` are kept and saved."""
    return model_dtype if config.param_dtype == AUTO else getattr(torch, config.param_dtype)


def untrained_precision(dtype: torch.dtype, gathered: torch.dtype | None = None) -> Precision:
    """Of frozen parameters: they stay as they are, and stage 3 may gather them in another dtype."""
    param = gathered or dtype
    return Precision(param=param, kept=dtype, reduce=param, master=dtype)


_AUTOCAST_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}


def resolve_casts(config: ZeroConfig, mixed_precision: str) -> ZeroConfig:
    """The config of an engine under accelerate's or Trainer's mixed precision: which dtype stage 3 gathers in.

    Under bf16, autocast would keep a cast copy of each whole layer from its forward to its backward, and float32 would
    travel. Gathered in bfloat16, layers find weights that need no cast, and leave nothing behind.

    Raises:
        ConfigError: as `check_cast_owner`.
    """
    check_cast_owner(config, mixed_precision)
    # `param_dtype: float32` asks for float32 in forward and backward, and so for autocast's own casts.
    is_open = config.stage == 3 and config.gather_dtype == AUTO == config.param_dtype
    return replace(config, gather_dtype="bfloat16") if mixed_precision == "bf16" and is_open else config


def check_cast_owner(config: ZeroConfig, mixed_precision: str) -> str:
    """Who casts parameters or activations to a lower precision, in words for the plan. Refuses two that differ, and fp8.

    Args:
        mixed_precision: accelerate's or Trainer's setting: "no", "bf16", "fp16" or "fp8".
    """
    if mixed_precision == "fp8":
        raise ConfigError(
            "hf_zero: mixed_precision='fp8' is not built yet. Use mixed_precision='bf16' (Trainer: --bf16), or `param_dtype: "
            "bfloat16` in the hf_zero config without it."
        )
    if mixed_precision == "no":
        if config.param_dtype != AUTO:
            return f"the engine, parameters to {config.param_dtype}"
        return "nobody: parameters stay in the model's dtype"
    dtype, autocast = _AUTOCAST_DTYPES[mixed_precision], f"autocast to {mixed_precision} (accelerate)"
    if mixed_precision == "fp16" and config.gather_dtype == "bfloat16":
        raise ConfigError(
            "hf_zero: two owners of the cast: mixed_precision='fp16' autocasts to float16 and the config says `gather_dtype: "
            "bfloat16`. Keep one: mixed_precision='bf16' with it, or mixed_precision='fp16' with `gather_dtype: auto`."
        )
    if config.param_dtype in (AUTO, "float32"):
        return autocast
    if config.param_dtype == dtype == "bfloat16":
        return f"the engine, parameters to bfloat16; {autocast} for what is not"
    both = ", or both" if dtype == "bfloat16" else ""
    raise ConfigError(
        f"hf_zero: two owners of the cast: mixed_precision={mixed_precision!r} autocasts to {dtype} and the config says "
        f"`param_dtype: {config.param_dtype}`. Keep one: mixed_precision={mixed_precision!r} with `param_dtype: auto`, or "
        f"`param_dtype: {dtype}` without mixed_precision for {dtype} parameters with an fp32 master{both}."
    )
