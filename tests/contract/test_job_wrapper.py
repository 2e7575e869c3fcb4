"""The wrapper that HTCondor starts every job of a node by, and what it becomes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

WRAPPER = Path(__file__).parents[2] / "deploy/libexec/job-wrapper"
#: Nothing that a shell, or Python itself, would leave as it is.
ODD = {"odd.name": "1", "BASH_FUNC_x%%": "() { :; }", "EMPTY": "", "LINES": "a\nb", "PYTHONHOME": "/x"}


def start(
    *command: str, wrapper: Path = WRAPPER, **variables: str
) -> subprocess.CompletedProcess[bytes]:
    """Run the wrapper as the starter does."""
    return subprocess.run(
        [str(wrapper), *command], env={**ODD, **variables}, capture_output=True, check=False, timeout=30
    )


@pytest.mark.parametrize("ad", ["", "Cmd = 1\nVMJobImage = undefined\n", "VMJobImages = 1\n"])
def test_a_job_that_asks_for_no_machine_starts_as_it_is(tmp_path: Path, ad: str) -> None:
    (tmp_path / "ad").write_text(ad)
    path = str(tmp_path / "ad")
    done = start("/bin/cat", "/proc/self/environ", _CONDOR_JOB_AD=path)
    assert done.returncode == 0
    found = dict(word.split("=", 1) for word in done.stdout.decode().split("\0")[:-1])
    assert found == {**ODD, "_CONDOR_JOB_AD": path}


def test_exit_status_and_arguments_pass(tmp_path: Path) -> None:
    done = start("/bin/sh", "-c", 'printf "<%s>" "$@"; exit 7', "sh", "", "a b", "*")
    assert (done.returncode, done.stdout) == (7, b"<><a b><*>")


def test_a_program_that_is_not_there_is_told_to_the_starter(tmp_path: Path) -> None:
    told = tmp_path / "error"
    done = start("/none/such", _CONDOR_WRAPPER_ERROR_FILE=str(told))
    assert done.returncode == 1
    assert "/none/such" in told.read_text()


def test_an_ad_that_cannot_be_read_is_no_reason_to_run_bare(tmp_path: Path) -> None:
    told = tmp_path / "error"
    done = start("/bin/echo", "bare", _CONDOR_JOB_AD="/none", _CONDOR_WRAPPER_ERROR_FILE=str(told))
    assert done.returncode == 1
    assert done.stdout == b""
    assert "cannot run" in told.read_text()


#: Prints what it was given, in what environment, and what is where the job is to be.
_SHOWS = """#!/bin/sh
printf '%s\\n' "$*"; env; echo; cat "$3"; ls -A FOLDER
"""


def wrapper_to(folder: Path, scratch: Path) -> Path:
    """The wrapper, with a program that shows all in place of `vmjobs`."""
    shows, wrapper = folder / "shows", folder / "wrapper"
    shows.write_text(_SHOWS.replace("FOLDER", str(scratch)))
    wrapper.write_text(WRAPPER.read_text().replace('"/usr/bin/vmjobs"', f'"{shows}"'))
    for program in (shows, wrapper):
        program.chmod(0o755)
    return wrapper


def test_what_runs_the_job_has_its_variables_by_a_file_that_is_gone_with_it(tmp_path: Path) -> None:
    """And none as its own. In the job's directory is nothing that was not there."""
    (tmp_path / "ad").write_text('vmjobimage = "x"\n')
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    wrapper = wrapper_to(tmp_path, scratch)
    ad, place = str(tmp_path / "ad"), str(scratch)
    done = start("/bin/true", "a b", wrapper=wrapper, _CONDOR_JOB_AD=ad, _CONDOR_SCRATCH_DIR=place)
    said, variables = done.stdout.split(b"\n\n", 1)
    words, *environment = said.decode().splitlines()
    assert words.startswith("exec-unchanged --environment /proc/self/fd/")
    assert words.endswith(" -- /bin/true a b")
    assert {word.partition("=")[0] for word in environment} == {"PATH", "LANG", "HOME", "PWD"}
    expected = {**ODD, "_CONDOR_JOB_AD": ad, "_CONDOR_SCRATCH_DIR": place}
    assert variables == b"".join(f"{name}={value}\0".encode() for name, value in expected.items())


def test_a_job_that_poses_as_an_ssh_server_becomes_one_of_ours(tmp_path: Path) -> None:
    """HTCondor starts the server of condor_ssh_to_job like a job, and a job may name its program."""
    (tmp_path / "ad").write_text('VMJobImage = "x"\n')
    place = tmp_path / ".condor_ssh_to_job_1"
    place.mkdir()
    mark = tmp_path / "mark"
    config = f"AuthorizedKeysCommand /usr/bin/touch {mark}\nForceCommand /usr/bin/touch {mark}\n"
    (place / "sshd_config").write_text(config)
    variables = {"_CONDOR_JOB_AD": str(tmp_path / "ad"), "_CONDOR_SCRATCH_DIR": str(tmp_path)}
    server = ("/usr/sbin/sshd", "-i", "-e", "-f")
    start(*server, str(place / "sshd_config"), **variables)
    assert not mark.exists()
    wrapper = wrapper_to(tmp_path, place)
    for other in ("/etc/ssh/sshd_config", str(tmp_path / "sshd_config"), f"{place}/../sshd_config"):
        done = start(*server, other, wrapper=wrapper, **variables)
        assert done.stdout.startswith(b"exec-unchanged "), other
