"""Scratch directories of builds: removed even after kills, but not under a live build."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from images.build import process
from images.build.scratch_dir import BUILDS_FOLDER, remove_leftovers, scratch_dir

#: Makes a file in a scratch directory, starts a program there if given one, and is killed.
BUILDER = """
import os, signal, subprocess, sys
from pathlib import Path
from images.build.scratch_dir import scratch_dir
with scratch_dir(Path(sys.argv[1])) as place:
    (place.folder / "half-made").write_bytes(b"x")
    if len(sys.argv) > 2:
        quiet = {"stdout": subprocess.DEVNULL, "start_new_session": True}
        child = subprocess.Popen(sys.argv[2:], pass_fds=(place.marker,), **quiet)
        print(child.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""

SWEEP = """
import sys; from pathlib import Path; from images.build.scratch_dir import remove_leftovers
remove_leftovers(Path(sys.argv[1]))
"""


def killed(workdir: Path, *program: str) -> str:
    """Return the output of a builder that is killed midway."""
    done = subprocess.run(
        [sys.executable, "-c", BUILDER, workdir, *program],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    return done.stdout


def folders(workdir: Path) -> list[Path]:
    return [path for path in (workdir / BUILDS_FOLDER).iterdir() if path.is_dir()]


def test_nothing_is_left(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), scratch_dir(tmp_path) as place:
        (place.folder / "mmdebstrap.x" / "etc").mkdir(parents=True)
        raise ZeroDivisionError
    assert folders(tmp_path) == []


def test_what_a_killed_build_left_goes_at_the_next_start(tmp_path: Path) -> None:
    killed(tmp_path)
    (left,) = folders(tmp_path)
    assert (left / "half-made").exists()
    remove_leftovers(tmp_path)
    assert folders(tmp_path) == []
    killed(tmp_path)
    with scratch_dir(tmp_path) as place:
        assert folders(tmp_path) == [place.folder]


def test_what_belongs_to_the_living_stays(tmp_path: Path) -> None:
    with scratch_dir(tmp_path) as one, scratch_dir(tmp_path) as other:
        remove_leftovers(tmp_path)
        assert set(folders(tmp_path)) == {one.folder, other.folder}


def test_a_program_that_outlives_its_builder_is_ended(tmp_path: Path) -> None:
    child = int(killed(tmp_path, "sh", "-c", "sleep 1000 & wait"))
    os.kill(child, 0)
    watched = os.pidfd_open(child)
    remove_leftovers(tmp_path)
    assert select.select([watched], [], [], 0)[0]
    os.close(watched)
    assert folders(tmp_path) == []


def test_a_program_of_a_builder_that_lives_is_not(tmp_path: Path) -> None:
    with scratch_dir(tmp_path) as place:
        said = process.run(
            ["sh", "-c", f"{sys.executable} -c '{SWEEP}' {tmp_path}; echo well"],
            place=place,
            timeout=60,
        )
        assert said == b"well\n"


def test_programs_put_their_temporary_files_there() -> None:
    with tempfile.TemporaryDirectory() as name:
        workdir = Path(name)
        workdir.chmod(0o711)  # pytest's own directories admit no other user
        with scratch_dir(workdir) as place:
            said = process.run(["mktemp"], timeout=10, place=place)
            assert Path(said.decode().strip()).parent == place.folder.resolve()
        assert folders(workdir) == []


def test_without_a_way_to_it_for_mmdebstrap_they_are_where_they_were(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    with scratch_dir(tmp_path) as place:
        assert place.environment == {}


_KILLED = """
import subprocess, sys
from pathlib import Path
from images.build import scratch_dir
folder, precious = map(Path, sys.argv[1:])
inside = folder / "a root" / "dev" / "shm"
inside.mkdir(parents=True)
subprocess.run(["mount", "--bind", str(precious), str(inside)], check=True)
scratch_dir._remove(folder)
"""


def test_what_a_killed_build_left_mounted_is_not_removed_with_it(tmp_path: Path) -> None:
    """For example the node's /dev/shm in the root of mmdebstrap."""
    folder, precious = tmp_path / "build-x", tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("of others")
    command = ["unshare", "-Urm", sys.executable, "-c", _KILLED, str(folder), str(precious)]
    subprocess.run(command, check=True)
    assert not folder.exists()
    assert (precious / "file").read_text() == "of others"
