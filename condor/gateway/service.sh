#!/bin/sh
# A service of the operator's own, in any image that has this product's guest program. Its data is on /job.
#
# shellcheck source-path=SCRIPTDIR
# shellcheck disable=SC2317,SC2329 # functions that common.sh calls
# shellcheck source=common.sh
. ./common.sh

prepare() { :; }

service() {
    cd "$data" && become sh "$here/run"
}

check() { [ ! -e "$here/check" ] || answers 'the service' sh "$here/check"; }

# The command may be a shell that waits for the service.
stop_service() { kill -s TERM -- "-$service"; }

run_role "$@"
