#!/bin/sh
# A gateway's user interface: here users submit jobs, which go to the computing element by Condor-C, and access
# the storage element.
#
# shellcheck source-path=SCRIPTDIR
# shellcheck disable=SC2317,SC2329 # functions that common.sh calls
# shellcheck source=common.sh
. ./common.sh
# shellcheck source=condor.sh
. ./condor.sh

prepare() {
    add_person
    prepare_condor
    mkdir -p "$home/.condor" && chown "$person:$person" "$home/.condor"
    put_secret token "$home/.condor/tokens.d/gateway" "$person:$person"
    put_secret storage-keytab "$home/.xrd/sss.keytab" "$person:$person"
    put example.sub "$home/example.sub" "$person:$person"
}

renew() {
    read -r person <"$here/person"
    renew_token "$data/people/$person/.condor/tokens.d/gateway" "$person:$person"
}

service() { become condor_master -f; }

check() { answers 'the schedd' condor_q -totals; }

run_role "$@"
