"""Imported by the process from which ranks are forked: does the work of each rank's first half second once."""

import contextlib
import functools
import gc
import importlib
import importlib.metadata

from transformers import conversion_mapping

# Compiles about a thousand regular expressions, otherwise compiled when a process first saves or loads a model.
make = getattr(conversion_mapping, "get_checkpoint_conversion_mapping", None)
if make is not None:
    make("bert")

# Trainer and accelerate ask for the same releases in each start, and each answer is parsed from a file.
importlib.metadata.version = functools.cache(importlib.metadata.version)
importlib.metadata.metadata = functools.cache(importlib.metadata.metadata)
ASKED_FOR = [
    "accelerate",
    "datasets",
    "hf-zero",
    "huggingface_hub",
    "safetensors",
    "tokenizers",
    "torch",
    "transformers",
]
for package in ASKED_FOR:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version(package), importlib.metadata.metadata(package)

# Modules imported on first use: of a model family, a checkpoint, a plan or a profile.
FAMILIES = [
    "albert",
    "bert",
    "bloom",
    "deberta_v2",
    "distilbert",
    "electra",
    "funnel",
    "gpt_neo",
    "llama",
    "roberta",
    "t5",
    "vit",
]
LATE = ["numpy.ctypeslib", "rich._emoji_codes", "torch.profiler._cupti_monitor", "torch.utils.serialization"]

for module in (*(f"transformers.models.{family}.modeling_{family}" for family in FAMILIES), *LATE):
    # A different release may lack this module. Whoever needs it imports it.
    with contextlib.suppress(ImportError):
        importlib.import_module(module)

# A small model has few objects, and as many new ones per step. Collecting after every 700 would take most of the time.
gc.set_threshold(10_000, gc.get_threshold()[1], gc.get_threshold()[2])
