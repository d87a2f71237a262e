"""Configs of DeepSpeed, FSDP and accelerate as configs of hf_zero, with a word on each of their keys."""
