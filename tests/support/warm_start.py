"""Imported by the process that ranks are forked from: what each of them would spend its first half second on."""

import contextlib
import functools
import gc
import importlib
import importlib.metadata

from transformers import conversion_mapping

# Some thousand regular expressions, compiled when a process first saves or loads a model.
make = getattr(conversion_mapping, "get_checkpoint_conversion_mapping", None)
if make is not None:
    make("bert")

# Trainer and accelerate ask for the same few releases in each start, and each time the answer is parsed out of a file.
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

# What a first model of its family, or a first checkpoint, plan or profile imports when it comes to it.
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
    # Another release may have it elsewhere: what needs it imports it.
    with contextlib.suppress(ImportError):
        importlib.import_module(module)

# A small model has few objects, and as many new ones a step: a process that all looked at after each 700 would do little else.
gc.set_threshold(10_000, gc.get_threshold()[1], gc.get_threshold()[2])
