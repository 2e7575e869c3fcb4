#!/bin/sh
# Prepares the job's directory for its transfer to the node, where HTCondor follows links. Links to files of
# the guest outside the directory are replaced by those files; links inside stay; other entries that are
# neither files nor directories are removed. Runs in that directory:
#
# links.sh copy NAME...      replaces links that lead out, to files that the job may read
# links.sh settle NAME...    then handles what is neither a file nor a directory; records removed entries
#
# shellcheck disable=SC2154 # variables of unchanged.sh
pass=$1 top=$(pwd -P)
shift

# lead: sets $real to a link's final target. (A name may end with a newline.)
lead() {
    real=$(readlink -f "$name" && echo x) || real=/
    real=${real%?x}
}

leads_out() {
    case $real in
        "$top" | "$top"/*) return 1 ;;
    esac
}

# copy: reads as the job's user, who cannot read every file of the guest.
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
        drop 'a link whose target is neither a file nor a directory'
    elif lead && leads_out; then
        drop "a link out of the job's directory whose target the job cannot read"
    else
        stay
    fi
}

# drop WHY
drop() {
    rm -f "$name"
    printf '%s\0%s\0' "${name#./}" "$1" >>"$here/rejected"
}

# stay: rewrites a link relative, along a path without other links or `..` after its start. A link to a name
# in the same directory already is.
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
