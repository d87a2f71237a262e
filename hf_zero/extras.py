"""The extras: rooms beside the core, each switched on by a setting or a command. The core imports none of them but by this table.

Where the core asks for an extra, `extra` imports the room's file and gives the function or class of that name. A run that asks
for none imports none, and the core trains where their folders are missing.
"""

import importlib
import importlib.util
from dataclasses import dataclass
from typing import Any

_PACKAGE = __name__.rpartition(".")[0]


@dataclass(frozen=True, kw_only=True)
class Extra:
    """A room of hf_zero that the core does without.

    Attributes:
        what: in a sentence.
        switch: the setting, function or command that asks for it.
        factories: all that others take from it, as `file:name`.
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
        factories=("timing:Early",),
    ),
    "wire": Extra(
        what="Gradients and parameters in int8 or int4 blocks, and outer steps between groups of ranks.",
        switch="`comm.gradients`, `comm.weights` or `comm.sync_every`",
        factories=(
            "reductions:quantised_reduction",
            "reductions:QuantisedGather",
            "quantise:block_format",
            "outer:SyncedEvery",
        ),
    ),
}
"""By the name of the room's folder."""


def extra(room: str, name: str) -> Any:
    """The function or class `name` of an extra.

    Raises:
        ImportError: the room's folder is missing.
    """
    [file] = [file for file, _, found in (each.partition(":") for each in EXTRAS[room].factories) if found == name]
    module = f"{_PACKAGE}.{room}.{file}"
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name not in (f"{_PACKAGE}.{room}", module):
            raise
        installed = ", ".join(filter(is_installed, EXTRAS)) or "none"
        raise ImportError(
            f"hf_zero: {EXTRAS[room].switch} needs the extra `{room}`, whose folder is missing. Installed extras: {installed}. "
            "Install hf-zero anew, or do without."
        ) from None


def is_installed(room: str) -> bool:
    """Whether an extra's folder is there; found without importing it."""
    found = importlib.util.find_spec(f"{_PACKAGE}.{room}")
    # A folder without files, which Python's caches may keep, has no origin.
    return found is not None and found.origin is not None
