"""Scripts that each show one fault, if a folder of them lies next to the repository."""

import pytest
from fault_scripts import STARTS, Start, run_script
from launching import ROOT

FOLDER = ROOT.parent / "shared" / "faults"
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py"))

OPEN = {
    "scale_end": "the script counts a function that asks about one rank, which waiting ranks no longer call for every rank",
    "scale_manifest": "the script adds up the rows of all ranks itself, which manifests no longer list",
}
"""Scripts whose fault still shows, and the reason."""


@pytest.mark.slow
@pytest.mark.timeout(700)
@pytest.mark.parametrize(
    ("name", "arguments"), [(name, arguments) for name in SCRIPTS for arguments in STARTS.get(name, Start()).arguments]
)
def test_a_script_no_longer_shows_its_fault(name, arguments, request):
    if name in OPEN:
        request.applymarker(pytest.mark.xfail(reason=OPEN[name], strict=True))
    outcome = run_script(FOLDER / f"{name}.py", arguments, STARTS.get(name, Start()))
    if outcome.verdict.startswith("needs "):
        pytest.skip(outcome.verdict)
    assert outcome.verdict in ("right", "refused"), outcome
