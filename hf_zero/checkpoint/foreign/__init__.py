"""Readers of checkpoints that other engines wrote: DeepSpeed's ZeRO, and torch.distributed.checkpoint as FSDP uses it."""
