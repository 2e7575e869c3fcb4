#!/bin/sh
# A gateway's computing element: the pool's collector and negotiator, and the schedd that accepts jobs
# by Condor-C. Only this VM has the key that signs the pool's tokens.
#
# shellcheck source-path=SCRIPTDIR
# shellcheck disable=SC2317,SC2329 # functions that common.sh calls
# shellcheck source=common.sh
. ./common.sh
# shellcheck source=condor.sh
. ./condor.sh

prepare() {
    add_people
    prepare_condor
    put_secret pool-key /etc/condor/passwords.d/gateway root:root
    put_secret token "$tokens/gateway" root:root
}

# has_published_address: take the address of the gateway's host. HTCondor's daemons here tell each other that address, but
# no interface of this VM reaches it.
has_published_address() {
    published=$(condor_config_val TCP_FORWARDING_HOST 2>/dev/null) || return 0
    ! busybox ip address show dev lo | grep -q 'scope global' || return 0
    address=$(getent ahostsv4 "$published" | sed -n '1s/ .*//p')
    [ -n "$address" ] && busybox ip address add "$address/32" dev lo >/dev/null 2>&1 && return
    echo "cannot find or take the address of the host, $published"
    return 1
}

renew() { renew_token "$tokens/gateway" root:root; }

service() { become condor_master -f; }

check() {
    has_published_address &&
        answers 'the schedd' condor_q -totals &&
        answers 'the collector' condor_status -schedd &&
        negotiates
}

negotiates() {
    [ -n "$(timeout "$check_seconds" condor_status -negotiator -autoformat Name 2>/dev/null)" ] && return
    echo 'there is no negotiator'
    return 1
}

run_role "$@"
