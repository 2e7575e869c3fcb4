#!/bin/bash
# The guest's end of the SSH relay: log-ins of root, without an open port. run.sh starts this in a session of its
# own.
#
# This script keeps a connection to the host open, which waits for a log-in. The first message contains the
# endpoint's token, which no other account in this VM can read, so that none can imitate this script. The host
# answers with the key of the user who logs in, and an SSH server starts on the same connection.
#
# Of the usual shells only bash can connect.
# shellcheck disable=SC2154 # variables of job.env
set -u
umask 077

place=/run/vmjobs-ssh
address=10.0.2.100
port=22
sshd=/usr/sbin/sshd
longest_pause=15

# prepare: make the server's key, new in every VM, and its settings. Without a server, host_key is `-`.
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

# serve KEY: run the SSH server on file descriptor 3, for the owner of KEY's private half.
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

# wait_for_one: connect, authenticate, and wait for one log-in; succeed if there was one.
wait_for_one() {
    { exec 3<>"/dev/tcp/$address/$port"; } 2>/dev/null || return
    printf 'vmjobs-door 1 %s %s\n' "$VMJOBS_TOKEN" "$host_key" >&3
    read -r verb key <&3 && [ "$verb" = session ] && serve "$key"
}

trap '' PIPE # reading shows whether the host closed the connection
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
    [ $((SECONDS - began)) -le $longest_pause ] || pause=1 # the connection worked until a moment ago
    sleep $pause
    pause=$((pause * 2 < longest_pause ? pause * 2 : longest_pause))
done
