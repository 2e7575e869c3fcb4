"""A job's directory as tar streams: what a guest sends stays inside the directory."""

from __future__ import annotations

import io
import socket
import tarfile
from contextlib import suppress
from pathlib import Path

import pytest

from tests.kit.container_images import Layer as Archive
from vmjobs import job_directory
from vmjobs.errors import InvalidRequest


def unpack(archive: Archive, place: Path) -> dict[str, str]:
    return job_directory.unpack(io.BytesIO(archive.tar()), place)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    folder = tmp_path / "scratch"
    folder.mkdir()
    (tmp_path / "outside").write_text("mine")
    return folder


def test_there_and_back(tmp_path: Path, place: Path) -> None:
    (place / "a").mkdir()
    (place / "a/b").write_bytes(b"b" * 100_000)
    (place / "a/b").chmod(0o751)
    (place / "link").symlink_to("a/nothing")
    (place / "stays").touch()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(place / "socket"))
    sink = io.BytesIO()
    assert job_directory.pack(place, sink, {"stays"}) == {"a", "a/b", "link"}
    sink.seek(0)
    other = tmp_path / "other"
    other.mkdir()
    job_directory.unpack(sink, other)
    assert (other / "a/b").read_bytes() == b"b" * 100_000
    assert (other / "a/b").stat().st_mode & 0o7777 == 0o751
    assert (other / "link").readlink() == Path("a/nothing")
    assert sorted(path.name for path in other.iterdir()) == ["a", "link"]


def test_names_that_lead_out_are_refused_and_absolute_ones_are_below(place: Path) -> None:
    for name in ("../outside", "a/../../outside"):
        with pytest.raises(InvalidRequest, match="outside its directory"):
            unpack(Archive().file(name, "theirs"), place)
    assert (place.parent / "outside").read_text() == "mine"
    unpack(Archive().file("/etc", "x"), place)
    assert (place / "etc").read_text() == "x"


def test_links_are_neither_followed_nor_written_through(place: Path) -> None:
    with pytest.raises(OSError, match=r"way|directory"):
        unpack(Archive().symlink("way", "..").file("way/outside", "theirs"), place)
    (place / "file").symlink_to("../outside")  # an existing link is replaced
    unpack(Archive().file("file", "new"), place)
    assert (place / "file").read_text() == "new"
    assert (place.parent / "outside").read_text() == "mine"


def test_hard_links_stay_inside(place: Path) -> None:
    with pytest.raises(InvalidRequest):
        unpack(Archive().link("h", "../outside"), place)
    (place / "way").symlink_to("..")
    with pytest.raises(OSError, match=r"way|directory"):
        unpack(Archive().link("h", "way/outside"), place)


def test_special_files_and_bits_do_not_come(place: Path) -> None:
    unpack(Archive().add("null", tarfile.CHRTYPE).file("suid", mode=0o6755), place)
    assert not (place / "null").exists()
    assert (place / "suid").stat().st_mode & 0o7777 == 0o755


def test_a_link_in_place_of_a_directory_passes_its_mode_on_to_nobody(place: Path) -> None:
    """Its target is not in the job's directory; the link is not unpacked either."""
    theirs = place.parent / "theirs"
    theirs.mkdir(0o700)
    (theirs / "within").mkdir(0o700)
    archive = Archive().folder("d", 0o777).symlink("d", str(theirs))
    archive.folder("e", 0o777).folder("e/within", 0o777).symlink("e", "../theirs")
    archive.folder("f", 0o777).symlink("f", "../outside")
    (place.parent / "outside").chmod(0o600)
    assert set(unpack(archive, place)) == set("def")
    assert list(place.iterdir()) == []
    for path, mode in ((theirs, 0o700), (theirs / "within", 0o700), (place.parent / "outside", 0o600)):
        assert path.stat().st_mode & 0o777 == mode, path


def test_modes_of_directories_in_any_order(place: Path) -> None:
    """The last entry of each counts; a directory without access still gets its contents."""
    archive = Archive().folder("a/", 0o777).folder("a/b/", 0o755).file("a/b/file", "x", 0o600)
    unpack(archive.folder("a/", 0o000), place)
    assert (place / "a").stat().st_mode & 0o777 == 0
    (place / "a").chmod(0o700)
    assert (place / "a/b").stat().st_mode & 0o777 == 0o755
    assert (place / "a/b/file").read_text() == "x"


@pytest.mark.parametrize(
    "archive",
    [
        Archive().symlink("a", "/etc/hostname"),
        Archive().symlink("a", "../outside"),
        Archive().symlink("a", "b/../../outside"),
        Archive().folder("d").symlink("d/a", "../../outside"),
        Archive().folder("d").symlink("d/a", "./..//../outside"),
        # through a directory link that exists by then, comes later, or replaces a directory
        Archive().folder("d").symlink("d/e", "..").symlink("a", "d/e/../outside"),
        Archive().symlink("a", "s/t/../../outside").folder("s").symlink("s/t", "."),
        Archive().folder("s").folder("s/t").symlink("a", "s/t/../../outside").symlink("s/t", "."),
        Archive().symlink("a", "b/outside").symlink("b", "c").symlink("c", ".."),
        # a link that stays inside where it was made, but leads out of another place
        Archive().folder("d").symlink("d/b", "../outside").link("a", "d/b"),
        # a link in place of a file
        Archive().file("a").symlink("a", "../outside"),
        Archive().symlink("b", "../outside").link("a", "b"),
    ],
)
def test_no_link_leads_out_at_any_time(place: Path, archive: Archive) -> None:
    for count in range(1, len(archive.members) + 1):
        with suppress(OSError):
            unpack(Archive(members=archive.members[:count]), place)
        for path in place.rglob("*"):
            assert path.resolve().is_relative_to(place), (count, path)
    assert not (place / "a").exists()


def test_links_that_stay_inside_come(place: Path) -> None:
    archive = Archive().folder("d").folder("d/e").file("file", "x").symlink("d/e/up", "../../file")
    archive.symlink("d/top", "..").symlink("chain", "d/top/file").link("second", "chain")
    assert unpack(archive, place) == {}
    for name in ("d/e/up", "chain", "second", "d/top/d/e/up"):
        assert (place / name).read_text() == "x", name


def test_what_is_left_out_is_named_and_nothing_older_is_in_its_place(place: Path) -> None:
    (place / "a").write_text("older")
    archive = Archive().folder("d").add("d/fifo", tarfile.FIFOTYPE).symlink("./a", "/etc/hostname")
    assert unpack(archive, place) == {
        "d/fifo": "neither a file nor a directory",
        "a": "a link that may lead out of the job's directory",
    }
    assert [path.name for path in place.rglob("*")] == ["d"]


def test_what_no_job_leaves(place: Path) -> None:
    with pytest.raises(InvalidRequest):
        unpack(Archive().add("huge", tarfile.GNUTYPE_SPARSE), place)
    with pytest.raises(InvalidRequest):
        unpack(Archive().link("h", "."), place)


def test_kinds_may_change(place: Path) -> None:
    (place / "d").mkdir()
    (place / "d/x").touch()
    (place / "f").touch()
    unpack(Archive().file("d", "file now").folder("f", 0o700), place)
    assert (place / "d").read_text() == "file now"
    assert (place / "f").is_dir()


def _absurd() -> bytes:
    """Return a header that would fill the memory."""
    info = tarfile.TarInfo("long")
    info.type, info.size = tarfile.GNUTYPE_LONGNAME, 1 << 40
    return info.tobuf(tarfile.GNU_FORMAT) + b"x" * 4096


WHOLE = Archive().file("large", b"x" * 100_000).tar()


@pytest.mark.parametrize("data", [b"no tar at all" * 100, b"\xff" * 4096, WHOLE[:50_000], _absurd()])
def test_garbage(place: Path, data: bytes) -> None:
    with pytest.raises(InvalidRequest):
        job_directory.unpack(io.BytesIO(data), place)


def test_what_is_gone_is_removed_and_links_are_not_followed(place: Path) -> None:
    (place / "d").mkdir()
    (place / "d/x").touch()
    (place / "way").symlink_to("..")
    job_directory.remove(place, {"d", "d/x", "way/outside", "never"})
    assert sorted(path.name for path in place.iterdir()) == ["way"]
    assert (place.parent / "outside").exists()
