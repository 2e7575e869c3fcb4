#!/bin/sh
# The main job, LHC minimum-bias events from an array of virtual machines; beside it an operating system
# that Debian's own tools made, which is a job by itself; and a virtual cluster that HTCondor's own jobs
# run in. demo.sh [JOBS]
set -eu
cd "$(dirname "$0")/.."
# shellcheck source=/dev/null
. build/grid/env
jobs=${1:-6}
out=build/demo
rm -rf "$out"
mkdir -p "$out"

# of EXPRESSION: what it makes of the JSON that is read, as d.
of() { .venv/bin/python -c "import json, sys; d = json.load(sys.stdin); print($1)"; }

echo "Submitting $jobs jobs to $VMJOBS_API_URL: each generates 300 events in a VM of its own"
submitted=$(vmjobs job submit --json --name minbias --image hep --array "$jobs" \
    --input card.cmnd=examples/minbias.cmnd --output 'hist-*.csv' examples/minbias.sh)
array=$(printf %s "$submitted" | of 'd["array"]')
first=$(printf %s "$submitted" | of 'd["jobs"][0]["id"]')

echo "Pushing an image with GRUB, kernel, program and data that no part of vmjobs made, and submitting it"
qemu-img convert -f raw -O qcow2 "$(tests/foreign/build.sh bios)" "$out/muons.qcow2"
vmjobs image push --format qcow2 "$out/muons.qcow2" muons
muons=$(vmjobs job submit --json --name muons --image muons --exit poweroff --network none --disk 64 \
    --output '*.csv' | of 'd["jobs"][0]["id"]')
rm "$out/muons.qcow2"

echo "Declaring a virtual cluster: two machines that join the site's pool"
operator() { VMJOBS_TOKEN_FILE=build/grid/admin-token vmjobs cluster "$@"; }
operator apply examples/worker-cluster.yaml

echo
vmjobs job wait "$array" "$muons" | tee "$out/table.txt"
echo
echo "What the first VM printed:"
vmjobs job out "$first"
echo
vmjobs job outputs "$array" --fetch "$out/parts" >/dev/null
.venv/bin/python examples/merge.py "$out/minbias" "$out"/parts/*/hist-*.csv
echo
echo "What the image's own console showed, and what it left:"
vmjobs job console "$muons" | sed -n 's/\r//; /^muon/p'
vmjobs job outputs "$muons" --fetch "$out/muons" >/dev/null
find "$out/muons" -name '*.csv' | sort

echo
echo "The virtual cluster, and what HTCondor's own jobs printed that went there by Condor-C:"
operator apply --wait --timeout 300 examples/worker-cluster.yaml >/dev/null
submit=$(docker ps -q --filter "label=com.docker.compose.project=$VMJOBS_GRID" \
    --filter label=com.docker.compose.service=submit)
# at_submit COMMAND: a physicist's shell at the submit host, in a directory of this run.
folder=/home/physicist/demo-$$
at_submit() { docker exec -i -u physicist "$submit" sh -euc "mkdir -p $folder && cd $folder && $1"; }
at_submit 'condor_submit -terse -' <examples/virtual-cluster.sub >/dev/null
at_submit 'condor_wait -wait 300 virtual-cluster.log' >/dev/null
operator show workers | tee "$out/cluster.txt"
at_submit 'cat virtual-cluster.*.out' | sort | uniq -c | tee "$out/systems.txt"
