"""Triton's interpreter in a process that is forked from one whose triton compiles."""

import os
import sys


def interpret() -> None:
    """Has kernels interpreted that are launched from now on; in this process none may have been launched."""
    os.environ["TRITON_INTERPRET"] = "1"
    # torch may have imported triton. What of it is in C says nothing of how kernels run, and cannot be imported twice.
    for name in list(sys.modules):
        if (name == "triton" or name.startswith("triton.")) and not name.startswith("triton._C"):
            del sys.modules[name]
