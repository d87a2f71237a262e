"""The extras: packages that the core works without. Each is switched on by a setting or a command.

If the core needs an extra, `extra` imports the module and returns the function or class. A run that uses no extra imports none,
and the core trains if their folders are missing.
"""

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Extra:
    """A package of hf_zero that the core works without.

    Attributes:
        what: one sentence that describes the package.
        switch: the setting, function or command that uses the package.
        factories: all names that other packages use, as `file:name`.
    """

    what: str
    switch: str
    factories: tuple[str, ...]


EXTRAS = {
    "kernels": Extra(
        what="Triton kernels that measure gradients and step AdamW, Adam, SGD and Lion.",
        switch="`kernels: auto` or `always`",
        factories=(
            "bucket_steps:KernelSteps",
            "statistics:NormByKernels",
            "statistics:launch_fault",
            "stochastic:stochastic_triton",
        ),
    ),
    "early": Extra(
        what="Steps of offloaded state that are taken while backward goes on.",
        switch="`offload.speculate_bytes`",
        factories=("early:Early",),
    ),
    "wire": Extra(
        what="Gradients and parameters in int8 or int4 blocks, and outer steps between groups of ranks.",
        switch="`comm.gradients`, `comm.weights` or `comm.sync_every`",
        factories=(
            "reductions:quantised_reduction",
            "gathers:QuantisedGather",
            "quantise:block_format",
            "outer:SyncedEvery",
        ),
    ),
    "sequence": Extra(
        what="Sequences that several ranks compute together.",
        switch="`sp_size` of accelerate's ParallelismConfig",
        factories=("seat:seat_sequence", "seat:seat_of"),
    ),
    "planner": Extra(
        what="Which settings fit a machine, what they cost, and which to choose.",
        switch="`hf-zero plan`, `hf_zero.make_plan` or `stage: auto`",
        factories=(
            "planner:make_plan",
            "planner:header",
            "planner:table_of",
            "planner:draw",
            "auto:config_for",
            "auto:forecast_at_start",
        ),
    ),
    "diagnose": Extra(
        what="Whether a machine and a run do as they should, and micro-batches that are halved where memory runs out.",
        switch="`hf-zero doctor`, `hf-zero parity` or `out_of_memory: halve`",
        factories=(
            "doctor:doctor",
            "parity:parity",
            "parity_report:ParityError",
            "recorded:parity_of_script",
            "recorded:words_of",
            "rescue:Rescue",
        ),
    ),
    "report": Extra(
        what="The log of a run, and the page that is made of it.",
        switch="`report`, `hf_zero.RunRecorder` or `hf-zero report`",
        factories=("recorder:RunRecorder", "page:write_page", "sections:make_report", "run_files:ReportError"),
    ),
    "foreign": Extra(
        what="Checkpoints and settings of DeepSpeed, FSDP and accelerate.",
        switch="a checkpoint of DeepSpeed or FSDP, `hf-zero convert` or `hf-zero migrate`",
        factories=(
            "convert:open_foreign",
            "states:WeightShards",
            "convert:open_saved_by_others",
            "convert:load_foreign_weights",
            "convert:convert",
            "migrate:migrate",
        ),
    ),
    "hub": Extra(
        what="The model of a run on the Hub, with a card of what the run tells.",
        switch="`push_to_hub` or `hf-zero push`",
        factories=(
            "trainer_push:make_trainer_repo",
            "trainer_push:push_checkpoint",
            "trainer_push:push_output",
            "trainer_push:write_trainer_card",
            "push:push_model",
            "upload:Destination",
            "upload:HubError",
        ),
    ),
}
"""Maps the name of the folder to the extra."""


class MissingExtraError(ImportError):
    """Raised if a setting or command uses an extra whose folder is missing."""


def extra(room: str, name: str) -> Any:
    """Imports and returns the function or class `name` of an extra.

    Raises:
        MissingExtraError: the folder of the extra is missing.
    """
    if not is_installed(room):
        installed = ", ".join(filter(is_installed, EXTRAS)) or "none"
        raise MissingExtraError(
            f"hf_zero: {EXTRAS[room].switch} needs the extra `{room}`, whose folder is missing. Installed extras: {installed}. "
            "Install hf-zero anew, or do without."
        )
    # Look the name up in the table only. A name that is missing from the table raises an error here, so the table stays complete.
    [file] = [file for file, _, found in (each.partition(":") for each in EXTRAS[room].factories) if found == name]
    return getattr(importlib.import_module(f".{room}.{file}", __package__), name)


def is_installed(room: str) -> bool:
    """Whether the folder of an extra exists. Nothing is imported."""
    return Path(__file__).with_name(room).joinpath("__init__.py").is_file()
