#!/bin/sh
# The way into a machine while its job runs, with no port open anywhere: a connection to the host's door that
# waits there. Whoever comes in gets a shell as the job's user, in the job's directory and environment.
#
# visit.sh keep          connects, again and again; started by unchanged.sh, whose variables it has
# visit.sh answer        on such a connection: waits for somebody, and serves them
# visit.sh inside        on their terminal
#
# shellcheck disable=SC2154 # variables of unchanged.sh

keep() {
    # shellcheck disable=SC2086 # three words
    set -- $door
    token=$3 pause=1 netcat=
    export token
    sleep 1 # a job that is over by then needs none of this
    [ ! -x "$busybox" ] || ! "$busybox" nc -h 2>&1 | grep -q -e '-e PROG' || netcat="$busybox nc"
    while [ ! -e "$here/over" ]; do
        begun=$(date +%s)
        if connect "$1" "$2"; then
            pause=1
            continue
        fi
        # It was there, and has gone a moment ago.
        [ $(($(date +%s) - begun)) -le 15 ] || pause=1
        sleep $pause
        pause=$((pause * 2 < 15 ? pause * 2 : 15))
    done
}

# connect ADDRESS PORT: false if nobody came.
connect() {
    if [ -n "$netcat" ]; then
        $netcat "$1" "$2" -e /bin/sh "$here/visit.sh" answer 2>/dev/null
    else
        # shellcheck disable=SC2016 # another shell's variables
        bash -c 'exec 0<>"/dev/tcp/$1/$2" >&0 && exec /bin/sh "$here/visit.sh" answer' bash "$1" "$2" 2>/dev/null
    fi
}

# answer: the connection is input and output.
answer() {
    printf 'vmjobs-door 1 %s shell\n' "$token"
    read -r verb mark term rows columns command && [ "$verb" = shell ] || exit 1
    export term rows columns command
    exec 3<&0 4>&1
    # A background command of a shell reads nothing, unless it is told to.
    serve <&3 >&4 2>&1 3>&- 4>&- &
}

serve() {
    cd "$directory" || exit
    if [ "$command" != - ] && [ "$term" = - ]; then
        inside
    elif command -v script >/dev/null; then
        script -q -e -c "exec /bin/sh '$here/visit.sh' inside" /dev/null
    else
        echo 'the image has no script(1), of bsdutils or util-linux, which makes a terminal'
        false
    fi
    printf '\036vmjobs %s %s\n' "$mark" $?
}

# inside: becomes what is to run.
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
