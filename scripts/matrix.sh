#!/usr/bin/env bash
# Every way in and every save on the oldest and the newest releases of torch, transformers and accelerate, with the newest TRL, PEFT and
# sentence-transformers: an environment for each row, and in each what scripts/bench/matrix.py does.
#
#     bash scripts/matrix.sh                             # all rows, in build/matrix
#     bash scripts/matrix.sh --folder /big/disk newest   # one row, elsewhere
#     bash scripts/matrix.sh own=/path/of/an/environment # a row called `own`, of an environment that is there
#     bash scripts/matrix.sh --keep                      # into scripts/bench/results and docs/
#
# torch's usual build for Linux brings CUDA: 14 GB in all. UV_TORCH_BACKEND=cpu takes builds of a tenth of that. A row whose Python is not
# installed has uv download that Python. Figures go to outputs/bench/matrix.json. Ends with status 1 if a row failed.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=build/matrix
results=outputs/bench
asked=()
while [[ $# -gt 0 ]]; do
    case "$1" in
        --folder)
            folder="$2"
            shift
            ;;
        --keep) results=scripts/bench/results ;;
        *) asked+=("$1") ;;
    esac
    shift
done
[[ ${#asked[@]} -gt 0 ]] || asked=(oldest python310 middle crossed newest)

# A new environment's packages are compiled once, not by each of some twenty processes.
unset PYTHONDONTWRITEBYTECODE
export PYTHONPATH="$PWD" TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# Environments on one disk share their files with uv's cache.
export UV_CACHE_DIR="${UV_CACHE_DIR:-$folder/cache}"
for python in "${PYENV_ROOT:-$HOME/.pyenv}"/versions/*/bin; do PATH="$PATH:$python"; done

make_environment() { # ROW
    local python packages
    case "$1" in
        oldest) python=3.12 packages=("torch==2.11.*" "transformers==5.16.*" "accelerate==1.13.*") ;;
        python310) python=3.10 packages=("torch==2.11.*" transformers accelerate) ;;
        middle) python=3.11 packages=("torch==2.13.*" transformers accelerate) ;;
        crossed) python=3.13 packages=("torch>=2.14.1" "transformers==5.16.*" "accelerate==1.13.*") ;;
        newest) python=3.13 packages=("torch>=2.14.1" transformers accelerate) ;;
        *)
            echo "unknown row '$1'; there are oldest, python310, middle, crossed, newest, and NAME=ENVIRONMENT" >&2
            exit 2
            ;;
    esac
    [[ -x "$folder/tools/bin/uv" ]] || { python3 -m venv "$folder/tools" && "$folder/tools/bin/pip" install -q uv; }
    "$folder/tools/bin/uv" venv -q --clear --python "$python" "$folder/$1"
    "$folder/tools/bin/uv" pip install -q --python "$folder/$1/bin/python" -e . "${packages[@]}" trl peft sentence-transformers
    touch "$folder/$1/.made"
}

status=0
for row in "${asked[@]}"; do
    environment="${row#*=}"
    if [[ "$row" != *=* ]]; then
        environment="$folder/$row"
        # Without the mark, a former installation did not come to its end.
        [[ -e "$environment/.made" ]] || make_environment "$row"
    fi
    echo "== ${row%%=*}"
    PATH="$environment/bin:$PATH" "$environment/bin/python" scripts/bench/matrix.py "${row%%=*}" --json "$results/matrix.json" || status=1
done
if [[ "$results" == scripts/bench/results ]]; then
    PATH="$environment/bin:$PATH" "$environment/bin/python" scripts/bench/tables.py --docs >/dev/null
fi
exit $status
