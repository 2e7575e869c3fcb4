#!/bin/sh
# A worker of a gateway: HTCondor's startd, in the pool of the computing element.
#
# shellcheck source-path=SCRIPTDIR
# shellcheck disable=SC2317,SC2329 # functions that common.sh calls
# shellcheck source=common.sh
. ./common.sh
# shellcheck source=condor.sh
. ./condor.sh

port=9614 # fixed, so that a successor at the same address can reject a claim that it does not have

prepare() {
    number=64100
    while read -r account; do
        number=$((number + 1))
        add_account "$account" "$number" /nonexistent /usr/sbin/nologin
    done <"$here/accounts"
    prepare_condor
    put_secret token "$tokens/gateway" root:root
}

renew() { renew_token "$tokens/gateway" root:root; }

service() { become condor_startd -f -p "$port"; }

check() {
    read -r host <"$here/host"
    [ -n "$(timeout "$check_seconds" condor_status -constraint "Machine == \"$host\"" -autoformat Name 2>/dev/null)" ] &&
        return
    echo 'it is not in the pool of the computing element'
    return 1
}

run_role "$@"
