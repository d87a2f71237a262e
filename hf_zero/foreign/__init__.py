"""Reads checkpoints and settings of other engines: torch.distributed.checkpoint, DeepSpeed, FSDP, accelerate.

The commands are `hf-zero convert` and `hf-zero migrate`; a resume from a folder of another engine comes here, too. FORMATS.md
describes the layouts that are read. Its tests are in `tests/foreign/`.
"""
