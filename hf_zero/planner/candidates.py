"""The set-ups of a job with their needs."""

from ..buckets.precision import resolve_casts
from ..config import ConfigError
from ..forecast.fit import FITS, Room
from .layouts import Job, ddp_step_time, step_time
from .request import PlanRequest
from .search import Candidate, Choice, Machine
from .set_ups import SetUp


def candidates_of(
    job: Job, wanted: list[SetUp], machine: Machine, micro_batches: int, mixed_precision: str
) -> tuple[list[Candidate], list[str]]:
    """Returns the possible set-ups with their memory and step times, and the reasons against the remaining ones."""
    found, faults = [], []
    for each in wanted:
        try:
            config = resolve_casts(each.config, mixed_precision)
            layout = job.layout(config)
            forecast = job.forecast_of(each.name, each.settings, layout)
        except (ConfigError, ValueError) as error:
            faults.append(f"{each.name}: {str(error).removeprefix('hf_zero: ')}")
            continue
        step = None if job.activations is None else step_time(layout, machine, job.activations, micro_batches)
        found.append(Candidate(forecast=forecast, step=step))
    return found, faults


def ddp_candidate(job: Job, request: PlanRequest) -> Candidate:
    forecast = job.forecast_ddp()
    if job.activations is None:
        return Candidate(forecast=forecast)
    layout = job.layout(SetUp(name="", settings={"stage": 0}).config)
    step = ddp_step_time(layout, request.machine, job.activations, request.accumulation)
    return Candidate(forecast=forecast, step=step)


def fits_in(choice: Choice, room: Room) -> bool:
    return choice.candidate is not None and room.fit_of(choice.candidate.forecast) == FITS
