"""The error of everything that reads or writes checkpoints."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be read or written: names the folder or file, what is wrong, and what to do."""
