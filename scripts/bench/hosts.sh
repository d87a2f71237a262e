#!/usr/bin/env bash
# Compares engines between two "hosts": network namespaces joined by a link of a given rate, one rank and one core each.
#
#     scripts/bench/hosts.sh                            # every engine at 1gbit
#     scripts/bench/hosts.sh 200mbit fsdp2 hf_zero2     # these and DDP, at 200 Mbit/s
#
# MODEL, ROUNDS, STEPS, TIME_LIMIT_S, DELAY (one way, such as 5ms) and JSON (a file for the figures) are read from the environment. Needs
# root, `ip` and `tc`, and /dev/net/tun for a delay; without them it says so and exits with status 0.
set -euo pipefail

rate="${1:-1gbit}"
delay="${DELAY:-0ms}"
shift || true
engines=("$@")
bench_folder="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

skip() {
    echo "skipped: $1"
    exit 0
}

[[ "$(id -u)" == 0 ]] || skip "network namespaces need root"
for tool in ip tc; do
    command -v "$tool" >/dev/null || skip "no '$tool' here (Debian package iproute2)"
done
command -v taskset >/dev/null || skip "no 'taskset' here (Debian package util-linux)"

# The process id keeps two runs on one machine apart; interface names may have 15 characters.
namespaces=("bench-$$-0" "bench-$$-1")
interfaces=("bench$$-0" "bench$$-1")
addresses=(10.99.0.1/24 10.99.0.2/24)
work_folder="$(mktemp -d)"
background=()
rank_processes=()

clean_up() {
    # A process that has ended, or a namespace that was never made, is nothing to complain about here.
    for process in "${background[@]}" "${rank_processes[@]}"; do
        kill "$process" 2>/dev/null || true
    done
    for namespace in "${namespaces[@]}"; do
        ip netns delete "$namespace" 2>/dev/null || true
    done
    rm -rf "$work_folder"
}
trap clean_up EXIT

ip netns add "${namespaces[0]}" || skip "this machine does not let even root make network namespaces"
ip netns add "${namespaces[1]}"
if [[ "$delay" == 0ms ]]; then
    ip link add "${interfaces[0]}" netns "${namespaces[0]}" type veth peer name "${interfaces[1]}" netns "${namespaces[1]}"
else
    [[ -e /dev/net/tun ]] || skip "no /dev/net/tun here, which a link with a delay is made of"
    python "$bench_folder/delayed_cable.py" "${interfaces[@]}" --delay "$delay" &
    background+=($!)
    until ip link show "${interfaces[1]}" >/dev/null 2>&1; do
        kill -0 "${background[0]}" || exit 1
        sleep 0.1
    done
    for host in 0 1; do
        ip link set "${interfaces[$host]}" netns "${namespaces[$host]}"
        # As large as what a host hands to a network card to be cut up there.
        ip -n "${namespaces[$host]}" link set "${interfaces[$host]}" mtu 65535
    done
fi
for host in 0 1; do
    ip -n "${namespaces[$host]}" address add "${addresses[$host]}" dev "${interfaces[$host]}"
    ip -n "${namespaces[$host]}" link set lo up
    ip -n "${namespaces[$host]}" link set "${interfaces[$host]}" up
    # Each end limits what it sends, so both directions run at the full rate at once, as on a real cable.
    tc -n "${namespaces[$host]}" qdisc add dev "${interfaces[$host]}" root handle 1: tbf rate "$rate" burst 1mb latency 50ms
done

for host in 0 1; do
    GLOO_SOCKET_IFNAME="${interfaces[$host]}" OMP_NUM_THREADS=1 \
        ip netns exec "${namespaces[$host]}" \
        taskset --cpu-list "$host" \
        timeout "${TIME_LIMIT_S:-1800}" \
        python "$bench_folder/hosts_rank.py" \
        --rank "$host" --store-folder "$work_folder" --rate "$rate" --model "${MODEL:-30m}" \
        --rounds "${ROUNDS:-5}" --steps "${STEPS:-8}" --delay "$delay" \
        ${JSON:+--json "$JSON"} ${engines[@]+--engines "${engines[@]}"} &
    rank_processes+=($!)
done
# The first rank to end tells: after a failure (which ends this script) there is nothing left to wait for.
wait -n -p first_to_end "${rank_processes[@]}"
for process in "${rank_processes[@]}"; do
    [[ "$process" == "$first_to_end" ]] || wait "$process"
done
