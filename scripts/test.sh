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
export PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
exec python -m pytest ${selection[@]+"${selection[@]}"} "$@"
