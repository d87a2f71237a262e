"""Whose checkpoint a folder is, by the names of its files."""

import re
from pathlib import Path

MODEL_FOLDER = "pytorch_model_fsdp_0"
OPTIMIZER_FOLDER = "optimizer_0"
METADATA_NAME = ".metadata"
"""Of FSDP, and of torch.distributed.checkpoint."""

OPTIMIZER_FILE = re.compile(r"^(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt$")
"""Of DeepSpeed, one a rank."""

_WEIGHT_SHARD = re.compile(r"shard-(\d{5})-model-\d{5}-of-\d{5}\.safetensors")


def is_foreign(folder: Path) -> bool:
    """Whether a folder looks like DeepSpeed's or FSDP's; `open_foreign` of the extra `foreign` says whether it is good."""
    if not folder.is_dir():
        return False
    return is_dcp(folder) or (folder / "pytorch_model_fsdp.bin").is_file() or _is_deepspeed(folder)


def is_dcp(folder: Path) -> bool:
    """Whether a folder looks like FSDP's, torch.distributed.checkpoint's, or has weights in a file a rank."""
    named = (folder / MODEL_FOLDER).is_dir() or (folder / OPTIMIZER_FOLDER).is_dir()
    return named or (folder / METADATA_NAME).is_file() or bool(weight_shards_of(folder))


def _is_deepspeed(folder: Path) -> bool:
    # Also where what `latest` names is not there: `open_foreign` says so.
    return (folder / "latest").is_file() or any(OPTIMIZER_FILE.match(path.name) for path in folder.iterdir())


def weight_shards_of(folder: Path) -> list[Path]:
    """The files of `save_pretrained(..., distributed_checkpoint=True)` in a folder, one a rank; none where there is no folder."""
    return sorted(path for path in folder.glob("*.safetensors") if _WEIGHT_SHARD.fullmatch(path.name))
