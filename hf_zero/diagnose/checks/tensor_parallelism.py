"""Whether this machine can train a model that transformers splits over ranks."""

from collections.abc import Iterator

import torch

from ..finding import Finding, absent, bad, good
from .versions import library

_LEAST_TRANSFORMERS = (5, 23)


def tensor_parallelism(tp_size: int) -> Iterator[Finding]:
    """What `parallel_config(tp_size=...)` needs beyond what every run does."""
    yield library("transformers", _LEAST_TRANSFORMERS, user=f"a model that is split over {tp_size} ranks")
    yield _copies(tp_size)


def _copies(tp_size: int) -> Finding:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    subject = "copies of the model"
    if gpus == 0:
        return absent(subject, "no GPU")
    if gpus % tp_size:
        advice = f"Choose a tp_size that divides {gpus}, or hide GPUs with CUDA_VISIBLE_DEVICES."
        return bad(subject, f"{gpus} GPUs cannot be divided into sets of {tp_size}", advice)
    return good(subject, f"{gpus // tp_size}, each over {tp_size} GPUs")
