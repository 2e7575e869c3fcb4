# shellcheck shell=sh
# measure NAME WAY FIELD OPTION...: runs fio.
measure() {
    name=$1 way=$2 field=$3
    shift 3
    fio --name=file --filename=file --size=256M --ioengine=psync --output-format=json --output=found "$@" >&2
    figure "$name" "$(python3 -c "import json; print(json.load(open('found'))['jobs'][0]['$way']['$field'] $divide)")"
}
divide='/ 1024'
measure write write bw --rw=write --bs=1M --end_fsync=1
measure read read bw --rw=read --bs=1M --direct=1
divide=
measure random-write write iops --rw=randwrite --bs=4k --direct=1 --runtime="$BENCH_SECONDS" --time_based
measure random-read read iops --rw=randread --bs=4k --direct=1 --runtime="$BENCH_SECONDS" --time_based
rm file
figure dbench "$(dbench -t $((BENCH_SECONDS + 3)) -c /usr/share/dbench/client.txt 1 | awk '/^Throughput/ { print $2 }')"
