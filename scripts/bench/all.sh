#!/usr/bin/env bash
# Measures hf_zero beside its peers, and makes tables and pictures of the figures.
#
#     bash scripts/bench/all.sh                    # everything that fits this machine: hours on two cores
#     bash scripts/bench/all.sh --quick            # the same on small models: less than five minutes on two cores
#     bash scripts/bench/all.sh step curves        # some of the parts
#     bash scripts/bench/all.sh --keep             # into scripts/bench/results, README.md, docs/ and RESULTS.md
#
# Parts: step, curves, checkpoints, offload, host_time, first_step, axes, links (needs root, `ip`, `tc` and /dev/net/tun). The quick form of
# step has the usual engines and not every peer, that of curves one curve. Figures go to outputs/bench, or $RESULTS. Ends with
# status 1 if a part failed; the others are measured all the same. Peers that `pip install -e .[bench]` has not installed are
# named in the tables.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
# Without an environment of the user's own, the one of the other scripts.
python -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)' 2>/dev/null || source scripts/venv.sh
bench=scripts/bench
results="${RESULTS:-outputs/bench}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

quick=""
keep=""
parts=()
for argument in "$@"; do
    case "$argument" in
        --quick) quick=yes ;;
        --keep)
            keep=yes
            results=$bench/results
            ;;
        step | curves | checkpoints | offload | host_time | first_step | axes | links) parts+=("$argument") ;;
        *)
            echo "unknown part '$argument'; there are step, curves, checkpoints, offload, host_time, first_step, axes and links" >&2
            exit 2
            ;;
    esac
done
[[ ${#parts[@]} -gt 0 ]] || parts=(step curves checkpoints offload host_time first_step axes links)
mkdir -p "$results" outputs

# What a part is told in the quick form, or in the whole one.
sized() {
    if [[ -n "$quick" ]]; then echo "$1"; else echo "$2"; fi
}

step() {
    # shellcheck disable=SC2046
    python $bench/step.py $(sized "--model 4m --rounds 1 --steps 1" "--engines all --model 30m --starts 2 --rounds 3 --steps 2") --json "$results/step.json"
}

curves() {
    # shellcheck disable=SC2046
    python $bench/curves.py $(sized "bucket --quick" "") --json "$results/curves.json"
}

checkpoints() {
    # shellcheck disable=SC2046
    python $bench/checkpoints.py $(sized "--quick --stages 3" "") --json "$results/checkpoints.json"
}

offload() {
    # shellcheck disable=SC2046
    python $bench/offload.py --dtype float32 --threads 1 --nvme-path outputs \
        $(sized "--model 4m --steps 2 --rounds 1" "") --json "$results/offload.json"
}

host_time() {
    # shellcheck disable=SC2046
    python $bench/host_time.py $(sized "--quick" "--rounds 11") --json "$results/host_time.json"
}

first_step() {
    # shellcheck disable=SC2046
    python $bench/first_step.py $(sized "--quick" "") --json "$results/first_step.json"
}

axes() {
    # shellcheck disable=SC2046
    python $bench/axes.py $(sized "--quick" "") --json "$results/axes.json"
    # shellcheck disable=SC2046
    python $bench/axes.py --tp 1 --ep 2 $(sized "--quick" "") --json "$results/axes-experts.json"
}

links() {
    # shellcheck disable=SC2046,SC2086
    python $bench/shaped_links.py --links $(sized 1gbit,0ms,tiny "$LINKS") --rounds $(sized 1 2) --steps $(sized 1 2) \
        --engines $(sized "hf_zero2" "fsdp2 hf_zero1 hf_zero2 hf_zero3 hf_zero2_int8 hf_zero3_int8") --json "$results/links.json"
}
# Rate, delay one way, model.
LINKS="10gbit,0ms,30m 1gbit,0ms,30m 1gbit,5ms,30m 300mbit,0ms,30m 200mbit,0ms,30m 100mbit,0ms,30m-short 100mbit,20ms,30m-short"

failed=()
for part in "${parts[@]}"; do
    echo "== $part"
    began=$SECONDS
    "$part" || failed+=("$part")
    echo "$part took $((SECONDS - began)) s"
done

files=()
for part in "${parts[@]}"; do
    [[ ! -f "$results/$part.json" ]] || files+=("$results/$part.json")
done
if [[ -n "$keep" ]]; then
    python $bench/tables.py --docs "${files[@]}"
else
    python $bench/tables.py "${files[@]}" --out "$results" >"$results/printed.txt"
    echo "tables and pictures in $results"
fi
[[ ${#failed[@]} -eq 0 ]] || { echo "failed: ${failed[*]}" >&2; exit 1; }
