"""The frozen model below adapters: not saved with them, but known again."""

from pathlib import Path

import torch
import xxhash
from transformers.utils import is_peft_available

from ...checkpoint.format.manifest import CheckpointError, Manifest
from ...engine.engine import ZeroEngine
from .checkpointing import ZERO_FOLDER


class FrozenBase:
    """What a checkpoint of adapters says of the model that they belong to."""

    def __init__(self, engine: ZeroEngine):
        self._engine = engine
        self._checksum: str | None = None

    def checksum(self) -> str | None:
        """XXH3 64-bit hash, in hexadecimal, of the frozen parameters and their names; None for a model that is saved whole.

        Collective. They do not change, and are read once: at stage 3 gathered one at a time.
        """
        if self._checksum is None and _has_adapters(self._engine.model):
            digest = xxhash.xxh3_64()
            for name, parameter in self._engine.model.named_parameters():
                if not parameter.requires_grad:
                    with self._engine.gathered(parameter):
                        values = parameter.detach().contiguous().reshape(-1).view(torch.uint8).cpu()
                        digest.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}".encode())
                        digest.update(values.numpy())
            self._checksum = digest.hexdigest()
        return self._checksum


def refuse_other_base(engine: ZeroEngine, checkpoint: Path) -> None:
    """Raises unless the adapters of a checkpoint belong to this model's frozen parameters. Collective.

    Raises:
        CheckpointError: on every rank.
    """
    saved = Manifest.read(checkpoint / ZERO_FOLDER).base if (checkpoint / ZERO_FOLDER).is_dir() else None
    here = FrozenBase(engine).checksum() if saved is not None else None
    if saved != here:
        raise CheckpointError(
            f"hf_zero: the adapters of {checkpoint} were trained on another base model: its frozen parameters have checksum "
            f"{saved} there and {here} here. Load the base that the run began with, or start without resume_from_checkpoint."
        )


def _has_adapters(model: torch.nn.Module) -> bool:
    if not is_peft_available():
        return False
    from peft import PeftModel

    return isinstance(model, PeftModel)
