"""The command `hf-zero`, one file a command."""
