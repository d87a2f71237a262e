"""Opens a checkpoint of DeepSpeed ZeRO or of FSDP, whichever it is."""

from pathlib import Path

from ..checkpoint.files import CheckpointError, no_folder, refuse_links
from ..checkpoint.structure import METADATA_NAME, MODEL_FOLDER, OPTIMIZER_FOLDER, is_dcp
from .dcp import DcpCheckpoint
from .deepspeed import DeepSpeedCheckpoint, step_folder_of
from .states import ForeignCheckpoint


def open_foreign(folder: Path) -> ForeignCheckpoint:
    """Opens a checkpoint of DeepSpeed ZeRO or of FSDP; reads headers and metadata only, and follows no link outside.

    Args:
        folder: of Trainer or accelerate (`checkpoint-N`), or DeepSpeed's own, with `latest` or of one step.

    Raises:
        CheckpointError: neither of them, not whole, or of a variant that is not covered.
    """
    refuse_links(folder, sorted(path for path in folder.rglob("*") if path.is_symlink()))
    try:
        return _open(folder)
    except (CheckpointError, OSError):
        raise
    except Exception as error:
        # The formats are pickles: their fields may hold anything.
        raise CheckpointError(
            f"hf_zero: {folder} is damaged, or of a variant that is not covered ({type(error).__name__}: {str(error)[:200]}). "
            "Resume from another checkpoint."
        ) from error


def _open(folder: Path) -> ForeignCheckpoint:
    if not folder.is_dir():
        raise CheckpointError(f"hf_zero: {no_folder(folder)}.")
    if (folder / "pytorch_model_fsdp.bin").is_file():
        raise CheckpointError(
            f"hf_zero: {folder} is of an FSDP run with state_dict_type FULL_STATE_DICT, which is not covered. Save it there with "
            "SHARDED_STATE_DICT."
        )
    if is_dcp(folder):
        return DcpCheckpoint(folder)
    step_folder = step_folder_of(folder)
    if step_folder is None:
        found = sorted(path.name for path in folder.iterdir())[:8]
        raise CheckpointError(
            f"hf_zero: {folder} is no checkpoint of DeepSpeed ZeRO (`latest` and `global_step…/`) or of FSDP ({MODEL_FOLDER}/ "
            f"and {OPTIMIZER_FOLDER}/, {METADATA_NAME} of torch.distributed.checkpoint, or shard-…safetensors of "
            f"transformers); found: {found}."
        )
    return DeepSpeedCheckpoint(folder, step_folder)
