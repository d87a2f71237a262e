"""Whether this machine can train a model that transformers splits over ranks."""

import importlib.metadata
import re
from collections.abc import Iterator

import torch

from ..finding import Finding, absent, bad, good

_LEAST = (5, 23)


def tensor_parallelism(tp_size: int) -> Iterator[Finding]:
    """What `parallel_config(tp_size=...)` needs beyond what every run does."""
    yield _transformers(f"tensor parallelism, tp_size {tp_size}")
    yield _copies(tp_size)


def _transformers(subject: str) -> Finding:
    try:
        found = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        return bad(subject, "transformers is not installed", "pip install 'transformers>=5.23'")
    if tuple(map(int, re.findall(r"\d+", found)[:2])) < _LEAST:
        return bad(subject, f"transformers {found}", "Models that are split over ranks need 5.23 or later.")
    return good(subject, f"transformers {found}")


def _copies(tp_size: int) -> Finding:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    subject = "copies of the model"
    if gpus == 0:
        return absent(subject, "no GPU")
    if gpus % tp_size:
        advice = f"Choose a tp_size that divides {gpus}, or hide GPUs with CUDA_VISIBLE_DEVICES."
        return bad(subject, f"{gpus} GPUs cannot be divided into sets of {tp_size}", advice)
    return good(subject, f"{gpus // tp_size}, each over {tp_size} GPUs")
