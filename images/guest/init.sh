#!/bin/sh
# The vmjobs guest program (guest contract, version 3). It runs as process 1, or an init starts it: it
# finds its job on the job disk, runs the script, reports its exit status and powers off.
#
# POSIX shell (dash, busybox ash), busybox-level tools, and programs in C. docs/guest-contract.md has the
# contract. Errors before the script runs end in fail(), which prints them on the console.
#
# shellcheck source-path=SCRIPTDIR
PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
export PATH
umask 022

lib=/usr/lib/vmjobs
# shellcheck source=/dev/null
[ ! -r "${0%/*}/container.sh" ] || . "${0%/*}/container.sh"
# shellcheck source=base.sh
. "$lib/base.sh"
# shellcheck source=setup.sh
. "$lib/setup.sh"
# shellcheck source=http.sh
. "$lib/http.sh"
# shellcheck source=script.sh
. "$lib/script.sh"
# shellcheck source=collect.sh
. "$lib/collect.sh"

setup_mounts
exec </dev/null >/dev/console 2>&1
find_disks
read_job_disk
set_clock "${VMJOBS_EPOCH:-}" 60
start_loopback
make_scratch
make_fifos
unpack_job
[ "$VMJOBS_NETWORK" = none ] || start_network

announce_ready
run_script
announce_collecting
deliver_outputs
announce_exit
power_off
