#!/bin/sh
# A cluster VM's script: joins the pool and stays until it is drained. Root runs this in the guest; its other files
# are in its directory.
#
#   USR1  admitted: jobs may come           USR2  there is a new token
#   TERM  drain: no new job; when the last one has ended, leave the pool and end with status 0
#
# If HTCondor's startd ends by itself, this ends with its status. Signals go to the whole process group: processes
# that must not get them run in sessions of their own.
#
# shellcheck disable=SC2317 # functions that traps and with_retries call
# shellcheck disable=SC2154 # variables of the guest program
set -u

here=$PWD
run=/run/vmjobs-pool
lib=/usr/lib/vmjobs
config=/etc/condor/config.d
token=/etc/condor/tokens.d/vmjobs
log_lines_an_hour=60
umask 077

# watch_log: copy errors of the startd to the console; a limited number, because a VM may run for months.
watch_log() {
    tail -n +1 -F /job/condor/log/StartLog 2>/dev/null |
        grep --line-buffered -E 'ERROR|Error|[Ff]ailed|DENIED|FATAL|PANIC' |
        grep --line-buffered -v 'ToE tag' | # logged at the end of every job
        awk -v most="$log_lines_an_hour" '
            { hour = int(systime() / 3600) }
            hour != last { last = hour; lines = 0 }
            ++lines <= most { print "startd: " substr($0, 1, 400); fflush() }'
}

if [ "${1:-}" = watch-log ]; then
    watch_log
    exit
fi

# Signals that arrive before the startd runs are queued.
orders=
trap 'orders="$orders admit"' USR1
trap 'orders="$orders renew"' USR2
trap 'orders="$orders drain"' TERM INT

say() { printf 'vmjobs: %s\n' "$*"; }
give_up() {
    say "error: $*"
    exit 69
}

# The job's own token must not be an argument: users' jobs in this VM could read it. So this does not use wget, but
# the guest program's HTTP, with separate pipes.
mkdir -p "$run" || give_up "cannot make $run"
# shellcheck source=/dev/null
. /run/vmjobs/job/job.env
# shellcheck source=/dev/null
. "$lib/base.sh"
# shellcheck source=/dev/null
. "$lib/http.sh"
say() { printf 'vmjobs: %s\n' "$*"; }

# fetch_token: install the VM's IDTOKEN, atomically.
fetch_token() {
    get_token || return
    chmod 0600 "$token.new" && mv "$token.new" "$token"
}

get_token() {
    http main GET /v1/token >"$token.new" && [ -s "$token.new" ]
}

set_host_name() {
    read -r host <"$here/host"
    echo "$host" >/proc/sys/kernel/hostname
    echo "$host" >/etc/hostname
    printf '127.0.0.1 localhost\n10.0.2.15 %s %s\n' "$host" "${host%%.*}" >/etc/hosts
}

# add_accounts: one for each possible dynamic slot, without privileges.
add_accounts() {
    number=0
    while read -r account; do
        number=$((number + 1))
        grep -q "^$account:" /etc/passwd && continue
        echo "$account:x:$((64100 + number)):$((64100 + number))::/nonexistent:/usr/sbin/nologin" >>/etc/passwd
        echo "$account:x:$((64100 + number)):" >>/etc/group
    done <"$here/accounts"
}

# configure NAME...: install configuration that is read after the image's own.
configure() {
    [ -d "$config" ] || (umask 022 && mkdir -p "$config") || return
    for name in "$@"; do
        cp "$here/$name" "$config/$name.new" && chmod 0644 "$config/$name.new" &&
            mv "$config/$name.new" "$config/$name" || return
    done
}

make_places() {
    (
        umask 022
        mkdir -p /job/condor /job/condor/execute /job/condor/log /job/condor/spool /job/condor/lock \
            /run/condor /usr/local/libexec &&
            chown condor:condor /job/condor/* /run/condor &&
            cp "$here/probe" /usr/local/libexec/vmjobs-probe && chmod 0755 /usr/local/libexec/vmjobs-probe
    ) && mkdir -p "${token%/*}" && chmod 0700 "${token%/*}"
}

# switch SETTING VALUE: reconfigure the running startd.
switch() {
    echo "$1 = $2" >>"$config/99-vmjobs-state.conf"
    kill -HUP "$startd" 2>/dev/null
}

admit() {
    say 'admitted: jobs may come'
    switch VMJOBS_ADMITTED True
}

renew() {
    if with_retries fetch_token; then say 'has a new token'; else say "error: no new token (status $http_status)"; fi
}

# The startd accepts no new job. When the last one has ended, it invalidates its ad in the collector, and ends.
drain() {
    say 'drains: no new job'
    draining=1
    switch VMJOBS_DRAINING True
}

# Images of an earlier release make their requests through pipes.
[ -x "$lib/talk" ] || make_fifos || give_up "cannot make pipes in $run"
set_host_name
add_accounts
make_places || give_up 'cannot make the directories of HTCondor'
configure 97-vmjobs-startd.conf 98-vmjobs-member.conf || give_up "cannot write to $config"
(umask 022 && : >"$config/99-vmjobs-state.conf")
with_retries fetch_token || give_up "cannot fetch a token from $VMJOBS_ENDPOINT (status $http_status)"

case $orders in
*drain*)
    say 'drained'
    exit 0
    ;;
esac

draining=''
setsid condor_startd -f &
startd=$!
trap admit USR1
trap renew USR2
trap drain TERM INT
for order in $orders; do $order; done
say "$host: startd started"
setsid sh "$0" watch-log &
watcher=$!
ssh_relay=
if command -v bash >/dev/null; then
    setsid bash "$here/ssh_relay" &
    ssh_relay=-$!
else
    say 'log-in is not possible: bash is missing'
fi

# `wait` returns after each signal that was handled.
status=0
while kill -0 "$startd" 2>/dev/null; do
    wait "$startd"
    status=$?
done
trap '' TERM INT USR1 USR2
# shellcheck disable=SC2086 # $ssh_relay may be empty
kill -s TERM -- "-$watcher" $ssh_relay 2>/dev/null
rm -f "$token"
# 99: it has shut itself down, as DAEMON_SHUTDOWN requires.
if [ -n "$draining" ] && { [ "$status" = 0 ] || [ "$status" = 99 ]; }; then
    say 'drained'
    exit 0
fi
say "error: startd ended with status $status"
tail -n 20 /job/condor/log/StartLog 2>/dev/null
[ "$status" != 0 ] || status=70
exit "$status"
