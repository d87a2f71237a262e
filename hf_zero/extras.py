"""The extras: optional packages, each switched on by a setting or a command.

If the core needs an extra, `extra` imports the module and returns the function or class. A run without extras imports none of
them, and the core also trains if their folders are missing.
"""

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Extra:
    """An optional package of hf_zero.

    Attributes:
        what: one sentence about the package.
        switch: the setting, function or command that uses the package.
        factories: all names used by other packages, as `file:name`.
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
    "wire": Extra(
        what="Gradients and parameters in int8 blocks, and outer steps between groups of ranks.",
        switch="`comm.gradients`, `comm.weights` or `comm.sync_every`",
        factories=(
            "reductions:quantized_reduction",
            "gathers:QuantizedGather",
            "quantize:BlockFormat",
            "outer:SyncedEvery",
        ),
    ),
    "sequence": Extra(
        what="Sequences computed by several ranks together.",
        switch="`sp_size` of accelerate's ParallelismConfig",
        factories=("parallel:enable_sequence_parallel", "parallel:sequence_parallel_of"),
    ),
    "planner": Extra(
        what="The settings that fit a machine, their costs, and a recommendation.",
        switch="`hf-zero plan`, `hf_zero.make_plan` or `stage: auto`",
        factories=(
            "planner:make_plan",
            "tables:header",
            "tables:table_of",
            "picture:draw",
            "auto:config_for",
            "auto:forecast_at_start",
        ),
    ),
    "diagnose": Extra(
        what="Checks of a machine and of a run, and micro-batches halved when memory runs out.",
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
        what="The log of a run, and a page made from the log.",
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
        what="The model of a run on the Hub, with a card of the run.",
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


def extra(folder: str, name: str) -> Any:
    """Imports and returns the function or class `name` of an extra.

    Raises:
        MissingExtraError: the folder of the extra is missing.
    """
    if not is_installed(folder):
        installed = ", ".join(filter(is_installed, EXTRAS)) or "none"
        raise MissingExtraError(
            f"hf_zero: {EXTRAS[folder].switch} needs the extra `{folder}`, whose folder is missing. Installed extras: "
            f"{installed}. Reinstall hf-zero, or do not use this extra."
        )
    # Only accept names in the table, so that the table stays complete.
    [file] = [file for file, _, found in (each.partition(":") for each in EXTRAS[folder].factories) if found == name]
    return getattr(importlib.import_module(f".{folder}.{file}", __package__), name)


def is_installed(folder: str) -> bool:
    """Whether the folder of an extra exists. Nothing is imported."""
    return Path(__file__).with_name(folder).joinpath("__init__.py").is_file()
