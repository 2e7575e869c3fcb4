# shellcheck shell=sh disable=SC2154
PATH=/usr/lib/postgresql/15/bin:$PATH
{
    $as initdb -D "$PWD/data" -U bench -A trust -N
    $as pg_ctl -D "$PWD/data" -w -t 300 -l /dev/null -o "-k $PWD -h ''" start
    $as createdb -h "$PWD" -U bench bench
    $as pgbench -h "$PWD" -U bench -i -s "$BENCH_SCALE" bench
} >&2
# speed OPTION...: prints transactions a second.
speed() {
    $as pgbench -h "$PWD" -U bench -c 4 -T "$BENCH_SECONDS" "$@" bench | awk '/^tps/ { print $3 }'
}
figure read "$(speed -S)"
figure write "$(speed)"
$as pg_ctl -D "$PWD/data" -m fast stop >&2
