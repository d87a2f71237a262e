"""Reads checkpoints and settings of other engines: torch.distributed.checkpoint, DeepSpeed, FSDP, accelerate.

An extra: `hf-zero convert` and `hf-zero migrate` use this room, and a resume from a folder of another engine. FORMATS.md
describes the layouts that are read.
"""
