"""The job wrapper, by which HTCondor starts every job of a node, and what it executes."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.wrapper import SOURCES, build_evil, build_wrapper

#: Variables that a shell, or Python itself, would alter.
ODD = {"odd.name": "1", "BASH_FUNC_x%%": "() { :; }", "EMPTY": "", "LINES": "a\nb", "PYTHONHOME": "/x"}


@pytest.fixture(scope="module")
def wrapper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wrapper, beside the settings of its SSH server."""
    folder = tmp_path_factory.mktemp("libexec")
    shutil.copy(SOURCES.with_name("libexec") / "ssh-to-job.sshd", folder)
    return build_wrapper(folder / "job-wrapper")


@pytest.fixture
def ad(tmp_path: Path) -> str:
    """The ad of a job that asks for a VM."""
    (tmp_path / "ad").write_text('VMJobImage = "x"\n')
    return str(tmp_path / "ad")


@pytest.fixture
def server(tmp_path: Path) -> tuple[str, ...]:
    """The command by which HTCondor starts the SSH server of a job."""
    (tmp_path / ".condor_ssh_to_job_1").mkdir()
    return ("/usr/sbin/sshd", "-i", "-e", "-f", str(tmp_path / ".condor_ssh_to_job_1" / "sshd_config"))


def start(wrapper: Path, *command: str, **variables: str) -> subprocess.CompletedProcess[bytes]:
    """Run the wrapper as the starter does."""
    return subprocess.run(
        [str(wrapper), *command],
        env={**ODD, **variables},
        capture_output=True,
        check=False,
        timeout=120,
    )


@pytest.mark.parametrize("ad", ["", "Cmd = 1\nVMJobImage = undefined\n", "VMJobImages = 1\n"])
def test_a_job_that_asks_for_no_vm_starts_as_it_is(tmp_path: Path, wrapper: Path, ad: str) -> None:
    (tmp_path / "ad").write_text(ad)
    path = str(tmp_path / "ad")
    done = start(wrapper, "/bin/cat", "/proc/self/environ", _CONDOR_JOB_AD=path)
    assert done.returncode == 0
    found = dict(word.split("=", 1) for word in done.stdout.decode().split("\0")[:-1])
    assert found == {**ODD, "_CONDOR_JOB_AD": path}


def test_exit_status_and_arguments_pass(tmp_path: Path, wrapper: Path) -> None:
    done = start(wrapper, "/bin/sh", "-c", 'printf "<%s>" "$@"; exit 7', "sh", "", "a b", "*")
    assert (done.returncode, done.stdout) == (7, b"<><a b><*>")


def test_a_program_that_is_not_there_is_told_to_the_starter(tmp_path: Path, wrapper: Path) -> None:
    told = tmp_path / "error"
    done = start(wrapper, "/none/such", _CONDOR_WRAPPER_ERROR_FILE=str(told))
    assert done.returncode == 1
    assert "/none/such" in told.read_text()


def test_an_ad_that_cannot_be_read_is_no_reason_to_run_bare(tmp_path: Path, wrapper: Path) -> None:
    told = tmp_path / "error"
    done = start(
        wrapper, "/bin/echo", "bare", _CONDOR_JOB_AD="/none", _CONDOR_WRAPPER_ERROR_FILE=str(told)
    )
    assert done.returncode == 1
    assert done.stdout == b""
    assert "cannot run" in told.read_text()


#: Prints its arguments, its environment, the file of variables and the job's directory.
_SHOWS = """#!/bin/bash
printf '%s\\n' "$*"; env; echo; cat "$1"; ls -A FOLDER; python3 -c pass
"""


#: Variables that could make programs on a node run a job's own code, and values that try it.
#: The job's directory (HERE) has a library, shell commands, modules and programs that leave a mark.
TRIES = {
    "LD_PRELOAD": "./evil.so",
    "LD_AUDIT": "./evil.so",
    "LD_LIBRARY_PATH": "HERE/lib",
    "LD_DEBUG": "all",
    "LD_DEBUG_OUTPUT": "HERE/mark",
    "LD_PROFILE": "libc.so.6",
    "LD_PROFILE_OUTPUT": "HERE",
    "LD_SHOW_AUXV": "1",
    "LD_TRACE_LOADED_OBJECTS": "1",
    "LD_BIND_NOW": "1",
    "LD_ORIGIN_PATH": "HERE/lib",
    "LD_WARN": "1",
    "LD_VERBOSE": "1",
    "LD_ASSUME_KERNEL": "2.2.5",
    "LD_HWCAP_MASK": "0",
    "PYTHONSTARTUP": "HERE/python/sitecustomize.py",
    "PYTHONPATH": "HERE/python",
    "PYTHONHOME": "HERE/python",
    "PYTHONUSERBASE": "HERE/python",
    "PYTHONINSPECT": "1",
    "PYTHONVERBOSE": "1",
    "PYTHONBREAKPOINT": "sitecustomize.x",
    "PYTHONPYCACHEPREFIX": "HERE/mark",
    "PYTHONWARNINGS": "error:::sitecustomize",
    "BASH_ENV": "HERE/words",
    "ENV": "HERE/words",
    "SHELLOPTS": "xtrace",
    "BASHOPTS": "extdebug",
    "PS4": "$(touch HERE/mark)",
    "PROMPT_COMMAND": "touch HERE/mark",
    "BASH_FUNC_ls%%": "() { touch HERE/mark; }",
    "IFS": "/",
    "PATH": "HERE/bin",
    "HOME": "HERE",
    "TMPDIR": "HERE/tmp",
    "GCONV_PATH": "HERE",
    "LOCPATH": "HERE",
    "NLSPATH": "HERE/%N",
    "LC_ALL": "x.EVIL",
    "OUTPUT_CHARSET": "EVIL",
    "GETCONF_DIR": "HERE/bin",
    "HOSTALIASES": "HERE/words",
    "RES_OPTIONS": "debug",
    "MALLOC_CHECK_": "3",
    "MALLOC_PERTURB_": "7",
    "MALLOC_TRACE": "HERE/mark",
    "GLIBC_TUNABLES": "glibc.malloc.check=3:glibc.malloc.perturb=7:glibc.rtld.enable_secure=1",
    "OPENSSL_CONF": "HERE/words",
    "GODEBUG": "inittrace=1",
}


@pytest.fixture(scope="module")
def laid_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job's directory with the files that its variables name; each would leave a ``mark`` there."""
    place = tmp_path_factory.mktemp("scratch")
    mark = place / "mark"
    evil = build_evil(place, mark)
    for folder in ("lib", "python", "bin", "tmp"):
        (place / folder).mkdir()
    shutil.copy(evil, place / "lib/libc.so.6")
    (place / "gconv-modules").write_text(
        "module EVIL// INTERNAL evil 1\nmodule INTERNAL EVIL// evil 1\n"
    )
    (place / "python/sitecustomize.py").write_text(f"open({str(mark)!r}, 'w')\n")
    (place / "words").write_text(f"touch {mark}\n")
    for name in ("vmjobs", "python3", "env", "cat", "ls", "sh", "bash"):
        (place / "bin" / name).write_text(f"#!/bin/sh\n/usr/bin/touch {mark}\n")
        (place / "bin" / name).chmod(0o755)
    return place


@pytest.fixture
def place(laid_out: Path) -> Iterator[Path]:
    """This directory, without the mark of another test."""
    yield laid_out
    (laid_out / "mark").unlink(missing_ok=True)


@pytest.fixture(scope="module")
def shows(tmp_path_factory: pytest.TempPathFactory, laid_out: Path) -> Path:
    """The wrapper, with a program that prints all this in place of exec-unchanged."""
    folder = tmp_path_factory.mktemp("shows")
    program = folder / "program"
    program.write_text(_SHOWS.replace("FOLDER", str(laid_out)))
    program.chmod(0o755)
    return build_wrapper(folder / "wrapper", program)


@pytest.mark.parametrize("name", TRIES)
def test_no_variable_of_a_job_gives_orders_on_the_node(
    place: Path, shows: Path, monkeypatch: pytest.MonkeyPatch, ad: str, name: str
) -> None:
    """And each reaches the program that runs the job, unaltered."""
    monkeypatch.chdir(place)
    variables = {name: TRIES[name].replace("HERE", str(place)), "_CONDOR_JOB_AD": ad}
    before = sorted(os.listdir(place))  # noqa: PTH208
    done = start(shows, "/bin/true", **variables)
    assert not (place / "mark").exists()
    assert sorted(os.listdir(place)) == before  # noqa: PTH208
    assert (done.returncode, done.stderr) == (0, b"")
    told = b"".join(f"{n}={v}\0".encode() for n, v in {**ODD, **variables}.items())
    assert done.stdout.split(b"\n\n", 1)[1].startswith(told)


@pytest.mark.parametrize("name", ["LD_PRELOAD", "LD_AUDIT"])
def test_a_job_that_asks_for_no_vm_has_its_variables_obeyed(
    place: Path, wrapper: Path, name: str
) -> None:
    assert start(wrapper, "/bin/true", **{name: str(place / "evil.so")}).returncode == 0
    assert (place / "mark").exists()


@pytest.mark.parametrize("way", ["file", "link"])
def test_the_ssh_server_loads_no_library_of_a_job(
    tmp_path: Path, place: Path, wrapper: Path, ad: str, server: tuple[str, ...], way: str
) -> None:
    """HTCondor itself names a library of this name in LD_PRELOAD."""
    library = tmp_path / "libgetpwnam.so"
    if way == "file":
        shutil.copy(place / "evil.so", library)
    else:
        library.symlink_to(place / "evil.so")
    variables = {"_CONDOR_JOB_AD": ad, "_CONDOR_SCRATCH_DIR": str(tmp_path)}
    start(wrapper, *server, **variables, LD_PRELOAD=str(library))
    assert not (place / "mark").exists()


def test_what_runs_the_job_has_its_variables_by_a_file_that_is_gone_with_it(
    tmp_path: Path, place: Path, shows: Path
) -> None:
    """Its own environment has none of them. The job's directory gets no new file."""
    (tmp_path / "ad").write_text('vmjobimage = "x"\n')
    ad, scratch = str(tmp_path / "ad"), str(place)
    before = "".join(f"{path.name}\n" for path in sorted(place.iterdir())).encode()
    done = start(shows, "/bin/true", "a b", _CONDOR_JOB_AD=ad, _CONDOR_SCRATCH_DIR=scratch)
    said, variables = done.stdout.split(b"\n\n", 1)
    words, *environment = said.decode().splitlines()
    assert words.startswith("/proc/self/fd/")
    assert words.endswith(" /bin/true a b")
    assert {word.partition("=")[0] for word in environment} == {
        *("PATH", "LANG", "HOME"),
        *("PWD", "SHLVL", "_"),  # the shell's own
    }
    expected = {**ODD, "_CONDOR_JOB_AD": ad, "_CONDOR_SCRATCH_DIR": scratch}
    told = b"".join(f"{name}={value}\0".encode() for name, value in expected.items())
    assert variables == told + before


def test_a_job_that_poses_as_an_ssh_server_becomes_one_of_ours(
    tmp_path: Path, wrapper: Path, shows: Path, ad: str, server: tuple[str, ...]
) -> None:
    """HTCondor starts condor_ssh_to_job's server like a job, and a job may name its program."""
    config_file = Path(server[-1])
    mark = tmp_path / "mark"
    config = f"AuthorizedKeysCommand /usr/bin/touch {mark}\nForceCommand /usr/bin/touch {mark}\n"
    config_file.write_text(config)
    variables = {"_CONDOR_JOB_AD": ad, "_CONDOR_SCRATCH_DIR": str(tmp_path)}
    start(wrapper, *server, **variables)
    assert not mark.exists()
    up = f"{config_file.parent}/.."
    for other in ("/etc/ssh/sshd_config", str(tmp_path / "sshd_config"), f"{up}/sshd_config"):
        done = start(shows, *server[:-1], other, **variables)
        assert done.stdout.startswith(b"/proc/self/fd/"), other
