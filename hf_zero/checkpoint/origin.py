"""Which library wrote a checkpoint, by the names of its files."""

import re
from pathlib import Path

MODEL_FOLDER = "pytorch_model_fsdp_0"

OPTIMIZER_FOLDER = "optimizer_0"

METADATA_NAME = ".metadata"
"""Names in folders of FSDP and torch.distributed.checkpoint."""


OPTIMIZER_FILE = re.compile(r"^(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt$")
"""DeepSpeed's optimizer files, one per rank."""


_WEIGHT_SHARD = re.compile(r"shard-(\d{5})-model-\d{5}-of-\d{5}\.safetensors")


def is_foreign(folder: Path) -> bool:
    """Whether a folder looks like a DeepSpeed or FSDP checkpoint. `open_foreign` checks whether the checkpoint is good."""
    if not folder.is_dir():
        return False
    return is_dcp(folder) or (folder / "pytorch_model_fsdp.bin").is_file() or _is_deepspeed(folder)


def is_dcp(folder: Path) -> bool:
    """Whether a folder looks like an FSDP or torch.distributed.checkpoint checkpoint, or has one weight file per rank."""
    named = (folder / MODEL_FOLDER).is_dir() or (folder / OPTIMIZER_FOLDER).is_dir()
    return named or (folder / METADATA_NAME).is_file() or bool(weight_shards_of(folder))


def _is_deepspeed(folder: Path) -> bool:
    # `latest` may name a missing folder; `open_foreign` raises the error for this.
    return (folder / "latest").is_file() or any(OPTIMIZER_FILE.match(path.name) for path in folder.iterdir())


def weight_shards_of(folder: Path) -> list[Path]:
    """Lists the files of `save_pretrained(..., distributed_checkpoint=True)`, one per rank; empty without the folder."""
    return sorted(path for path in folder.glob("*.safetensors") if _WEIGHT_SHARD.fullmatch(path.name))
