"""Checks of the files that a guest delivers."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
import time
import tracemalloc
from pathlib import Path

import pytest

from vmjobs.agent.run import outputs
from vmjobs.agent.run.outputs import (
    CollectedFile,
    DiskContents,
    OutputCollector,
    OutputRejected,
    read_output_disk,
)
from vmjobs.model import ExitChannel, ExitStatus
from vmjobs.paths import check_path, matches_glob


def output_collector(*globs: str, limit: int = 1000) -> OutputCollector:
    return OutputCollector(globs or ("*",), limit)


def accept(to: OutputCollector, name: str, size: int = 1) -> None:
    to.accept(CollectedFile(name, Path("disk"), 0, size))


def content(collected: CollectedFile) -> bytes:
    with collected.open() as file:
        return file.read(collected.size)


LEAVING = ["../x", "a/../../x", "/etc/passwd", "a//b", "./a", "a\\b", "\ud800"]


@pytest.mark.parametrize("name", [*LEAVING, "", "a\nb", "a\0b", "x" * 300, "d/" * 20 + "f"])
def test_names_that_leave_or_confuse_are_refused_with_a_reason(name: str) -> None:
    assert check_path(name)
    receiving = output_collector("*")
    with pytest.raises(OutputRejected):
        accept(receiving, name)
    assert receiving.collected == {}
    assert receiving.rejected[0].why


@pytest.mark.parametrize(
    ("name", "glob", "answer"),
    [
        ("hist-1.csv", "hist-*.csv", True),
        ("hist-1.csv", "./hist-*.csv", True),
        ("sub/hist-1.csv", "*.csv", False),
        ("sub/hist-1.csv", "sub/*.csv", True),
        (".hidden", "*", False),
        (".hidden", ".*", True),
        ("HIST.csv", "hist*", False),
    ],
)
def test_globs_mean_what_they_mean_in_a_shell(name: str, glob: str, answer: bool) -> None:
    assert matches_glob(name, glob) is answer


def test_the_limit_holds_for_all_outputs_together() -> None:
    receiving = output_collector(limit=10)
    accept(receiving, "a", 6)
    with pytest.raises(OutputRejected) as refused:
        accept(receiving, "b", 6)
    assert refused.value.too_large and receiving.too_large
    for _ in range(20):
        accept(receiving, "a", 10)  # a tar may contain a name twice: the last entry counts
    assert [collected.size for collected in receiving.collected.values()] == [10]


@pytest.mark.parametrize("names", [("dir", "dir/file"), ("dir/deep/file", "dir")])
def test_a_file_and_a_directory_of_one_name_are_not_both_taken(
    names: tuple[str, str],
) -> None:
    """No directory can contain both."""
    receiving = output_collector("*", "*/*", "*/*/*")
    accept(receiving, names[0])
    with pytest.raises(OutputRejected, match=f"conflicts with the output {names[0]}"):
        accept(receiving, names[1])
    accept(receiving, "directory")
    assert list(receiving.collected) == [names[0], "directory"]
    assert [entry.path for entry in receiving.rejected] == [names[1]]


def test_what_was_asked_for_and_did_not_arrive_is_lacking() -> None:
    receiving = output_collector("*", limit=10)
    for name, size in (("new\nline", 1), ("large", 11), ("dir/other", 1)):
        with pytest.raises(OutputRejected):
            accept(receiving, name, size)
    assert set(receiving.lacking) == {"new\nline", "large"}, "nothing asks for dir/other"
    assert len(receiving.rejected) == 3
    accept(receiving, "large", 10)  # a later file of that name
    assert set(receiving.lacking) == {"new\nline"}
    assert list(receiving.collected) == ["large"]


def write_disk(path: Path, entries: list[tuple[tarfile.TarInfo, bytes]]) -> Path:
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as tar:
        for info, data in entries:
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    with path.open("ab") as file:
        file.truncate(path.stat().st_size + 4096)
    return path


def entry(
    name: str, data: bytes = b"", kind: bytes = tarfile.REGTYPE, link: str = ""
) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info, data


def test_a_hostile_tar_is_refused_entry_by_entry_and_the_rest_delivered(tmp_path: Path) -> None:
    disk = write_disk(
        tmp_path / "disk",
        [
            entry("exit.json", b'{"code": 0}'),
            entry("stdout", b"hello\n"),
            entry("outputs/good.csv", b"1,2\n"),
            entry("outputs/../../../etc/cron.d/x", b"boom"),
            entry("/etc/passwd", b"boom"),
            entry("outputs/link", kind=tarfile.SYMTYPE, link="/etc/shadow"),
            entry("outputs/hard", kind=tarfile.LNKTYPE, link="exit.json"),
            entry("outputs/sda", kind=tarfile.BLKTYPE),
            entry("outputs/fifo", kind=tarfile.FIFOTYPE),
            entry("stray", b"?"),
            entry("outputs/also-good.csv", b"3\n"),
        ],
    )
    receiving = output_collector("*")
    streams = {"stdout": tmp_path / "out"}
    found = read_output_disk(disk, receiving, streams, 1000)
    assert found.exit == ExitStatus(code=0, channel=ExitChannel.OUTPUT_DISK)
    assert found.complete
    assert sorted(receiving.collected) == ["also-good.csv", "good.csv"]
    assert streams["stdout"].read_bytes() == b"hello\n"
    reasons = {r.path: r.why for r in receiving.rejected}
    assert "symbolic link" in reasons["outputs/link"]
    assert "block device" in reasons["outputs/sda"]
    assert "'..'" in next(why for path, why in reasons.items() if ".." in path)
    assert "absolute" in reasons["/etc/passwd"]
    assert len(reasons) == 7
    assert content(receiving.collected["also-good.csv"]) == b"3\n"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["disk", "out"]


def test_a_tar_that_breaks_off_is_told(tmp_path: Path) -> None:
    disk = write_disk(
        tmp_path / "disk", [entry("exit.json", b'{"code": 0}'), entry("outputs/a", b"x" * 9000)]
    )
    os.truncate(disk, 4096)
    receiving = output_collector(limit=10**6)
    found = read_output_disk(disk, receiving, {}, 1000)
    assert found.exit is not None
    assert not found.complete
    assert set(receiving.lacking) == {"a"}


def test_what_a_guest_leaves_out_is_refused(tmp_path: Path) -> None:
    """So are files that the guest had no reason to leave out."""
    listing = (
        b"0 new%0aline\n2199023255552 large\n5 small\nx y\n0 ..%2fout\n99\n" + b"9" * 5000 + b" z\n"
        b"link a%20b\nfifo pipe\nsocket s\ndevice d\noutside etc/passwd\nlink a%20b\nlink cut off"
    )
    write_disk(tmp_path / "disk", [entry("undelivered", listing), entry("outputs/there", b"1")])
    found, receiving, _ = read(tmp_path)
    assert found.complete
    assert receiving.too_large
    assert list(receiving.collected) == ["there"]
    named = {
        "a b": "not a regular file but a symbolic link",
        "pipe": "not a regular file but a FIFO",
        "s": "not a regular file but a socket",
        "d": "not a regular file but a device",
    }
    wanted = {"new\nline", "large", "small"}
    assert set(receiving.lacking) == wanted | set(named)
    outside = {"etc/passwd": "it lies outside of the job's directory"}
    reasons = {entry.path: entry.why for entry in receiving.rejected}
    assert set(reasons) == wanted | {"../out"} | set(named) | set(outside)
    assert reasons.items() >= (named | outside).items()
    assert len(receiving.rejected) == len(reasons), "each is listed once"


def test_more_entries_than_are_looked_at_are_not_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outputs, "MAX_FILES", 3)
    write_disk(tmp_path / "disk", [entry(f"outputs/{number}") for number in range(9)])
    found, receiving, _ = read(tmp_path)
    assert not found.complete
    assert len(receiving.collected) == 3
    assert "more than 3 output files" in receiving.lacking["3"]


def read(folder: Path, **streams: Path) -> tuple[DiskContents, OutputCollector, int]:
    """Read the disk in a folder; return its contents, the outputs, and the peak memory."""
    receiving = output_collector()
    tracemalloc.start()
    found = read_output_disk(folder / "disk", receiving, streams, 1000)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return found, receiving, peak


@pytest.mark.parametrize("content", [b"\0" * 8192, b"\xff" * 8192, b"", b"exit.json" * 2000])
def test_a_disk_without_a_tar_has_no_exit_status(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "disk").write_bytes(content)
    assert read(tmp_path)[0].exit is None


@pytest.mark.parametrize(
    "text",
    [b"", b"[]", b"{}", b'{"code": 999}', b'{"code": 1, "signal": 2}', b'{"code": "x"}', b"[" * 4096],
)
def test_a_malformed_exit_report_is_none(tmp_path: Path, text: bytes) -> None:
    write_disk(tmp_path / "disk", [entry("exit.json", text)])
    assert read(tmp_path)[0].exit is None


def test_a_sparse_entry_does_not_fill_the_host(tmp_path: Path) -> None:
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(300 * 2**20)
    disk = tmp_path / "disk"
    subprocess.run(
        ["tar", "-S", "-cf", disk, "--transform=s/huge/stdout/", "huge"], cwd=tmp_path, check=True
    )
    _, receiving, _ = read(tmp_path, stdout=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert "sparse" in receiving.rejected[0].why
    assert set(receiving.lacking) == {"stdout"}


def test_a_stream_is_cut_at_its_limit(tmp_path: Path) -> None:
    write_disk(tmp_path / "disk", [entry("stdout", b"x" * 5000)])
    read(tmp_path, stdout=tmp_path / "out")
    assert (tmp_path / "out").stat().st_size == 1000


def test_a_long_name_is_not_read_into_memory(tmp_path: Path) -> None:
    header = tarfile.TarInfo("././@LongLink")
    header.type, header.size = tarfile.GNUTYPE_LONGNAME, 400 * 2**20
    disk = tmp_path / "disk"
    with disk.open("wb") as file:
        file.write(header.tobuf(tarfile.GNU_FORMAT))
        file.truncate(500 * 2**20)
    found, _, peak = read(tmp_path)
    assert not found.complete
    assert peak < 10 * 2**20


def entry_bytes(name: str) -> bytes:
    item = tarfile.TarInfo(name)
    item.size = 1
    return item.tobuf(tarfile.GNU_FORMAT) + b"x".ljust(512, b"\0")


def extended(kind: bytes, body: bytes) -> bytes:
    header = tarfile.TarInfo("x")
    header.type, header.size = kind, len(body)
    return header.tobuf(tarfile.GNU_FORMAT) + body.ljust(-(-len(body) // 512) * 512, b"\0")


@pytest.mark.parametrize(
    ("kind", "body", "count"),
    [
        (tarfile.GNUTYPE_LONGNAME, b"a" * 512, 3000),
        (tarfile.XHDTYPE, b"12 a=bcdefg\n", 3000),
        (tarfile.XGLTYPE, b"12 a=bcdefg\n", 3000),
        (tarfile.XHDTYPE, b"12 a=bcdefg\n" * 80_000, 50),
    ],
    ids=["long names", "pax", "global pax", "megabytes"],
)
def test_headers_in_a_row_take_neither_stack_nor_memory(
    tmp_path: Path, kind: bytes, body: bytes, count: int
) -> None:
    disk = tmp_path / "disk"
    with disk.open("wb") as file:
        for _ in range(count):
            file.write(extended(kind, body))
    found, _, peak = read(tmp_path)
    assert (found.exit, found.complete) == (None, False)
    assert peak < 16 * 2**20


@pytest.mark.slow
def test_headers_of_many_entries_are_not_kept(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    pax = b"100010 a=" + b"b" * 100_000 + b"\n"
    with disk.open("wb") as file:
        file.write(b"".join(entry_bytes(f"outputs/{n}") for n in range(3)))
        for number in range(2000):
            file.write(extended(tarfile.XHDTYPE, pax) + entry_bytes(f"outputs/a{number}"))
    found, receiving, peak = read(tmp_path)
    assert (found.begun, found.complete) == (True, False)
    assert {"0", "1", "2", "a0", "a100"} <= receiving.collected.keys()
    assert peak < 16 * 2**20


def test_long_names_and_pax_headers_of_honest_entries_are_heeded(tmp_path: Path) -> None:
    name = "d" * 200
    for form in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        disk = tmp_path / "disk"
        with tarfile.open(disk, "w", format=form) as made:
            for number in range(50):
                item = tarfile.TarInfo(f"outputs/{name}{number}")
                item.size, item.mtime = 3, 1.5
                made.addfile(item, io.BytesIO(b"abc"))
            receiving = output_collector()
        assert read_output_disk(disk, receiving, {}, 1000).complete
        assert set(receiving.collected) == {f"{name}{number}" for number in range(50)}


def test_tens_of_thousands_of_files_are_taken_in_seconds(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with disk.open("wb") as file:
        for number in range(30_000):
            file.write(entry_bytes(f"outputs/many/{number}"))
        file.write(bytes(1024))
    receiving, began = output_collector("many/*", limit=10**6), time.process_time()
    assert read_output_disk(disk, receiving, {}, 1000).complete
    assert len(receiving.collected) == 30_000
    assert time.process_time() - began < 15, "or it looks at all of them for each"


def test_an_output_beyond_four_gibibytes(tmp_path: Path) -> None:
    disk, size = tmp_path / "disk", 5 * 2**30
    with disk.open("wb") as file:
        header = tarfile.TarInfo("outputs/large")
        header.size = size
        file.write(header.tobuf(tarfile.GNU_FORMAT))
        file.seek(size, 1)
        file.write(entry_bytes("outputs/behind"))
        file.truncate(file.tell() + 1024)
    receiving = output_collector(limit=2 * size)
    assert read_output_disk(disk, receiving, {}, 1000).complete
    assert [collected.size for collected in receiving.collected.values()] == [size, 1]
    assert content(receiving.collected["behind"]) == b"x"


def test_a_disk_that_cannot_be_read_is_not_what_the_guest_wrote(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        read_output_disk(tmp_path, output_collector(), {}, 100)
    disk = write_disk(tmp_path / "disk", [entry("stdout", b"12345")])
    with pytest.raises(OSError, match="No space left"):
        read_output_disk(disk, output_collector(), {"stdout": Path("/dev/full")}, 100)
