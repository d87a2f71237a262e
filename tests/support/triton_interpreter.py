"""Triton's interpreter in a process forked from one whose triton compiles."""

import os
import sys


def interpret() -> None:
    """Makes later launches of kernels use the interpreter. This process must not have launched a kernel before."""
    os.environ["TRITON_INTERPRET"] = "1"
    # torch may have imported triton. Its C modules do not depend on the mode, and cannot be imported twice.
    for name in list(sys.modules):
        if (name == "triton" or name.startswith("triton.")) and not name.startswith("triton._C"):
            del sys.modules[name]
