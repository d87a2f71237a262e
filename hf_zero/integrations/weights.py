"""Checks the weights in a folder, and rewrites them for `from_pretrained`."""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from huggingface_hub.constants import SAFETENSORS_INDEX_FILE, SAFETENSORS_SINGLE_FILE

from ..buckets.kept_dtypes import float32_names
from ..checkpoint.faults import CheckpointError
from ..checkpoint.files import copy_new, entry_faults, refuse_links, replace_file
from ..checkpoint.hashes import Progress, untold
from ..checkpoint.json_files import read_mapping
from ..checkpoint.live_pieces import Piece, lay_out
from ..checkpoint.mapped_tensors import dtype_named
from ..checkpoint.origin import METADATA_NAME as DCP_METADATA_NAME
from ..checkpoint.origin import weight_shards_of
from ..checkpoint.run_log import POSITION_NAME, RUN_NAME, STATE_NAME
from ..checkpoint.structure import LOG_NAME, PAGE_NAME, accept_edits, described_faults, in_words
from ..checkpoint.verify import Findings, findings_in
from .config_model import CONFIG_NAME, ExpectedTensor, expected_tensors, is_taken, model_class, read_config
from .saved_weights import InFiles, MasterWeights, SavedTensor, is_checkpoint_of_ours, open_weights
from .state_io import ZERO_FOLDER

ADAPTER_CONFIG_NAME = "adapter_config.json"
"""peft's file name."""

MAX_SHARD_BYTES = 5 * 10**9
"""Default limit of one weights file."""

_FLOATING = ("F64", "F32", "F16", "BF16")
"""Dtypes of unquantized weights; eight bits and fewer need a `quantization_config`."""

_QUANTIZED_BY = ("quant_method", "load_in_8bit", "load_in_4bit")

_OF_THE_RUN = (
    "optimizer.pt",
    "optimizer.bin",
    "scheduler.pt",
    "scaler.pt",
    "trainer_state.json",
    "training_args.bin",
    POSITION_NAME,
    RUN_NAME,
    LOG_NAME,
    PAGE_NAME,
)
"""Files that continue or describe a run and do not belong to the model."""


def folder_findings(folder: Path, on_progress: Progress = untold) -> Findings:
    """Checks a checkpoint or model folder: first by its manifest, then its weights against its config.

    Args:
        folder: the folder.
        on_progress: called with bytes read and total bytes.
    """
    found = Findings()
    if is_checkpoint_of_ours(folder) or not folder.is_dir():
        found = findings_in(folder, ZERO_FOLDER, on_progress=on_progress)
        if found.faults:
            return found
    faults = list(dict.fromkeys(weight_faults(folder))) or described_faults(folder)
    if not faults and is_checkpoint_of_ours(folder) and (folder / STATE_NAME).exists():
        # Imported here because the import of Trainer's state is slow.
        from .resume import resume_faults

        faults = resume_faults(folder)
    return replace(found, faults=tuple(faults), edits=() if faults else found.edits)


def accept_folder(folder: Path, on_progress: Progress = untold) -> list[str]:
    """Makes a checkpoint's manifest accept edited files without tensors; returns the edits.

    Raises:
        CheckpointError: there is no manifest, or another fault; edits of weights and optimizer state are never accepted.
    """
    if folder.is_dir() and not is_checkpoint_of_ours(folder):
        raise CheckpointError(
            f"hf_zero: {folder} is not a checkpoint of hf_zero: it has no manifest that could accept edits."
        )
    found = folder_findings(folder, on_progress)
    if found.faults:
        raise CheckpointError(
            f"hf_zero: the edits of {folder} cannot be accepted: {'; '.join(found.faults[:3])}. Only files without tensors of "
            "the model or the optimizer can be edited."
        )
    if found.edits:
        accept_edits(folder, ZERO_FOLDER)
    return list(found.edits)


def weight_faults(folder: Path) -> list[str]:
    """Lists faults of the weights compared with the model of the folder's config."""
    if (folder / ADAPTER_CONFIG_NAME).is_file():
        return []
    # Checked first, because everything below would open a link or a pipe.
    faults = entry_faults(folder)
    if faults:
        # Do not follow such entries.
        return faults
    try:
        with open_weights(folder) as weights:
            saved, as_in_files = weights.tensors, weights.as_in_files
    except CheckpointError as error:
        return [in_words(error)]
    # `from_pretrained` would use either of two tensors with one name.
    counts = Counter(tensor.name for tensor in saved)
    faults = [f"{tensor.name} is empty" for tensor in saved if 0 in tensor.shape]
    faults += [f"{name} is in two files" for name, count in counts.items() if count > 1]
    if not (folder / CONFIG_NAME).is_file():
        # One of our checkpoints may belong to a model without a config; the manifest vouches for its weights.
        if not is_checkpoint_of_ours(folder):
            faults.append(f"there is no {CONFIG_NAME} to compare the weights with")
        return faults
    try:
        expected = expected_tensors(folder, len(saved), as_in_files=as_in_files)
        quantized = read_mapping(folder / CONFIG_NAME).get("quantization_config")
    except CheckpointError as error:
        return [*faults, in_words(error)]
    if quantized is not None:
        return faults + _faults_of_quantized(saved, expected, quantized)
    for tensor in saved:
        if tensor.name not in expected:
            continue
        if expected[tensor.name].shape != tensor.shape:
            faults.append(
                f"{tensor.name} has shape {tensor.shape}, but {expected[tensor.name].shape} in the config's model"
            )
        elif expected[tensor.name].is_floating != (tensor.dtype in _FLOATING):
            faults.append(f"{tensor.name} has dtype {tensor.dtype}, which the config's model cannot have there")
    others = [tensor for tensor in saved if tensor.name not in expected]
    # A tied tensor is present if the files contain any of its names.
    missing = [name for name, tensor in expected.items() if not tensor.names & counts.keys()]
    if (others or missing) and as_in_files and not is_checkpoint_of_ours(folder):
        # Skip tensors with other dtypes, because none of them can be a weight of the model.
        usable = [tensor for tensor in saved if tensor.name in expected or tensor.dtype in _FLOATING]
        try:
            if is_taken(folder, {tensor.name: (tensor.shape, dtype_named(tensor.dtype)) for tensor in usable}):
                return faults
        except CheckpointError as error:
            faults.append(in_words(error))
    faults += [f"{tensor.name} is not a tensor of the config's model" for tensor in others]
    shards = weight_shards_of(folder)
    if shards and any(expected[each.name].shape != each.shape for each in saved if each.name in expected):
        faults.insert(0, f"there may be further files after {shards[-1].name}: each rank has written its own")
    return faults + [f"{name} is missing" for name in missing]


def _faults_of_quantized(
    saved: Sequence[SavedTensor], expected: Mapping[str, ExpectedTensor], quantized: object
) -> list[str]:
    """Lists faults of quantized weights, whose scales and codes have their own names and shapes.

    Args:
        saved: the saved tensors.
        expected: the config model's tensors.
        quantized: the config's `quantization_config`.
    """
    if not isinstance(quantized, dict) or not any(quantized.get(name) for name in _QUANTIZED_BY):
        return [f"{CONFIG_NAME} has a quantization_config without a quant_method"]
    modules = {name.rpartition(".")[0] for name in expected}
    of_modules: set[str] = set()
    faults, has_codes = [], False
    for tensor in saved:
        wanted = expected.get(tensor.name)
        # A parameter's quantization tensors (`weight.absmax`) are named below its name, a module's (`weight_scale`) next to
        # it.
        parents = [tensor.name[: dot.start()] for dot in re.finditer(r"[.:]", tensor.name)]
        module = next((parent for parent in reversed(parents) if parent in modules), None)
        is_codes = tensor.dtype not in _FLOATING and (wanted is None or wanted.is_floating)
        has_codes |= is_codes
        if wanted is None and module is None:
            faults.append(f"{tensor.name} is not a tensor of the config's model")
        elif wanted is None:
            of_modules.add(str(module))
        elif wanted.shape != tensor.shape and not is_codes:
            faults.append(f"{tensor.name} has shape {tensor.shape}, but {wanted.shape} in the config's model")
    names = {tensor.name for tensor in saved}
    faults += [
        f"{name} is missing"
        for name, tensor in expected.items()
        if not tensor.names & names and name.rpartition(".")[0] not in of_modules
    ]
    return faults if has_codes else [*faults, f"{CONFIG_NAME} has a quantization_config, but no weight is quantized"]


def consolidate(
    checkpoint: Path,
    out: Path,
    *,
    others: Sequence[Path] = (),
    masters: bool = False,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    on_progress: Progress = untold,
) -> list[str]:
    """Writes the model of a checkpoint as an ordinary Hugging Face folder; returns the weights files' names.

    Only one tensor is in memory at a time.

    Args:
        checkpoint: the checkpoint's folder.
        out: the folder to write to; created if missing, must be empty.
        others: the checkpoint's folders on other hosts' disks.
        masters: write the fp32 master weights instead of 16-bit weights.
        dtype: dtype of the floating-point weights, except for those that the config's model keeps in float32; None keeps the
            saved dtypes.
        max_shard_bytes: limit of one weights file.
        on_progress: called with bytes written and total bytes.

    Raises:
        CheckpointError: `out` is not empty, or the checkpoint cannot be read or has no whole model.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"hf_zero: {out} is not an empty folder; pass a new or empty one.")
    if (checkpoint / ADAPTER_CONFIG_NAME).is_file():
        raise CheckpointError(
            f"hf_zero: {checkpoint} holds adapters, which PeftModel.from_pretrained reads as they are; there is no whole model "
            "to write. To get one, merge them into their base (merge_and_unload)."
        )
    if masters and not is_checkpoint_of_ours(checkpoint):
        raise CheckpointError(f"hf_zero: {checkpoint} is not a checkpoint of hf_zero, so it has no masters.")
    copied = [path for path in sorted(checkpoint.iterdir()) if path.is_file() and not is_of_the_run(path.name)]
    refuse_links(checkpoint, copied)
    dtype_of = partial(_written_dtype, dtype=dtype, kept=_float32_names(checkpoint, dtype))
    with ExitStack() as stack:
        weights = stack.enter_context(open_weights(checkpoint, others))
        if not weights.as_in_files and (checkpoint / CONFIG_NAME).is_file():
            weights = InFiles(weights, checkpoint)
        if masters:
            weights = stack.enter_context(MasterWeights(weights, checkpoint, others))
        out.mkdir(parents=True, exist_ok=True)
        shards = list(_shards(weights.tensors, dtype_of, max_shard_bytes))
        total = sum(_written_bytes(tensor, dtype_of) for tensor in weights.tensors)
        done = 0
        weight_map: dict[str, str] = {}
        for number, shard in enumerate(shards, start=1):
            file = (
                SAFETENSORS_SINGLE_FILE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            )
            layout = {tensor.name: (dtype_of(tensor), tensor.shape) for tensor in shard}
            begins = lay_out(out / file, layout, {"format": "pt"})
            for tensor in shard:
                values = weights.read(tensor).to(dtype_of(tensor)).reshape(-1)
                Piece(path=out / file, offset=begins[tensor.name], values=values).write()
                done += values.nbytes
                on_progress(done, total)
            weight_map.update({tensor.name: file for tensor in shard})
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        replace_file(out / SAFETENSORS_INDEX_FILE, json.dumps(index, indent=2))
    of_weights = {SAFETENSORS_INDEX_FILE, *(tensor.file for tensor in weights.tensors)}
    of_weights |= {path.name for path in weight_shards_of(checkpoint)}
    for path in copied:
        if path.name not in of_weights:
            copy_new(path, out / path.name)
    if (dtype is not None or masters) and (out / CONFIG_NAME).is_file():
        config = read_mapping(out / CONFIG_NAME)
        # from_pretrained builds the model in the config's dtype, and would otherwise cast the weights back.
        config["dtype"] = str(dtype or torch.float32).removeprefix("torch.")
        replace_file(out / CONFIG_NAME, json.dumps(config, indent=2) + "\n")
    return sorted(set(weight_map.values()))


def _float32_names(folder: Path, dtype: torch.dtype | None) -> re.Pattern[str] | None:
    """Returns a pattern for weight names not cast to `dtype`; None if all are cast."""
    if dtype is None or not (folder / CONFIG_NAME).is_file():
        return None
    try:
        kind = model_class(read_config(folder), folder)
    except CheckpointError:
        # The files are written even if transformers does not know the model; then all weights are cast.
        return None
    return float32_names([kind], dtype)


def _written_dtype(tensor: SavedTensor, dtype: torch.dtype | None, kept: re.Pattern[str] | None) -> torch.dtype:
    saved = dtype_named(tensor.dtype)
    if dtype is None or not saved.is_floating_point or (kept is not None and kept.search(tensor.name)):
        return saved
    return dtype


def _written_bytes(tensor: SavedTensor, dtype_of: Callable[[SavedTensor], torch.dtype]) -> int:
    return math.prod(tensor.shape) * dtype_of(tensor).itemsize


def _shards(
    tensors: list[SavedTensor], dtype_of: Callable[[SavedTensor], torch.dtype], max_shard_bytes: int
) -> Iterator[list[SavedTensor]]:
    shard: list[SavedTensor] = []
    shard_bytes = 0
    for tensor in tensors:
        nbytes = _written_bytes(tensor, dtype_of)
        if shard and shard_bytes + nbytes > max_shard_bytes:
            yield shard
            shard, shard_bytes = [], 0
        shard.append(tensor)
        shard_bytes += nbytes
    if shard:
        yield shard


def is_of_the_run(name: str) -> bool:
    """Whether a file of this name continues or describes a run, and does not belong to the model."""
    return name in _OF_THE_RUN or name == DCP_METADATA_NAME or name.endswith(".distcp") or "rng_state" in name
