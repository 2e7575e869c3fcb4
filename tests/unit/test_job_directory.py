"""A job's directory as tar streams: what a guest sends stays inside the directory."""

from __future__ import annotations

import io
import socket
import tarfile
from contextlib import suppress
from pathlib import Path

import pytest

from vmjobs import job_directory
from vmjobs.errors import InvalidRequest


def stream(*entries: tuple[tarfile.TarInfo, bytes]) -> io.BytesIO:
    """Return a tar stream."""
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for info, data in entries:
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    sink.seek(0)
    return sink


def entry(
    name: str, kind: bytes = tarfile.REGTYPE, link: str = "", mode: int = 0o644
) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode = kind, link, mode
    return info


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
            job_directory.unpack(stream((entry(name), b"theirs")), place)
    assert (place.parent / "outside").read_text() == "mine"
    job_directory.unpack(stream((entry("/etc"), b"x")), place)
    assert (place / "etc").read_text() == "x"


def test_links_are_neither_followed_nor_written_through(place: Path) -> None:
    entries = [(entry("way", tarfile.SYMTYPE, ".."), b""), (entry("way/outside"), b"theirs")]
    with pytest.raises(OSError, match=r"way|directory"):
        job_directory.unpack(stream(*entries), place)
    (place / "file").symlink_to("../outside")  # an existing link is replaced
    job_directory.unpack(stream((entry("file"), b"new")), place)
    assert (place / "file").read_text() == "new"
    assert (place.parent / "outside").read_text() == "mine"


def test_hard_links_stay_inside(place: Path) -> None:
    with pytest.raises(InvalidRequest):
        job_directory.unpack(stream((entry("h", tarfile.LNKTYPE, "../outside"), b"")), place)
    (place / "way").symlink_to("..")
    with pytest.raises(OSError, match=r"way|directory"):
        job_directory.unpack(stream((entry("h", tarfile.LNKTYPE, "way/outside"), b"")), place)


def test_special_files_and_bits_do_not_come(place: Path) -> None:
    device = entry("null", tarfile.CHRTYPE)
    job_directory.unpack(stream((device, b""), (entry("suid", mode=0o6755), b"")), place)
    assert not (place / "null").exists()
    assert (place / "suid").stat().st_mode & 0o7777 == 0o755


def test_a_link_in_place_of_a_directory_passes_its_mode_on_to_nobody(place: Path) -> None:
    """Its target is not in the job's directory; the link is not unpacked either."""
    theirs = place.parent / "theirs"
    theirs.mkdir(0o700)
    (theirs / "within").mkdir(0o700)
    entries = [
        (entry("d", tarfile.DIRTYPE, mode=0o777), b""),
        (entry("d", tarfile.SYMTYPE, str(theirs)), b""),
        (entry("e", tarfile.DIRTYPE, mode=0o777), b""),
        (entry("e/within", tarfile.DIRTYPE, mode=0o777), b""),
        (entry("e", tarfile.SYMTYPE, "../theirs"), b""),
        (entry("f", tarfile.DIRTYPE, mode=0o777), b""),
        (entry("f", tarfile.SYMTYPE, "../outside"), b""),
    ]
    (place.parent / "outside").chmod(0o600)
    assert set(job_directory.unpack(stream(*entries), place)) == set("def")
    assert list(place.iterdir()) == []
    for path, mode in ((theirs, 0o700), (theirs / "within", 0o700), (place.parent / "outside", 0o600)):
        assert path.stat().st_mode & 0o777 == mode, path


def test_modes_of_directories_in_any_order(place: Path) -> None:
    """The last entry of each counts; a directory without access still gets its contents."""
    entries = [
        (entry("a/", tarfile.DIRTYPE, mode=0o777), b""),
        (entry("a/b/", tarfile.DIRTYPE, mode=0o755), b""),
        (entry("a/b/file", mode=0o600), b"x"),
        (entry("a/", tarfile.DIRTYPE, mode=0o000), b""),
    ]
    job_directory.unpack(stream(*entries), place)
    assert (place / "a").stat().st_mode & 0o777 == 0
    (place / "a").chmod(0o700)
    assert (place / "a/b").stat().st_mode & 0o777 == 0o755
    assert (place / "a/b/file").read_text() == "x"


LINK, HARD, FOLDER = tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE


@pytest.mark.parametrize(
    "entries",
    [
        [entry("a", LINK, "/etc/hostname")],
        [entry("a", LINK, "../outside")],
        [entry("a", LINK, "b/../../outside")],
        [entry("d", FOLDER), entry("d/a", LINK, "../../outside")],
        [entry("d", FOLDER), entry("d/a", LINK, "./..//../outside")],
        # through a directory link that exists by then, comes later, or replaces a directory
        [entry("d", FOLDER), entry("d/e", LINK, ".."), entry("a", LINK, "d/e/../outside")],
        [entry("a", LINK, "s/t/../../outside"), entry("s", FOLDER), entry("s/t", LINK, ".")],
        [
            *(entry("s", FOLDER), entry("s/t", FOLDER)),
            *(entry("a", LINK, "s/t/../../outside"), entry("s/t", LINK, ".")),
        ],
        [entry("a", LINK, "b/outside"), entry("b", LINK, "c"), entry("c", LINK, "..")],
        # a link that stays inside where it was made, but leads out of another place
        [entry("d", FOLDER), entry("d/b", LINK, "../outside"), entry("a", HARD, "d/b")],
        # a link in place of a file
        [entry("a"), entry("a", LINK, "../outside")],
        [entry("b", LINK, "../outside"), entry("a", HARD, "b")],
    ],
)
def test_no_link_leads_out_at_any_time(place: Path, entries: list[tarfile.TarInfo]) -> None:
    for count in range(1, len(entries) + 1):
        with suppress(OSError):
            job_directory.unpack(stream(*((info, b"") for info in entries[:count])), place)
        for path in place.rglob("*"):
            assert path.resolve().is_relative_to(place), (count, path)
    assert not (place / "a").exists()


def test_links_that_stay_inside_come(place: Path) -> None:
    entries = [
        (entry("d", FOLDER, mode=0o755), b""),
        (entry("d/e", FOLDER, mode=0o755), b""),
        (entry("file"), b"x"),
        (entry("d/e/up", LINK, "../../file"), b""),
        (entry("d/top", LINK, ".."), b""),
        (entry("chain", LINK, "d/top/file"), b""),
        (entry("second", HARD, "chain"), b""),
    ]
    assert job_directory.unpack(stream(*entries), place) == {}
    for name in ("d/e/up", "chain", "second", "d/top/d/e/up"):
        assert (place / name).read_text() == "x", name


def test_what_is_left_out_is_named_and_nothing_older_is_in_its_place(place: Path) -> None:
    (place / "a").write_text("older")
    fifo, link = entry("d/fifo", tarfile.FIFOTYPE), entry("./a", LINK, "/etc/hostname")
    refused = job_directory.unpack(
        stream((entry("d", FOLDER, mode=0o755), b""), (fifo, b""), (link, b"")), place
    )
    assert refused == {
        "d/fifo": "neither a file nor a directory",
        "a": "a link that may lead out of the job's directory",
    }
    assert [path.name for path in place.rglob("*")] == ["d"]


def test_what_no_job_leaves(place: Path) -> None:
    sparse = entry("huge", tarfile.GNUTYPE_SPARSE)
    with pytest.raises(InvalidRequest):
        job_directory.unpack(stream((sparse, b"")), place)
    with pytest.raises(InvalidRequest):
        job_directory.unpack(stream((entry("h", tarfile.LNKTYPE, "."), b"")), place)


def test_kinds_may_change(place: Path) -> None:
    (place / "d").mkdir()
    (place / "d/x").touch()
    (place / "f").touch()
    job_directory.unpack(
        stream((entry("d"), b"file now"), (entry("f", tarfile.DIRTYPE, mode=0o700), b"")), place
    )
    assert (place / "d").read_text() == "file now"
    assert (place / "f").is_dir()


def _absurd() -> bytes:
    """Return a header that would fill the memory."""
    info = entry("long", tarfile.GNUTYPE_LONGNAME)
    info.size = 1 << 40
    return info.tobuf(tarfile.GNU_FORMAT) + b"x" * 4096


WHOLE = stream((entry("large"), b"x" * 100_000)).getvalue()


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
