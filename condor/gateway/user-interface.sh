#!/bin/sh
# A gateway's user interface: here people log in, submit jobs, which go to the computing element by Condor-C, and
# access the storage element.
#
# shellcheck source-path=SCRIPTDIR
# shellcheck disable=SC2317,SC2329 # functions that common.sh calls
# shellcheck source=common.sh
. ./common.sh
# shellcheck source=condor.sh
. ./condor.sh

login_keys=/etc/ssh/people

prepare() {
    add_people
    prepare_condor
    people=''
    while read -r person _; do
        people="$people $person"
        give "$person" .xrd/sss.keytab <"$here/storage/$person"
        give "$person" example.sub <"$here/example.sub"
    done <"$here/people"
    rm -rf "$here/storage"
    give_tokens
    start_logins
}

# give PERSON PATH: install a file, read from standard input, in a person's home, by that person's rights: links in the
# home lead to nothing else. If it fails, others can still work.
give() {
    # shellcheck disable=SC2016 # for the other shell
    setpriv --reuid="$1" --regid="$1" --clear-groups sh -c '
        umask 077
        cd "$1" || exit
        case $2 in */*) mkdir -p "${2%/*}" || exit ;; esac
        cat >"$2.new" && mv -f "$2.new" "$2"' \
        sh "$data/people/$1" "$2" || echo "cannot write $2 of $1"
}

# give_tokens: one to each person.
give_tokens() {
    while read -r person token; do
        [ -z "$token" ] || echo "$token" | give "$person" .condor/tokens.d/gateway
    done <"$here/token"
    rm -f "$here/token"
}

renew() { fetch_token && give_tokens; }

# start_logins: an SSH server for the declared people and their keys. Its own key stays, so that clients know it.
start_logins() {
    rm -rf "$login_keys"
    if ! mkdir -p "$login_keys" "$data/ssh" /run/sshd || ! cp "$here"/keys/* "$login_keys"; then
        give_up 'cannot install the login keys'
    fi
    [ -f "$data/ssh/key" ] || ssh-keygen -q -t ed25519 -N '' -C '' -f "$data/ssh/key" || give_up 'cannot make an SSH key'
    cat >/etc/ssh/people.conf <<END
HostKey $data/ssh/key
AllowUsers$people
AuthorizedKeysFile $login_keys/%u
AuthenticationMethods publickey
PubkeyAuthentication yes
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin no
UsePAM no
X11Forwarding no
PrintMotd no
LogLevel ERROR
PidFile none
Subsystem sftp internal-sftp
END
    setsid sh -c 'while :; do /usr/sbin/sshd -D -e -f /etc/ssh/people.conf; sleep 5; done' &
}

service() { become condor_master -f; }

check() {
    answers 'the schedd' condor_q -totals && answers 'the SSH server' bash -c 'exec 3<>/dev/tcp/127.0.0.1/22'
}

run_role "$@"
