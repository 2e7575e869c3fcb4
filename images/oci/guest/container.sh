# shellcheck shell=sh
# shellcheck disable=SC2154 # variables of base.sh, of job.env and of the image's program file
# shellcheck disable=SC2034 # used by the other parts
# The guest program in a container image. All its files are in its own directory: it needs nothing from the
# image, which may lack even a shell, and it changes nothing in the image.

container=1
lib=/.vmjobs
run=/.vmjobs/run/guest
job=/.vmjobs/job
memory=tmpfs:/.vmjobs/run:mode=755 # nothing is mounted over the image's own /run and /tmp
busybox=/.vmjobs/busybox
# shellcheck disable=SC2123
PATH=/.vmjobs/none # busybox's shell has all of its tools built in

# shellcheck source=/dev/null
. "$lib/program"

# tool NAME ARGUMENT...: run a tool that busybox lacks, with the libraries it was built for.
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

# spread_scratch: mount directories of the scratch disk over the image's empty directories for temporary
# files.
spread_scratch() {
    for place in $program_temporary; do
        mkdir -m 1777 "$job/tmp$(printf '%s' "$place" | tr / -)"
        bb mount --bind "$job/tmp$(printf '%s' "$place" | tr / -)" "$place"
    done
}

# take_program: without a script, the job is the image's program. It runs in the image's working directory,
# which gets the inputs, and from which the outputs are collected.
take_program() {
    work=$program_directory
    cd "$job/work" || fail 'cannot read the inputs'
    find . -type f >"$run/inputs.list"
    while IFS= read -r path; do
        bb mkdir -p "$work/${path%/*}"
        bb cp "$path" "$work/$path" || fail "no room for the input ${path#./} in $work"
        bb chown "$program_uid:$program_gid" "$work/$path"
    done <"$run/inputs.list"
    cd / || fail 'cannot change to /'
    rm -rf "$job/work"
}

# own_job: give the script's directory to the image's user.
own_job() {
    bb chown -R "$program_uid:$program_gid" "$work" "$job/home"
}

# start_in_container: replace this process by the script or the image's program. Its output goes to files
# that its user can open again (as /dev/stdout).
start_in_container() {
    bb chown "$program_uid" "$script_out" "$script_err"
    exec setsid env -i VMJOBS_JOB_ID="$VMJOBS_JOB_ID" VMJOBS_ARRAY_INDEX="$VMJOBS_ARRAY_INDEX" \
        VMJOBS_ARRAY_COUNT="$VMJOBS_ARRAY_COUNT" VMJOBS_ARGUMENTS="${VMJOBS_ARGUMENTS:-}" \
        "$busybox" sh "$lib/enter.sh" "$what"
}
