# shellcheck shell=sh
for way in write read; do
    figure $way "$(sysbench memory --memory-block-size=1M --memory-total-size=1000T --memory-oper=$way \
        --time="$BENCH_SECONDS" run | sed -n 's/.*(\([0-9.]*\) MiB\/sec).*/\1/p')"
done
