"""The frozen model below adapters. It is not saved with the adapters, but identified by a checksum."""

from pathlib import Path

import torch
import xxhash
from transformers.utils import is_peft_available

from ..buckets.packed import added_scales
from ..checkpoint.faults import CheckpointError
from ..checkpoint.manifest import Manifest
from ..engine.engine import ZeroEngine
from .state_io import ZERO_FOLDER


class FrozenBase:
    """Identifies the frozen base model of an adapter checkpoint."""

    def __init__(self, engine: ZeroEngine):
        self._engine = engine
        self._checksum: str | None = None

    def checksum(self) -> str | None:
        """Returns the XXH3 64-bit hash, in hexadecimal, of the frozen parameters and their names; None without adapters.

        Collective. The parameters are read only once, because they do not change; at stage 3 they are gathered one at a time.
        """
        if self._checksum is None and _has_adapters(self._engine.model):
            digest = xxhash.xxh3_64()
            # Exclude these scales, because they are parameters of the model only at stage 3, and the checksum must be equal
            # for all stages.
            scales = added_scales(self._engine.model)
            for name, parameter in self._engine.model.named_parameters():
                if not parameter.requires_grad and parameter not in scales:
                    with self._engine.gathered(parameter):
                        # View as bytes: numpy has no bfloat16, and the hash is over the bits anyway.
                        values = parameter.detach().contiguous().reshape(-1).view(torch.uint8).cpu()
                        digest.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}".encode())
                        digest.update(values.numpy())
            self._checksum = digest.hexdigest()
        return self._checksum


def refuse_other_base(engine: ZeroEngine, checkpoint: Path) -> None:
    """Refuses a checkpoint's adapters unless they belong to this model's frozen parameters. Collective.

    Raises:
        CheckpointError: on every rank.
    """
    saved = Manifest.read(checkpoint / ZERO_FOLDER).base if (checkpoint / ZERO_FOLDER).is_dir() else None
    here = FrozenBase(engine).checksum() if saved is not None else None
    if saved != here:
        raise CheckpointError(
            f"hf_zero: the adapters of {checkpoint} were trained on another base model: its frozen parameters have checksum "
            f"{saved} there and {here} here. Load the base that the run started with, or start without resume_from_checkpoint."
        )


def _has_adapters(model: torch.nn.Module) -> bool:
    if not is_peft_available():
        return False
    from peft import PeftModel

    return isinstance(model, PeftModel)
