"""Makes the scripts' modules importable: the tests start ranks and count bytes with the benchmarks' own tools."""

import os
import sys
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"

for folder in (SCRIPTS / "bench", SCRIPTS):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import ranks  # noqa: E402

# Imported once, by the process that the tests' ranks are forked from.
ranks.PRELOADED_MODULES += [
    "transformers.trainer_seq2seq",
    "hf_zero.integrations.callback",
    "hf_zero.integrations.arguments",
]
