"""Imported by the process that ranks are forked from: what each of them would spend its first half second on."""

from transformers import conversion_mapping

# Some thousand regular expressions, compiled when a process first saves or loads a model.
make = getattr(conversion_mapping, "get_checkpoint_conversion_mapping", None)
if make is not None:
    make("bert")
