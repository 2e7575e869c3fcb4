"""Only processes with a real HTCondor starter as an ancestor may request a VM."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.kit.full_disk import files_left
from vmjobs.agent.condor_job.starter import effective_uid, find_starter, read_starter
from vmjobs.errors import Forbidden, Unavailable

ME = os.getuid()


def process(proc: Path, pid: int, parent: int, comm: str, uid: int = ME) -> None:
    (proc / str(pid)).mkdir(parents=True)
    text = f"Name:\t{comm}\nUmask:\t0022\nPPid:\t{parent}\nUid:\t{uid}\t0\t0\t0\n"
    (proc / str(pid) / "status").write_text(text)


def test_the_nearest_starter_above(tmp_path: Path) -> None:
    process(tmp_path, 10, 1, "condor_starter")
    process(tmp_path, 11, 10, "condor_starter")
    process(tmp_path, 12, 11, "odd) name (")
    process(tmp_path, 13, 12, "python3")
    assert find_starter(13, {ME}, tmp_path) == 11


def test_nobody_names_himself_a_starter(tmp_path: Path) -> None:
    """Nor does a set-user-id program help: its effective user is root, its real one is not."""
    process(tmp_path, 10, 1, "condor_starter", uid=4242)
    process(tmp_path, 11, 10, "condor_starter\f")
    process(tmp_path, 12, 11, f"\fUid:\t{ME}\t0")
    with pytest.raises(Forbidden):
        find_starter(12, {ME}, tmp_path)


@pytest.mark.parametrize("parent", [1, 0, 11, 99])
def test_no_starter_anywhere(tmp_path: Path, parent: int) -> None:
    process(tmp_path, 11, parent, "sh")
    process(tmp_path, 1, 0, "init")
    with pytest.raises(Forbidden, match="only an HTCondor job"):
        find_starter(11, {ME}, tmp_path)
    with pytest.raises(Forbidden):
        find_starter(os.getpid(), {0, ME})


def test_whose_a_process_is(tmp_path: Path) -> None:
    """A process belongs to its effective user, and so do its connections."""
    for pid, name in enumerate(("Uid: 7", "\fUid:\t7\t7", "\x1cUid:\t7\t7"), start=10):
        process(tmp_path, pid, 1, name, uid=4242)
        assert effective_uid(pid, tmp_path) == 0
    assert effective_uid(99, tmp_path) == -1
    assert effective_uid(os.getpid()) == os.geteuid()


@pytest.mark.parametrize("look", [effective_uid, read_starter, lambda pid: find_starter(pid, {0, ME})])
def test_nobody_is_refused_since_there_is_no_file_to_look_by(look: Callable[[int], object]) -> None:
    """A lack of file descriptors is the node's fault, not the job's."""
    with files_left(0), pytest.raises(Unavailable, match="processes: Too many open files"):
        look(os.getpid())
