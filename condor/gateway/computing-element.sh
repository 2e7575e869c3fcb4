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

renew() { renew_token "$tokens/gateway" root:root; }

service() { become condor_master -f; }

check() {
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
