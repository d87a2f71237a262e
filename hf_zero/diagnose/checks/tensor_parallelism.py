"""Whether this machine can train a model that transformers splits over ranks."""

import importlib.metadata
import re
from collections.abc import Iterator

import torch

from ..finding import Finding, absent, bad, good

_LEAST = (5, 23)


def tensor_parallelism(tp_size: int) -> Iterator[Finding]:
    """What `parallel_config(tp_size=...)` needs beyond what every run does."""
    subject, found = f"tensor parallelism, tp_size {tp_size}", importlib.metadata.version("transformers")
    if tuple(map(int, re.findall(r"\d+", found)[:2])) < _LEAST:
        yield bad(subject, f"transformers {found}", "Models that are split over ranks need 5.23 or later.")
    else:
        yield good(subject, f"transformers {found}")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    subject = "copies of the model"
    if gpus == 0:
        yield absent(subject, "no GPU")
    elif gpus % tp_size:
        advice = f"Choose a tp_size that divides {gpus}, or hide GPUs with CUDA_VISIBLE_DEVICES."
        yield bad(subject, f"{gpus} GPUs cannot be divided into sets of {tp_size}", advice)
    else:
        yield good(subject, f"{gpus // tp_size}, each over {tp_size} GPUs")
