"""From a model and its optimizers to buckets: what may be trained, who owns what, how large the buckets are."""

from collections.abc import Sequence

import torch
from torch import nn

from ..comm.groups import Groups
from ..config import AUTO, ZeroConfig
from ..layout.slots import ParameterSpec, plan_buckets
from ..offload.tier import Tier
from .buckets import Bucket
from .precision import Precision, resolve_precision

_MIB = 2**20
_SMALLEST_BUCKET_BYTES = 1 * _MIB
_LARGEST_BUCKET_BYTES = 25 * _MIB
_BUCKETS_A_MODEL = 8


def trained_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters that take gradients, in registration order, tied ones once. Raises for a model that cannot train."""
    on_meta = [name for name, p in model.named_parameters() if p.is_meta]
    if on_meta:
        raise ValueError(
            f"hf_zero: {len(on_meta)} parameters are on the meta device and have no values (first: {on_meta[0]!r}). Load "
            "the model with from_pretrained, or build it outside `torch.device('meta')`, before accelerator.prepare."
        )
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not trained:
        raise ValueError(
            "hf_zero: no parameter of the model requires a gradient, so there is nothing to train or shard."
        )
    strange = [(name, p.dtype) for name, p in trained if not p.dtype.is_floating_point]
    if strange:
        raise ValueError(f"hf_zero: {strange[0][0]!r} is trained in {strange[0][1]}; only floating-point dtypes are.")
    return trained


def owners(
    trained: Sequence[tuple[str, nn.Parameter]], optimizers: Sequence[torch.optim.Optimizer], model: nn.Module
) -> dict[nn.Parameter, tuple[int, int]]:
    """(optimizer index, group index) of each trained parameter; (-1, -1) for one that no optimizer has.

    Raises:
        ValueError: an optimizer has parameters that are not the model's, or two have the same.
    """
    of_model = set(model.parameters())
    owner = {p: (-1, -1) for _, p in trained}
    for index, optimizer in enumerate(optimizers):
        for group_index, group in enumerate(optimizer.param_groups):
            foreign = [p for p in group["params"] if p not in of_model]
            if foreign:
                raise ValueError(
                    f"hf_zero: group {group_index} of {type(optimizer).__name__} holds {len(foreign)} parameters that are "
                    f"not in the model (first: shape {tuple(foreign[0].shape)}). Build the optimizer from this model's "
                    "parameters, after any step that replaces them (resize_token_embeddings, get_peft_model, .to(dtype))."
                )
            for p in group["params"]:
                if p in owner and owner[p] != (-1, -1):
                    raise ValueError("hf_zero: two optimizers hold the same parameter; give each parameter to one.")
                if p in owner:
                    owner[p] = (index, group_index)
    return owner


def build_buckets(
    trained: Sequence[tuple[str, nn.Parameter]],
    owner: dict[nn.Parameter, tuple[int, int]],
    config: ZeroConfig,
    groups: Groups,
    tier: Tier,
) -> list[Bucket]:
    """Moves the parameters into flat buckets. Never mixes dtypes, devices, optimizers or groups in one."""
    parameter_of = dict(trained)
    precision_of: dict[torch.dtype, Precision] = {p.dtype: resolve_precision(config, p.dtype) for _, p in trained}
    specs = [ParameterSpec(name=name, numel=p.numel(), key=(str(p.device), p.dtype, *owner[p])) for name, p in trained]
    smallest_itemsize = min(precision.reduce.itemsize for precision in precision_of.values())
    total_bytes = sum(p.numel() * precision_of[p.dtype].reduce.itemsize for _, p in trained)
    bucket_bytes = auto_bucket_bytes(total_bytes) if config.bucket_bytes == AUTO else config.bucket_bytes
    layouts = plan_buckets(specs, bucket_numel=max(1, bucket_bytes // smallest_itemsize), shards=groups.shard_size)
    # One dtype with a master makes all rows tensors of their own: a model's gradients are stored in one way.
    whole = groups.shard_size == 1 and not any(precision.has_master for precision in precision_of.values())
    return [
        Bucket(
            layout,
            [parameter_of[slot.name] for slot in layout.slots],
            precision_of[parameter_of[layout.slots[0].name].dtype],
            shard_rank=groups.shard_rank,
            whole=whole,
            tier=tier,
        )
        for layout in layouts
    ]


def auto_bucket_bytes(total_bytes: int) -> int:
    """About eight buckets a model, none under 1 MiB (calls cost) or over 25 MiB (the last one is never overlapped)."""
    return min(_LARGEST_BUCKET_BYTES, max(_SMALLEST_BUCKET_BYTES, total_bytes // _BUCKETS_A_MODEL))
