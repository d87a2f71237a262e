#!/usr/bin/env bash
# Makes a virtual environment, installs the package and runs every test. `--slow` adds the long fault and bound runs;
# anything else is handed to pytest: `bash scripts/test.sh -k layout`.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/venv.sh
selection=(-m "not slow")
if [[ "${1:-}" == "--slow" ]]; then
    selection=()
    shift
fi
ruff check .
ruff format --check .
# Types are checked on one core while the tests' first ones run; what it has to say comes at the end.
types="$(mktemp)"
python -m mypy >"$types" 2>&1 &
checker=$!
trap 'kill "$checker" 2>/dev/null || true; rm -f "$types"' EXIT
# Some hundred processes import the package and the tests: what Python has compiled is kept.
unset PYTHONDONTWRITEBYTECODE
export PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
# A second thread of torch's in each of several processes would wait for its turn by spinning.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# A file's tests stay in one process, for what they share; the longest files come first (tests/conftest.py). Three processes keep two
# cores busy while ranks wait for one another. Ranks and time limits are made for a machine that does other work too.
status=0
python -m pytest -n 3 --dist loadfile --no-loadscope-reorder ${selection[@]+"${selection[@]}"} "$@" || status=$?
wait "$checker" || status=1
cat "$types"
exit "$status"
