"""Makes the scripts' modules importable: the tests start ranks and count bytes with the benchmarks' own tools."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

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


@pytest.fixture(autouse=True)
def no_watch_outlives_its_test() -> Iterator[None]:
    """A plugin that no Accelerator installs watches all optimizers of the process: here those of later tests, too."""
    from torch.optim.optimizer import _global_optimizer_pre_hooks as hooks

    before = set(hooks)
    yield
    for added in set(hooks) - before:
        del hooks[added]


@pytest.fixture(scope="session")
def library() -> Path:
    """The stand-in for an accelerator, compiled."""
    import standin_device

    return standin_device.build()
