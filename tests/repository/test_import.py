"""What importing the package costs, and that the command line of an install without extras is enough."""

import importlib.resources
import os
import subprocess
import sys

import pytest
from cells import slow

import hf_zero

MEASURE = """
import time
first = time.process_time()
import accelerate
start = time.process_time()
import hf_zero
{names}
print(time.process_time() - start, start - first)
import sys
hf_zero.ZeroPlugin(2)
assert 'transformers.trainer' not in sys.modules
"""


MOST_SECONDS, MOST_OF_ACCELERATES = 0.3, 0.15
"""Either will do: a core that does other work too, takes longer for both."""


def cost_over_accelerate(names: str) -> float:
    """Seconds of CPU, as far as they are on a machine that has nothing else to do."""
    # As installed: Python keeps what it has compiled.
    keeps_bytecode = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    ran = subprocess.run(
        [sys.executable, "-c", MEASURE.format(names=names)],
        env=keeps_bytecode,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    seconds, accelerates = map(float, ran.stdout.split())
    return min(seconds, seconds / accelerates / MOST_OF_ACCELERATES * MOST_SECONDS)


@pytest.mark.parametrize("names", [slow(""), "hf_zero.ZeroPlugin; hf_zero.ZeroConfig; hf_zero.engine_of"])
def test_import_costs_little_over_accelerate_and_leaves_transformers_trainer_out(names):
    # One of a few is enough: whatever else the machine does adds to a process's time and never takes from it.
    found = []
    while len(found) < 4 and min(found, default=MOST_SECONDS) >= MOST_SECONDS:
        found.append(cost_over_accelerate(names))
    print(f"import hf_zero; {names}: {min(found):.3f} s of CPU over import accelerate")
    assert min(found) < MOST_SECONDS


def test_every_public_name_is_there_and_an_unknown_one_is_an_attribute_error():
    assert all(hasattr(hf_zero, name) for name in hf_zero.__all__)
    with pytest.raises(AttributeError, match="no attribute 'ZeroPluggin'"):
        hf_zero.ZeroPluggin  # noqa: B018


def test_type_checkers_are_told_that_the_package_is_typed():
    assert (importlib.resources.files("hf_zero") / "py.typed").is_file()
