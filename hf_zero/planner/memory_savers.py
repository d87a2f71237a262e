"""Memory-saving settings of other packages in addition to sharding, and their choice for a set-up."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from ..forecast.fit import Room, size
from ..forecast.peak import Activations
from .candidates import candidates_of, fits_in
from .layouts import Job
from .meta_models import checkpointing_argument, checkpointing_method, is_checkpointed
from .search import SIMPLER, Candidate, Choice, Machine, choose, duration
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
_RECOMPUTED = _Part(
    words="activation checkpointing",
    line=f"TrainingArguments({checkpointing_argument()}=True), or model.{checkpointing_argument()}_enable() before prepare",
)
_IN_HOST_MEMORY = _Part(words="activations in host memory", line="--zero ...,offload.activations=cpu")
_IN_HALVES = _Part(
    words="half the rows per micro-batch and twice as many micro-batches",
    line="half of per_device_train_batch_size and twice gradient_accumulation_steps",
)

_TRIED = (
    (_IN_CHUNKS,),
    (_RECOMPUTED,),
    (_IN_CHUNKS, _RECOMPUTED),
    (_IN_HOST_MEMORY,),
    (_IN_CHUNKS, _IN_HOST_MEMORY),
    (_IN_CHUNKS, _RECOMPUTED, _IN_HOST_MEMORY),
    (_IN_HALVES,),
    (_IN_CHUNKS, _IN_HALVES),
)
"""The cheapest first: chunks cost next to nothing, checkpointing a second forward, and host memory the link's time. If nothing
fits, the plan advises smaller micro-batches anyway, so they are the last."""


def parts_that_help(
    job: Job,
    wanted: Sequence[SetUp],
    machine: Machine,
    micro_batches: int,
    mixed_precision: str,
    room: Room,
    choice: Choice,
    *,
    recomputed: Callable[[], Activations | None],
    halved: Callable[[], Activations | None],
) -> list[str]:
    """Names options with which a set-up fits, or steps faster than a chosen set-up with offload, in one line; [] if none helps.

    Args:
        job: the job.
        choice: the choice without these options. If nothing fits, the first options that help are named, otherwise the fastest.
        recomputed: traces activations with checkpointing; returns None if the model does not support checkpointing.
        halved: traces activations of half the rows; returns None if a micro-batch has no halves.
    """
    plain, chosen = job.activations, choice.candidate if fits_in(choice, room) else None
    if plain is None or (chosen is not None and not _offloads(chosen)):
        return []
    is_on = {
        _IN_CHUNKS: not plain.has_logits,
        _IN_HALVES: False,
        _RECOMPUTED: checkpointing_method(job.model) is None or is_checkpointed(job.model),
        _IN_HOST_MEMORY: job.on_host or any(each.config.offload.activations == "cpu" for each in wanted),
    }
    traces = {_IN_HALVES: cache(halved), _RECOMPUTED: cache(recomputed)}
    best: tuple[float, list[str]] | None = None
    for parts in _TRIED:
        if any(is_on[part] for part in parts):
            continue
        activations = next((traces[part]() for part in parts if part in traces), plain)
        if activations is None:
            continue
        if _IN_CHUNKS in parts:
            activations = activations.in_chunks()
        tried = [_with_activations_on_host(each) for each in wanted] if _IN_HOST_MEMORY in parts else list(wanted)
        times = 2 if _IN_HALVES in parts else 1
        changed = replace(job, activations=activations, accumulates=job.accumulates or times > 1)
        found, _ = candidates_of(changed, tried, machine, times * micro_batches, mixed_precision)
        other = choose(found, room) if found else None
        if other is None or other.candidate is None or not fits_in(other, room):
            continue
        words, lines = " and ".join(part.words for part in parts), "; ".join(part.line for part in parts)
        name, needed = other.candidate.name, size(other.candidate.forecast.device_bytes)
        if chosen is None:
            return [f"With {words}, {name} fits: {needed} a rank. Use {lines}."]
        least_s = chosen.step_s * (1 - SIMPLER) if best is None else best[0]
        if other.candidate.step_s < least_s:
            step = f"a step of {duration(other.candidate.step_s)} instead of {duration(chosen.step_s)}"
            best = other.candidate.step_s, [f"Faster: with {words}, {name} fits and has {step}. Use {lines}."]
    return [] if best is None else best[1]


def _offloads(candidate: Candidate) -> bool:
    return bool(candidate.forecast.host_bytes or candidate.forecast.disk_bytes)


def _with_activations_on_host(set_up: SetUp) -> SetUp:
    offload = {**(set_up.settings.get("offload") or {}), "activations": "cpu"}
    return replace(set_up, settings={**set_up.settings, "offload": offload})
