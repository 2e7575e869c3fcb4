#!/bin/sh
# Interactive sessions in a guest while its job runs, without an open port: the guest keeps a waiting connection
# to the host's SSH relay. A session is a shell as the job's user, in the job's directory and environment.
#
# ssh_session.sh keep          connects repeatedly; started by unchanged.sh, whose variables it has
# ssh_session.sh answer        on such a connection: waits for a session, and serves it
# ssh_session.sh inside        on the session's terminal
#
# shellcheck disable=SC2154 # variables of unchanged.sh

keep() {
    # shellcheck disable=SC2086 # three words
    set -- $relay
    token=$3 pause=1 netcat=
    export token
    [ ! -x "$busybox" ] || ! "$busybox" nc -h 2>&1 | grep -q -e '-e PROG' || netcat="$busybox nc"
    while [ ! -e "$here/over" ]; do
        begun=$(date +%s)
        if connect "$1" "$2"; then
            pause=1
            continue
        fi
        # The relay answered until a moment ago.
        [ $(($(date +%s) - begun)) -le 15 ] || pause=1
        sleep $pause
        pause=$((pause * 2 < 15 ? pause * 2 : 15))
    done
}

# connect ADDRESS PORT: false if there was no session.
connect() {
    if [ -n "$netcat" ]; then
        $netcat "$1" "$2" -e /bin/sh "$here/ssh_session.sh" answer 2>/dev/null
    else
        # shellcheck disable=SC2016 # another shell's variables
        bash -c 'exec 0<>"/dev/tcp/$1/$2" >&0 && exec /bin/sh "$here/ssh_session.sh" answer' bash "$1" "$2" 2>/dev/null
    fi
}

# answer: the connection is input and output.
answer() {
    printf 'vmjobs-door 1 %s shell\n' "$token"
    read -r verb mark term rows columns command && [ "$verb" = shell ] || exit 1
    export term rows columns command
    exec 3<&0 4>&1
    # Without redirection a shell's background command reads from /dev/null.
    serve <&3 >&4 2>&1 3>&- 4>&- &
}

serve() {
    cd "$directory" || exit
    if [ "$command" != - ] && [ "$term" = - ]; then
        inside
    elif command -v script >/dev/null; then
        script -q -e -c "exec /bin/sh '$here/ssh_session.sh' inside" /dev/null
    else
        echo 'the image has no script(1) of bsdutils or util-linux, which interactive sessions need'
        false
    fi
    printf '\036vmjobs %s %s\n' "$mark" $?
}

# inside: runs the session's command or a shell.
inside() {
    [ ! -e "$here/over" ] || exit
    if [ "$term" != - ]; then
        stty rows "$rows" columns "$columns"
        set -- env "TERM=$term"
    else
        set --
    fi
    if [ "$command" != - ]; then
        set -- "$@" /bin/sh -c "$(printf '%s' "$command" | base64 -d)"
    elif command -v bash >/dev/null; then
        set -- "$@" bash
    else
        set -- "$@" /bin/sh
    fi
    # shellcheck source=/dev/null
    (. "$here/start")
}

"$1"
