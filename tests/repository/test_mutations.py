"""The short suite sees what is broken in the engine."""

from collections.abc import Iterator

import mutation_check
import pytest


@pytest.fixture(scope="module")
def tree() -> Iterator[mutation_check.BrokenTree]:
    with mutation_check.BrokenTree() as tree:
        yield tree


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
@pytest.mark.timeout(mutation_check.SECONDS_A_BREAK + 60)
@pytest.mark.parametrize("fault", mutation_check.BREAKS, ids=lambda fault: fault.name)
def test_each_break_is_caught(fault, tree):
    assert tree.run(fault) is not None
