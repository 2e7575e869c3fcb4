#!/bin/bash
# The door: root's way in, with no port open anywhere. Started by run.sh, in a session of its own.
#
# A connection to the host stays there and waits; whoever logs in comes through it. It begins with the
# endpoint's token, which no other account in this machine can read, so that none can pose as this one.
# The host answers with the key that may come in, and an SSH server begins on the same connection.
#
# Of the usual shells only bash can connect.
# shellcheck disable=SC2154 # variables of job.env
set -u
umask 077

place=/run/vmjobs-door
address=10.0.2.100
port=22
sshd=/usr/sbin/sshd
longest_pause=15

# prepare: the server's key, new in every machine, and its settings. Without a server the host is told so.
prepare() {
    mkdir -p "$place" && cd "$place" || exit 1
    host_key=-
    [ -x $sshd ] && [ -x /usr/bin/ssh-keygen ] || return
    (umask 022 && mkdir -p /run/sshd) # where the server confines itself
    [ -f key ] || ssh-keygen -q -t ed25519 -N '' -C '' -f key || return
    cat >config <<END
HostKey $place/key
AllowUsers root
PermitRootLogin prohibit-password
PubkeyAuthentication yes
AuthenticationMethods publickey
PasswordAuthentication no
KbdInteractiveAuthentication no
HostbasedAuthentication no
UsePAM no
PermitUserEnvironment no
X11Forwarding no
PrintMotd no
LogLevel ERROR
PidFile none
Subsystem sftp internal-sftp
END
    read -r kind key _ <key.pub
    host_key="$kind $key"
}

# serve KEY: the SSH server on connection 3, for who holds the private half of KEY.
serve() {
    number=$((number + 1))
    keys=$place/keys.$number
    printf '%s\n' "$1" >"$keys" || return
    (
        umask 022
        $sshd -i -e -f "$place/config" -o "AuthorizedKeysFile=$keys" <&3 >&3
        rm -f "$keys"
    ) &
}

# wait_for_one: connects, says who this is, and waits. 0: somebody came.
wait_for_one() {
    { exec 3<>"/dev/tcp/$address/$port"; } 2>/dev/null || return
    printf 'vmjobs-door 1 %s %s\n' "$VMJOBS_TOKEN" "$host_key" >&3
    read -r verb key <&3 && [ "$verb" = session ] && serve "$key"
}

trap '' PIPE # a host that went away is seen by reading
# shellcheck source=/dev/null
. /run/vmjobs/job/job.env
prepare
number=0 pause=1
while :; do
    began=$SECONDS
    if wait_for_one; then
        exec 3>&-
        pause=1
        continue
    fi
    exec 3>&-
    [ $((SECONDS - began)) -le $longest_pause ] || pause=1 # it was there, and has gone a moment ago
    sleep $pause
    pause=$((pause * 2 < longest_pause ? pause * 2 : longest_pause))
done
