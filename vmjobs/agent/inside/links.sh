#!/bin/sh
# Has all that a job left be what can go back to its node, where HTCondor follows links: links to files of the
# guest's outside of the job's directory become those files, other links stay in it, and what is neither goes.
# Runs in that directory:
#
# links.sh copy NAME...      links that lead out, to files that the job may read
# links.sh settle NAME...    whatever is no file and no directory, after that; notes what it removes
#
# shellcheck disable=SC2154 # variables of unchanged.sh
pass=$1 top=$(pwd -P)
shift

# lead: in $real, where a link leads in the end. (A name may end with a newline.)
lead() {
    real=$(readlink -f "$name" && echo x) || real=/
    real=${real%?x}
}

leads_out() {
    case $real in
        "$top" | "$top"/*) return 1 ;;
    esac
}

# copy: as the job's user, who cannot read all that there is.
copy() {
    if [ ! -f "$name" ] || ! lead || ! leads_out; then
        return
    fi
    if "$setpriv" --reuid "$uid" --regid "$gid" --clear-groups cat "$name" >"$here/copy" 2>/dev/null; then
        chmod --reference="$real" "$here/copy"
        touch -r "$real" "$here/copy"
        mv -fT "$here/copy" "$name"
    fi
    rm -f "$here/copy"
}

settle() {
    if [ ! -L "$name" ]; then
        drop 'neither a file nor a directory'
    elif [ ! -f "$name" ] && [ ! -d "$name" ]; then
        drop 'a link to nothing that is a file or a directory'
    elif lead && leads_out; then
        drop "a link out of the job's directory to no file that the job can read"
    else
        stay
    fi
}

# drop WHY
drop() {
    rm -f "$name"
    printf '%s\0%s\0' "${name#./}" "$1" >>"$here/rejected"
}

# stay: by a way that goes through no other link, and never up again: one beside it has no other.
stay() {
    text=$(readlink "$name" && echo x)
    text=${text%?x}
    case $text in
        */* | ..) ;;
        *) return ;;
    esac
    rest=${name#./} way=${real#"$top"} up=
    while [ "$rest" != "${rest#*/}" ]; do
        rest=${rest#*/} up=../$up
    done
    way=$up${way#/}
    [ "$text" = "${way:=.}" ] || ln -sfT "$way" "$name"
}

for name; do
    $pass
done
