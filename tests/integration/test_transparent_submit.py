"""Further submit file commands: jobs of the site's own schedd, submitted together.

Each test checks one of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.kit.grid import Grid, wait_for
from tests.kit.submit_host import (
    PATIENT,
    RUNNING,
    Desk,
    Kind,
    Submitted,
    rescue_dag,
    site,
    submitted,
)

__all__ = ["site"]

FILES = """
    cat flat deep/one sub/two debian_version; ls -d deep/sub 2>/dev/null
    echo made >made; mkdir -p left/within; echo left >left/within/file
"""


def folders(desk: Desk) -> None:
    """Create input directories: one to send whole, one to send by its contents."""
    desk("mkdir", "-p", f"{desk.folder}/deep", f"{desk.folder}/all/sub")
    desk.write("deep/one", "one\n")
    desk.write("all/flat", "flat\n")
    desk.write("all/sub/two", "two\n")


KINDS = {
    "old syntax": Kind(
        'printf \'<%s>\' "$@"; echo; echo "$A,$B"',
        arguments='one two\\"three four',
        lines={"environment": "A=1;B=two words"},
    ),
    "directories": Kind(
        FILES,
        lines={
            "transfer_input_files": "deep,all/,file:///etc/debian_version",
            "transfer_output_files": "made,left",
            "transfer_output_remaps": '"made=renamed"',
        },
        before=folders,
    ),
    "streams": Kind(
        "echo first; echo problem >&2; sleep 40; echo last",
        lines={"stream_output": "true", "stream_error": "true"},
    ),
    "processors": Kind(
        "nproc; awk '/MemTotal/ { print int($2 / 1024) }' /proc/meminfo; "
        "condor_chirp set_job_attr_delayed ChirpTold 7",
        lines={
            "request_cpus": "2",
            "request_memory": "256",
        },
    ),
    "no network": Kind("cat data; echo ran; exit 5", lines={"__VMJobNetwork": '"none"'}),
    "outbound": Kind(
        "for at in '60 site.grid 9618' '5 api.grid 8443'; do "
        "busybox nc -w $at </dev/null >/dev/null && echo there || echo none; done",
        lines={"__VMJobNetwork": '"outbound"'},
    ),
    "periodic_release": Kind(
        '[ "$(grep -c "^NumJobStarts = [1-9]" .job.ad)" = 1 ] || sleep 1000',
        lines={
            "periodic_hold": f"{RUNNING} && NumJobStarts < 2",
            "periodic_hold_subcode": "88",
            "periodic_release": "HoldReasonSubCode == 88",
        },
    ),
    "stream_input": Kind("cat; echo end", lines={"input": "data", "stream_input": "true"}),
    "tag": Kind("echo ran", "generic:1"),
}
Jobs = Submitted[str]


@pytest.fixture(scope="module")
def jobs(grid: Grid) -> Iterator[Jobs]:
    kinds = KINDS | {"digest": Kind("echo ran", grid.api.image("generic").digest)}
    with submitted({name: (Desk(grid, "site"), job) for name, job in kinds.items()}) as made:
        yield made


# This test must come first: the job must still run when the test looks at it.
def test_what_it_streams_is_there_while_it_runs(jobs: Jobs) -> None:
    desk, cluster = jobs["streams"]
    desk.running(cluster)
    wait_for(lambda: desk.read("out") == "first\n" or None, "what it has said", PATIENT)
    wait_for(lambda: desk.read("err") == "problem\n" or None, "the other stream", PATIENT)
    assert desk.ad(cluster)["JobStatus"] == 2, "it still runs"
    assert desk.ended(cluster)["ExitCode"] == 0
    assert desk.read("out") == "first\nlast\n"


def test_arguments_and_environment_in_the_old_syntax(jobs: Jobs) -> None:
    desk, cluster = jobs["old syntax"]
    assert desk.ended(cluster)["ExitCode"] == 0
    assert desk.read("out").splitlines() == ['<one><two"three><four>', "1,two words"]


def test_directories_and_urls_go_in_and_directories_come_out(jobs: Jobs) -> None:
    desk, cluster = jobs["directories"]
    desk.succeeded(cluster)
    out = desk.read("out").splitlines()
    assert out[:3] == ["flat", "one", "two"], "a directory as it is, and what is in another one"
    assert re.fullmatch(r"1[0-9](\.[0-9]+)?|\w+/sid", out[3]), "the node's own file, by its URL"
    assert desk.read("renamed") == "made\n"
    assert desk.read("left/within/file") == "left\n"


def test_a_vm_of_qemus_has_what_was_asked_for(jobs: Jobs) -> None:
    desk, cluster = jobs["processors"]
    ad = desk.succeeded(cluster)
    processors, memory = map(int, desk.read("out").split())
    assert processors == 2
    assert 180 < memory <= 256  # MiB; the kernel reserves some
    assert ad["ChirpTold"] == 7


def test_a_vm_without_a_network_runs_jobs_too(jobs: Jobs) -> None:
    desk, cluster = jobs["no network"]
    assert desk.ended(cluster)["ExitCode"] == 5
    assert desk.read("out") == "from a file\nran\n"


def test_a_vm_with_a_network_to_the_outside(jobs: Jobs) -> None:
    """The guest reaches only that grid host (all have private addresses) that the nodes allow."""
    desk, cluster = jobs["outbound"]
    assert desk.ended(cluster)["ExitCode"] == 0
    assert desk.read("out") == "there\nnone\n"


def test_periodic_hold_and_release(jobs: Jobs) -> None:
    desk, cluster = jobs["periodic_release"]
    ad = wait_for(lambda: desk.ad(cluster, ended=True) or None, "it to end", PATIENT)
    assert (ad["JobStatus"], ad["ExitCode"], ad["NumJobStarts"]) == (4, 0, 2)
    assert ad["NumHolds"] == 1


def test_what_is_streamed_to_a_job(jobs: Jobs) -> None:
    desk, cluster = jobs["stream_input"]
    desk.succeeded(cluster)
    assert desk.read("out") == "from a file\nend\n"


@pytest.mark.parametrize("name", ["tag", "digest"])
def test_an_image_by_its_tag_and_by_its_digest(jobs: Jobs, name: str) -> None:
    desk, cluster = jobs[name]
    desk.succeeded(cluster)


@pytest.mark.soak
def test_the_rescue_of_a_dag_begins_where_it_failed(site: Desk) -> None:
    rescue_dag(site)
