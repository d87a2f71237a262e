# Sourced by the other scripts: makes ${HF_ZERO_VENV:-.venv} once, installs the package there with its pinned versions,
# and activates it. Run again, it installs only when pyproject.toml or the constraints have changed.
venv="${HF_ZERO_VENV:-.venv}"
stamp="$venv/.hf_zero_installed"
if [[ ! -x "$venv/bin/python" ]]; then
    python="$(command -v python3.11 || command -v python3)"
    echo "Making a virtual environment in $venv with $("$python" --version)"
    "$python" -m venv "$venv"
fi
# shellcheck disable=SC1091
source "$venv/bin/activate"
if [[ ! -f "$stamp" || pyproject.toml -nt "$stamp" || scripts/constraints.txt -nt "$stamp" ]]; then
    echo "Installing hf-zero and its requirements (a few minutes the first time)"
    # torch first and alone: the others then find it there and ask for no other build of it.
    pip install -q -c scripts/constraints.txt torch
    pip install -q -c scripts/constraints.txt -e ".[dev]"
    touch "$stamp"
fi
