# shellcheck shell=sh
# shellcheck disable=SC2154,SC2034 # variables of common.sh, and for roles
# Functions for roles with HTCondor's daemons. Read after common.sh.

config=/etc/condor/config.d
tokens=/etc/condor/tokens.d

# prepare_condor: make HTCondor's directories, and install configuration that is read after the image's own.
prepare_condor() {
    mkdir -p "$data/condor" "$data/log" /run/condor || give_up 'cannot make the directories of HTCondor'
    for name in execute spool lock; do
        mkdir -p "$data/condor/$name" || give_up "cannot make $data/condor/$name"
        chown condor:condor "$data/condor/$name"
    done
    chown condor:condor "$data/log" /run/condor
    for path in "$here"/[0-9][0-9]-*.conf; do
        put "${path##*/}" "$config/${path##*/}" root:root
    done
}

# stop_service: stop fast. Running jobs stay with their workers until the schedd is back.
stop_service() { kill -s QUIT "$service"; }
