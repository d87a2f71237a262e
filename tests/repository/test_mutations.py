"""The list of breaks fits the engine, and the command that makes them tells a break that a test fails of from another.

`python scripts/mutation_check.py` makes all of them, in about seven minutes: no suite does so a second time.
"""

import dataclasses

import mutation_check
import pytest


def test_each_break_fits_the_engine_as_it_is():
    gone = []
    for fault in mutation_check.BREAKS:
        try:
            path, text = mutation_check.broken(fault, mutation_check.ROOT)
            compile(text, str(path), "exec")
        except LookupError as error:
            gone.append(str(error))
    assert not gone, "\n".join(gone)


@pytest.mark.slow
@pytest.mark.timeout(2 * mutation_check.SECONDS_A_BREAK + 60)
def test_a_break_is_caught_and_a_harmless_one_is_not():
    [fault] = [each for each in mutation_check.BREAKS if each.name == "wrong-divisor"]
    with mutation_check.BrokenTree() as tree:
        assert "test_bits_are_ddps" in tree.run(fault)
        harmless = dataclasses.replace(fault, new=f"1.0 * {fault.old}")
        assert tree.run(harmless) is None
