"""Scripts that each show one fault, if a folder of them lies next to the repository."""

import pytest
from fault_scripts import STARTS, Start, run_script
from launching import ROOT

FOLDER = ROOT.parent / "shared" / "faults"
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py"))


@pytest.mark.slow
@pytest.mark.timeout(700)
@pytest.mark.parametrize(
    ("name", "arguments"), [(name, arguments) for name in SCRIPTS for arguments in STARTS.get(name, Start()).arguments]
)
def test_a_script_no_longer_shows_its_fault(name, arguments):
    outcome = run_script(FOLDER / f"{name}.py", arguments, STARTS.get(name, Start()))
    if outcome.verdict.startswith("needs "):
        pytest.skip(outcome.verdict)
    assert outcome.verdict in ("right", "refused"), outcome
