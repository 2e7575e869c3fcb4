#!/bin/sh
# demo.sh [JOBS]: the main job, LHC minimum-bias events from an array of VMs; an operating system made
# with Debian's own tools, which runs as a job; a virtual cluster in which HTCondor's own jobs run.
set -eu
cd "$(dirname "$0")/.."
# shellcheck source=/dev/null
. build/grid/env
jobs=${1:-6}
out=build/demo
rm -rf "$out"
mkdir -p "$out"

# of EXPRESSION: prints the value of a Python expression; d is the JSON from standard input.
of() { .venv/bin/python -c "import json, sys; d = json.load(sys.stdin); print($1)"; }

echo "Submitting $jobs jobs to $VMJOBS_API_URL: each generates 300 events in its own VM"
submitted=$(vmjobs job submit --json --name minbias --image hep --array "$jobs" \
    --input card.cmnd=examples/minbias.cmnd --output 'hist-*.csv' examples/minbias.sh)
array=$(printf %s "$submitted" | of 'd["array"]')
first=$(printf %s "$submitted" | of 'd["jobs"][0]["id"]')

echo "Pushing and submitting an image with GRUB, kernel, program and data, made without vmjobs"
qemu-img convert -f raw -O qcow2 "$(tests/foreign/build.sh bios)" "$out/muons.qcow2"
vmjobs image push --format qcow2 "$out/muons.qcow2" muons
muons=$(vmjobs job submit --json --name muons --image muons --exit poweroff --network none --disk 64 \
    --output '*.csv' | of 'd["jobs"][0]["id"]')
rm "$out/muons.qcow2"

echo "Creating a virtual cluster: two VMs that join the site's pool"
operator() { VMJOBS_TOKEN_FILE=build/grid/admin-token vmjobs cluster "$@"; }
operator apply examples/worker-cluster.yaml

echo
vmjobs job wait "$array" "$muons" | tee "$out/table.txt"
echo
echo "Output of the first VM:"
vmjobs job out "$first"
echo
vmjobs job outputs "$array" --fetch "$out/parts" >/dev/null
.venv/bin/python examples/merge.py "$out/minbias" "$out"/parts/*/hist-*.csv
echo
echo "Console and output files of the pushed image:"
vmjobs job console "$muons" | sed -n 's/\r//; /^muon/p'
vmjobs job outputs "$muons" --fetch "$out/muons" >/dev/null
find "$out/muons" -name '*.csv' | sort

echo
echo "The virtual cluster, and the output of HTCondor's own jobs that Condor-C sent there:"
operator apply --wait --timeout 300 examples/worker-cluster.yaml >/dev/null
submit=$(docker ps -q --filter "label=com.docker.compose.project=$VMJOBS_GRID" \
    --filter label=com.docker.compose.service=submit)
# at_submit COMMAND: runs it as physicist at the submit host, in a directory of this run.
folder=/home/physicist/demo-$$
at_submit() { docker exec -i -u physicist "$submit" sh -euc "mkdir -p $folder && cd $folder && $1"; }
at_submit 'condor_submit -terse -' <examples/virtual-cluster.sub >/dev/null
at_submit 'condor_wait -wait 300 virtual-cluster.log' >/dev/null
operator show workers | tee "$out/cluster.txt"
at_submit 'cat virtual-cluster.*.out' | sort | uniq -c | tee "$out/systems.txt"
