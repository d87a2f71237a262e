"""A typical mistake ends soon, with one message that names the fault and the remedy, and a status other than 0."""

import pytest
from mistakes import MISTAKES, answer, prepare

pytestmark = pytest.mark.timeout(120)

WITHIN_S = 60.0
"""The most seconds until the end, on a machine with other work. The longest waits of a rank for another are ten seconds."""

SHORT = ("the plugin's class", "stages that differ", "reading p.grad", "a launch in a rank")
"""Scripts in the short suite. Commands need no ranks: those of it are all but pushes, which import the Hub's client."""


def is_short(name: str) -> bool:
    typed = MISTAKES[name].typed
    return name in SHORT or (MISTAKES[name].is_command and not typed.startswith("hf-zero push"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("mistakes")
    prepare(made)
    return made


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if is_short(name) else pytest.mark.slow) for name in MISTAKES],
)
def test_a_mistake_is_answered_with_the_fault_and_the_remedy(name, folder):
    said = answer(MISTAKES[name], folder)
    assert said.faults(MISTAKES[name], within_s=WITHIN_S) == [], said.said[-3000:]


def test_there_are_a_hundred():
    assert len(MISTAKES) >= 100
