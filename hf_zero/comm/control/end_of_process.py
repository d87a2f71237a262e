"""Ends this process with a reason, whatever its main thread is held up in, and tells the launcher the reason."""

import json
import os
import sys
import time
from pathlib import Path

ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"
"""Where torchrun, and so `accelerate launch`, looks for what it shows under "Root Cause"."""


def write_error_file(summary: str, said: str) -> bool:
    """Leaves an error for the launcher, unless another one has been left. Whether one is there now."""
    path = os.environ.get(ERROR_FILE_VARIABLE)
    if not path or Path(path).exists():
        return bool(path)
    # As torch.distributed.elastic reads it; of the two texts, it shows `py_callstack`.
    extra = {"py_callstack": said, "timestamp": str(int(time.time()))}
    try:
        Path(path).write_text(json.dumps({"message": {"message": summary, "extraInfo": extra}}))
    except OSError as error:
        print(f"hf_zero: the error could not be written for the launcher: {error}", file=sys.stderr)
        return False
    return True


def end_process(said: str) -> None:
    """Says why and ends, with status 1. Not by an exception: a thread that stands in a call sees none."""
    write_error_file(said.partition("\n")[0], said)
    # Past Python's own buffers, whose locks the main thread may hold.
    os.write(2, f"{said}\n".encode())
    os._exit(1)
