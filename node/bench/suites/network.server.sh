# shellcheck shell=sh disable=SC2086,SC2154
set -- $BENCH_PORTS
qperf -lp "$2" >&2 &
exec iperf3 -s --forceflush -B "$BENCH_ADDRESS" -p "$1"
