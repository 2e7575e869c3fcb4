"""Backup archives: data and holes survive a round trip; anything else is refused."""

from __future__ import annotations

import io
import json
import os
import tarfile
from pathlib import Path

import pytest
import zstandard

from vmjobs.errors import DigestMismatch, InvalidRequest
from vmjobs.gateway.archive import (
    ArchiveFile,
    ArchiveWriter,
    Extents,
    free_bytes,
    parse_extents,
    read_archive,
    read_extents,
    replace_file,
    take_snapshot,
    write_disk,
)

SIZE = 64 * 1024 * 1024


def sparse(path: Path) -> Path:
    with path.open("wb") as file:
        file.truncate(SIZE)
        file.seek(8192)
        file.write(b"first" * 1000)
        file.seek(SIZE - 8192)
        file.write(b"last")
    return path


def written(disk: Path | None = None) -> bytes:
    sink = io.BytesIO()
    archive = ArchiveWriter(sink)
    archive.add("gateway.json", b"{}")
    if disk is not None:
        with disk.open("rb") as file:
            archive.add_disk("machines/ce/scratch.disk", file)
    archive.finish()
    return sink.getvalue()


def read(data: bytes) -> dict[str, bytes]:
    return {content.name: content.read_small() for content in read_archive(io.BytesIO(data))}


def packed(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w") as tar:
        for info, data in members:
            info.size = len(data) if info.isreg() else 0
            tar.addfile(info, io.BytesIO(data))
    return zstandard.compress(plain.getvalue())


def test_a_disk_comes_back_with_its_holes(tmp_path: Path) -> None:
    disk = sparse(tmp_path / "disk")
    data = written(disk)
    assert len(data) < 100_000
    extents = None
    for content in read_archive(io.BytesIO(data)):
        if content.name.endswith(".map"):
            extents = parse_extents(content)
        elif content.name.endswith(".data"):
            assert extents is not None
            write_disk(content, extents, tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == disk.read_bytes()
    assert (tmp_path / "copy").stat().st_blocks * 512 < 1024 * 1024


def test_any_tar_reads_it(tmp_path: Path) -> None:
    plain = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(written(sparse(tmp_path / "disk"))))
    with tarfile.open(fileobj=plain, mode="r|") as tar:
        names = [entry.name for entry in tar]
    assert names == [
        "gateway.json",
        "machines/ce/scratch.disk.map",
        "machines/ce/scratch.disk.data",
        "manifest.json",
    ]


def test_every_cut_is_noticed(tmp_path: Path) -> None:
    data = written(sparse(tmp_path / "disk"))
    for length in range(0, len(data), max(1, len(data) // 50)):
        with pytest.raises(InvalidRequest):
            read(data[:length])


def test_a_changed_file_is_noticed() -> None:
    plain = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(written())).read()
    changed = plain.replace(b"{}\0", b"[]\0", 1)
    assert changed != plain
    with pytest.raises(DigestMismatch, match=r"gateway\.json does not match its digest"):
        read(zstandard.compress(changed))


def special(name: str, kind: bytes, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


@pytest.mark.parametrize(
    "member",
    [
        special("x", tarfile.SYMTYPE, "/etc/passwd"),
        special("x", tarfile.LNKTYPE, "gateway.json"),
        special("x", tarfile.DIRTYPE),
        special("x", tarfile.CHRTYPE),
        special("x", tarfile.GNUTYPE_SPARSE),
        tarfile.TarInfo("../x"),
        tarfile.TarInfo("/etc/passwd"),
        tarfile.TarInfo("a//b"),
        tarfile.TarInfo("n" * 200),  # in an extra header, which is not read
    ],
    ids=lambda info: f"{info.name[:12]} {info.type!r}",
)
def test_what_is_no_plain_file_of_a_plain_name_is_refused(member: tarfile.TarInfo) -> None:
    with pytest.raises(InvalidRequest):
        read(packed((member, b"data")))


def test_nonsense_is_refused_and_a_name_comes_once() -> None:
    for data in (b"", b"nonsense", zstandard.compress(b"x" * 5000), bytes(512)):
        with pytest.raises(InvalidRequest):
            read(data)
    member = (tarfile.TarInfo("gateway.json"), b"{}")
    with pytest.raises(InvalidRequest, match="twice"):
        read(packed(member, member))


@pytest.mark.parametrize(
    ("size", "extents"),
    [
        (10, [[0, 11]]),
        (10, [[5, 2], [6, 1]]),
        (10, [[5, 0]]),
        (10, [[-5, 3]]),
        (1 << 60, []),
        (-1, []),
        ("x", []),
    ],
)
def test_maps_of_no_disk_are_refused(size: object, extents: object) -> None:
    data = json.dumps({"size": size, "extents": extents}).encode()
    with pytest.raises(InvalidRequest, match="not a map of a disk"):
        parse_extents(ArchiveFile("m", len(data), io.BytesIO(data)))


def test_data_that_the_map_does_not_know_is_refused(tmp_path: Path) -> None:
    extents = Extents(size=10, extents=((0, 3),))
    with pytest.raises(InvalidRequest, match="another size than its map"):
        write_disk(ArchiveFile("d", 4, io.BytesIO(b"data")), extents, tmp_path / "disk")


def test_extents_are_where_data_is(tmp_path: Path) -> None:
    with sparse(tmp_path / "disk").open("rb") as file:
        found = read_extents(file)
    assert found.size == SIZE
    assert 5004 <= found.data <= 65536
    with (tmp_path / "empty").open("w+b") as file:
        assert read_extents(file) == Extents(size=0, extents=())


@pytest.mark.parametrize("reflinks", [True, False])
def test_a_snapshot_stays_as_the_disk_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reflinks: bool
) -> None:
    if not reflinks:
        monkeypatch.setattr("vmjobs.gateway.archive.clone_file", lambda _source, _target: False)
    disk = sparse(tmp_path / "disk")
    before = disk.read_bytes()
    snapshot = take_snapshot(disk, 0)
    assert snapshot is not None
    disk.write_bytes(b"later")
    with snapshot:
        assert snapshot.read() == before
        assert os.fstat(snapshot.fileno()).st_blocks * 512 < 1024 * 1024
    assert list(tmp_path.iterdir()) == [disk], "it has no name"


def test_a_snapshot_leaves_room_for_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vmjobs.gateway.archive.clone_file", lambda _source, _target: False)
    disk = sparse(tmp_path / "disk")
    assert take_snapshot(disk, free_bytes(tmp_path) - 1000) is None


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "b"
    target.write_bytes(b"old")
    (tmp_path / ".b.part").write_bytes(b"of one that was killed")
    with pytest.raises(ZeroDivisionError), replace_file(target) as sink:
        sink.write(b"new")
        raise ZeroDivisionError
    assert target.read_bytes() == b"old"
    with replace_file(target) as sink:
        sink.write(b"new")
    assert target.read_bytes() == b"new"
    assert target.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["b"]
