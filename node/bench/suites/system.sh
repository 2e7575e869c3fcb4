# shellcheck shell=sh disable=SC2154
cd "$TMPDIR"
for part in get:call null:null switch:switch pipe:pipe fault:fault fork:fork exec:exec; do
    rm -f found
    $as stress-ng --"${part%:*}" 1 --timeout "$BENCH_SECONDS" --metrics --yaml found >&2
    figure "${part#*:}" "$(awk '/bogo-ops-per-second-real-time/ { print $2; exit }' found)"
done
