# shellcheck shell=sh
# shellcheck disable=SC2154 # variables of base.sh, of job.env and of the image's program file
# shellcheck disable=SC2034 # used by the other parts
# The guest program in a container image. Everything it needs is in a directory of its own: nothing is
# asked of the image, which may have no shell at all, and what it has stays as it is.

container=1
lib=/.vmjobs
run=/.vmjobs/run/guest
job=/.vmjobs/job
memory=tmpfs:/.vmjobs/run:mode=755 # and nothing over the image's own /run and /tmp
busybox=/.vmjobs/busybox
# shellcheck disable=SC2123
PATH=/.vmjobs/none # busybox's shell knows all of its tools itself

# shellcheck source=/dev/null
. "$lib/program"

# tool NAME ARGUMENT...: one of those that are not busybox's, with the libraries it was built for.
tool() {
    tool_name=$1
    shift
    "$lib/lib/ld.so" --inhibit-cache --library-path "$lib/lib" "$lib/bin/$tool_name" "$@"
}

e2fsck() {
    tool e2fsck "$@"
}

mke2fs() {
    tool mke2fs "$@"
}

dd() {
    tool dd "$@"
}

# spread_scratch: directories for temporary files, which are empty in the image, have the room of the
# scratch disk.
spread_scratch() {
    for place in $program_temporary; do
        mkdir -m 1777 "$job/tmp$(printf '%s' "$place" | tr / -)"
        bb mount --bind "$job/tmp$(printf '%s' "$place" | tr / -)" "$place"
    done
}

# take_program: no script came along, so the job is what the image is for. It runs where the image says,
# finds the inputs there, and its outputs are looked for there.
take_program() {
    work=$program_directory
    if [ -d "$job/inputs" ]; then
        cd "$job/inputs" || fail 'cannot read the inputs'
        find . -type f >"$run/inputs.list"
        while IFS= read -r path; do
            bb mkdir -p "$work/${path%/*}"
            bb cp "$path" "$work/$path" || fail "no room for the input ${path#./} in $work"
            bb chown "$program_uid:$program_gid" "$work/$path"
        done <"$run/inputs.list"
        cd / || fail 'cannot go to /'
        rm -rf "$job/inputs"
    fi
}

# own_job: the script's directory belongs to the image's user.
own_job() {
    bb chown -R "$program_uid:$program_gid" "$work" "$job/home"
}

# start_in_container: the script or the image's program, in place of this process. What it prints goes to
# files that it may open again (/dev/stdout), whoever it runs as.
start_in_container() {
    bb chown "$program_uid" "$script_out" "$script_err"
    exec setsid env -i VMJOBS_JOB_ID="$VMJOBS_JOB_ID" VMJOBS_ARRAY_INDEX="$VMJOBS_ARRAY_INDEX" \
        VMJOBS_ARRAY_COUNT="$VMJOBS_ARRAY_COUNT" VMJOBS_ARGUMENTS="${VMJOBS_ARGUMENTS:-}" \
        "$busybox" sh "$lib/enter.sh" "$what"
}
