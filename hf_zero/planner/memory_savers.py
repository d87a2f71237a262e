"""Settings of other packages that save memory in addition to sharding, and the first ones with which a set-up fits."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ..forecast.fit import Room, size
from ..forecast.peak import Activations
from .candidates import candidates_of, fits_in
from .layouts import Job
from .meta_models import checkpointing_argument, checkpointing_method, is_checkpointed
from .search import Machine, choose
from .set_ups import SetUp


@dataclass(frozen=True, kw_only=True)
class _Part:
    """An option of a run. `line`: the code or argument to write."""

    words: str
    line: str


_IN_CHUNKS = _Part(
    words="the loss in chunks",
    line='SFTConfig(loss_type="chunked_nll") with TRL, or on a GPU TrainingArguments(use_liger_kernel=True)',
)
_RECOMPUTED = _Part(words="activation checkpointing", line=f"TrainingArguments({checkpointing_argument()}=True)")
_IN_HOST_MEMORY = _Part(words="activations in host memory", line="--zero ...,offload.activations=cpu")

_TRIED = (
    (_IN_CHUNKS,),
    (_RECOMPUTED,),
    (_IN_CHUNKS, _RECOMPUTED),
    (_IN_HOST_MEMORY,),
    (_IN_CHUNKS, _IN_HOST_MEMORY),
    (_IN_CHUNKS, _RECOMPUTED, _IN_HOST_MEMORY),
)
"""The cheapest first: chunks cost next to nothing, checkpointing a second forward, and host memory the link's time."""


def parts_that_help(
    job: Job,
    wanted: Sequence[SetUp],
    machine: Machine,
    micro_batches: int,
    mixed_precision: str,
    room: Room,
    recomputed: Callable[[], Activations | None],
) -> list[str]:
    """Names the first options with which one of the set-ups fits, in one line; [] if none helps.

    Args:
        job: the job with its activations.
        recomputed: traces activations with checkpointing; returns None if the model does not support checkpointing.
    """
    plain = job.activations
    is_on = {
        _IN_CHUNKS: plain is None or not plain.has_logits,
        _RECOMPUTED: checkpointing_method(job.model) is None or is_checkpointed(job.model),
        _IN_HOST_MEMORY: job.on_host or any(each.config.offload.activations == "cpu" for each in wanted),
    }
    with_checkpoints: list[Activations | None] = []
    for parts in _TRIED:
        if any(is_on[part] for part in parts):
            continue
        activations = plain
        if _RECOMPUTED in parts:
            with_checkpoints = with_checkpoints or [recomputed()]
            activations = with_checkpoints[0]
        if activations is None:
            continue
        if _IN_CHUNKS in parts:
            activations = activations.in_chunks()
        tried = [_with_activations_on_host(each) for each in wanted] if _IN_HOST_MEMORY in parts else list(wanted)
        found, _ = candidates_of(replace(job, activations=activations), tried, machine, micro_batches, mixed_precision)
        choice = choose(found, room) if found else None
        if choice is not None and choice.candidate is not None and fits_in(choice, room):
            words, lines = " and ".join(part.words for part in parts), "; ".join(part.line for part in parts)
            needed = size(choice.candidate.forecast.device_bytes)
            return [f"With {words}, {choice.candidate.name} fits: {needed} a rank. Write {lines}."]
    return []


def _with_activations_on_host(set_up: SetUp) -> SetUp:
    offload = {**(set_up.settings.get("offload") or {}), "activations": "cpu"}
    return replace(set_up, settings={**set_up.settings, "offload": offload})
