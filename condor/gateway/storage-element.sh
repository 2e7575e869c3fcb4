#!/bin/sh
# A gateway's storage element: an XRootD server. Clients need one of its keys.
#
# shellcheck source-path=SCRIPTDIR
# shellcheck disable=SC2317,SC2329 # functions that common.sh calls
# shellcheck source=common.sh
. ./common.sh

check_keytab=/run/vmjobs-gateway/check.keytab

prepare() {
    mkdir -p "$data/xrootd/store" "$data/log" /run/xrootd || give_up 'cannot make the directories of XRootD'
    chown xrootd:xrootd "$data/xrootd" "$data/xrootd/store" "$data/log" /run/xrootd
    put xrootd.cfg /etc/xrootd/gateway.cfg root:root
    put authdb /etc/xrootd/gateway.authdb root:root
    put_secret storage-keytab /etc/xrootd/keys/sss.keytab xrootd:xrootd
    put_secret check-keytab "$check_keytab" root:root
}

# Logs of the last seven days are kept.
service() { become xrootd -R xrootd -k 7 -l "$data/log/xrootd.log" -c /etc/xrootd/gateway.cfg; }

check() { answers XRootD env XrdSecSSSKT="$check_keytab" xrdfs "$(hostname)" stat /store; }

stop_service() { kill -s TERM "$service"; }

run_role "$@"
