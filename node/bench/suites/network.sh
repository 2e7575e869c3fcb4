# shellcheck shell=sh disable=SC2086,SC2154
set -- $BENCH_PORTS
# transfer NAME SUM OPTION...: runs iperf3. SUM: that of this side, by whose clock figures are corrected.
transfer() {
    name=$1 sum=$2
    shift 2
    iperf3 -J -c "$BENCH_ADDRESS" -p "$port" -t "$BENCH_SECONDS" "$@" >found || { cat found >&2; exit 1; }
    figure "$name" "$(python3 -c "import json; print(json.load(open('found'))['end']['$sum']['bits_per_second'] / 1e6)")"
}
port=$1
transfer up sum_sent
transfer down sum_received -R
# The latency's line is, for example: latency  =  21.4 us
figure latency "$(qperf -lp "$2" -ip "$3" -t "$BENCH_SECONDS" "$BENCH_ADDRESS" tcp_lat |
    awk '$1 == "latency" { print $3 * ($4 == "ms" ? 1000 : $4 == "us" ? 1 : 0.001) }')"
