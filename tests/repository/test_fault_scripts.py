"""Scripts that each show one fault, if a folder of them lies next to the repository."""

import pytest
from fault_scripts import STARTS, Start, run_script
from launching import ROOT

FOLDER = ROOT.parent / "shared" / "faults"
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py"))

OPEN = {
    "flip_of_an_owner": "a flip that torch counts as a script's write to optimizer state is taken for an edit",
    "scale_agreement": "each rank sends every other rank a message at the end of a backward",
    "scale_end": "each waiting rank asks the store about every other rank",
    "scale_groups": "each rank makes every group",
    "scale_manifest": "a manifest lists each rank's part of each parameter",
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
