"""Layers of container images: what they add, what they remove, and what is refused."""

from __future__ import annotations

import stat
import tarfile
from pathlib import Path

import pytest

from images.build.tree import FileTree
from images.manifest import sha256_digest
from images.oci.changeset import apply_layer
from images.oci.container import Descriptor
from images.oci.layers import UnpackBudget, unpack
from tests.kit.container_images import FromTar, Layer, Pack, gzipped, plain, zstded
from vmjobs.errors import DigestMismatch, ImageRejected


def applied(folder: Path, *layers: Layer | FromTar, budget: UnpackBudget | None = None) -> FileTree:
    tree = FileTree()
    for number, layer in enumerate(layers):
        archive = folder / f"{number}.tar"
        archive.write_bytes(layer.tar())
        apply_layer(tree, archive, budget or UnpackBudget())
    return tree


def text(tree: FileTree, path: str) -> str:
    return tree.file(path).read().decode()


def names(tree: FileTree) -> list[str]:
    return [path for path, _ in tree.walk() if path]


def test_owners_modes_times_and_links_are_kept(tmp_path: Path) -> None:
    layer = (
        Layer()
        .folder("./", 0o750, uid=7)
        .folder("bin")
        .file("bin/su", "su", 0o4755, uid=1000, gid=70_000)
        .link("bin/again", "bin/su")
        .symlink("bin/sh", "/bin/su")
        .folder("tmp", 0o1777)
        .add("fifo", tarfile.FIFOTYPE, mode=0o600)
        .add("null", tarfile.CHRTYPE, mode=0o666, devmajor=1, devminor=3)
    )
    tree = applied(tmp_path, layer)
    node = tree.nodes["bin/su"]
    assert (stat.filemode(node.mode), node.uid, node.gid) == ("-rwsr-xr-x", 1000, 70_000)
    assert node.mtime == 1_600_000_000
    assert tree.nodes["bin/again"] is node
    assert tree.nodes["bin/sh"].target == "/bin/su"
    assert tree.nodes["tmp"].mode == stat.S_IFDIR | 0o1777
    assert stat.S_ISFIFO(tree.nodes["fifo"].mode)
    assert tree.nodes["null"].device == (1, 3)
    assert (tree.nodes[""].mode, tree.nodes[""].uid) == (stat.S_IFDIR | 0o750, 7)


def test_later_layers_replace_and_whiteouts_take_away(tmp_path: Path) -> None:
    lower = (
        Layer().file("a", "old").file("d/x", "x").file("d/y", "y").file("e/deep/z", "z").file("f", "f")
    )
    upper = Layer().file("a", "new").without("d/x").without("e").file("g/n", "n").folder("d", 0o700)
    tree = applied(tmp_path, lower, upper)
    assert names(tree) == ["a", "d", "d/y", "f", "g", "g/n"]
    assert text(tree, "a") == "new"
    assert tree.nodes["d"].mode == stat.S_IFDIR | 0o700


def test_an_opaque_directory_hides_all_below_and_nothing_of_its_own_layer(tmp_path: Path) -> None:
    lower = Layer().file("d/x", "x").file("d/sub/y", "y").file("keep", "")
    upper = Layer().file("d/own", "own").opaque("d").file("d/sub/new", "new")
    tree = applied(tmp_path, lower, upper)
    assert names(tree) == ["d", "d/own", "d/sub", "d/sub/new", "keep"]


def test_a_whiteout_is_about_the_layers_below(tmp_path: Path) -> None:
    upper = Layer().file("a", "new").without("a").without("never-there")
    tree = applied(tmp_path, Layer().file("a", "old").file("aa", ""), upper)
    assert text(tree, "a") == "new"
    assert names(tree) == ["a", "aa"]


def test_what_aufs_left_is_no_file(tmp_path: Path) -> None:
    tree = applied(tmp_path, Layer().file(".wh..wh.plnk").file(".wh..wh.aufs").file("a"))
    assert names(tree) == ["a"]


@pytest.mark.parametrize("kind", ["file", "link"])
def test_a_directory_may_become_something_else(tmp_path: Path, kind: str) -> None:
    lower = Layer().file("d/x", "x").file("e", "e")
    upper = Layer().file("d", "file") if kind == "file" else Layer().symlink("d", "e")
    tree = applied(tmp_path, lower, upper, Layer().folder("e").file("e/new", "n"))
    assert names(tree) == ["d", "e", "e/new"]


def test_a_link_to_a_directory_is_followed_on_the_way(tmp_path: Path) -> None:
    lower = Layer().folder("usr").folder("usr/lib").symlink("lib", "usr/lib").file("usr/lib/old", "")
    upper = Layer().file("lib/new", "n").without("lib/old").link("hard", "lib/new")
    tree = applied(tmp_path, lower, upper)
    assert names(tree) == ["hard", "lib", "usr", "usr/lib", "usr/lib/new"]
    assert tree.nodes["hard"] is tree.nodes["usr/lib/new"]


def test_links_that_lead_up_and_out_stay_in_the_image(tmp_path: Path) -> None:
    lower = Layer().symlink("out", "../../../etc").symlink("abs", "/etc")
    tree = applied(tmp_path, lower, Layer().file("out/passwd", "root").file("abs/shadow", "x"))
    assert names(tree) == ["abs", "etc", "etc/passwd", "etc/shadow", "out"]


def test_a_hard_link_keeps_what_it_was_made_of(tmp_path: Path) -> None:
    lower = Layer().file("a", "one").link("b", "a")
    tree = applied(tmp_path, lower, Layer().file("a", "two"), Layer().without("a"))
    assert text(tree, "b") == "one"
    assert names(tree) == ["b"]


def test_capabilities_are_kept_and_labels_of_the_host_are_not(tmp_path: Path) -> None:
    capability = b"\x01\x00\x00\x02\x00 \x00\x00" + bytes(12)
    headers = {
        "SCHILY.xattr.security.capability": capability.decode("latin-1"),
        "SCHILY.xattr.security.selinux": "system_u",
        "SCHILY.xattr.user.note": "hello",
    }
    layer = Layer().file("ping", "x", 0o755, pax_headers=headers)
    assert applied(tmp_path, layer).nodes["ping"].xattrs == {
        "security.capability": capability,
        "user.note": b"hello",
    }


def test_long_and_odd_names(tmp_path: Path) -> None:
    long = "/".join(["d" * 200] * 10)
    tree = applied(tmp_path, Layer().file(long, "x").file("ünï\n", "y").link("short", long))
    assert text(tree, long) == "x"
    assert text(tree, "ünï\n") == "y"
    assert tree.nodes["short"] is tree.nodes[long]


def test_sparse_files(tmp_path: Path) -> None:
    headers = {
        "GNU.sparse.major": "1",
        "GNU.sparse.minor": "0",
        "GNU.sparse.name": "sparse",
        "GNU.sparse.realsize": "100000",
    }
    stored = b"2\n50000\n3\n100000\n0\n".ljust(512, b"\0") + b"abc"
    tree = applied(tmp_path, Layer().file("GNUSparseFile.0/sparse", stored, pax_headers=headers))
    content = tree.file("sparse").read()
    assert len(content) == 100_000
    assert content.strip(b"\0") == b"abc"
    assert content.index(b"a") == 50_000


def test_the_order_of_a_layer_does_not_depend_on_its_archive(tmp_path: Path) -> None:
    (one,) = applied(tmp_path, Layer().file("a", "1").file("b", "2")).layers
    (two,) = applied(tmp_path, Layer().file("b", "2").file("a", "1")).layers
    assert [node.content.size for node in one] == [node.content.size for node in two] == [1, 1]
    assert one[0].content.offset < one[1].content.offset
    assert two[0].content.offset > two[1].content.offset


def test_layers_remember_what_was_replaced(tmp_path: Path) -> None:
    tree = applied(tmp_path, Layer().file("a", "old").file("b", "b"), Layer().without("a"))
    assert [len(layer) for layer in tree.layers] == [2, 0]


@pytest.mark.parametrize(
    "layer",
    [
        Layer().file("../escape"),
        Layer().file("a/../../escape"),
        Layer().file("/etc/passwd"),
        Layer().folder(".."),
        Layer().without("../escape"),
        Layer().file("d/.wh.."),
        Layer().file("d/.wh..."),
        Layer().file("d/.wh."),
        Layer().link("a", "../../etc/passwd"),
        Layer().link("a", "missing"),
        Layer().folder("d").link("a", "d"),
        Layer().file("f").file("f/below"),
        Layer().file("x" * 256),
        Layer().file("./", "the root as a file"),
        Layer().symlink("./", "elsewhere"),
        Layer().symlink("a", "b").symlink("b", "a").file("a/x"),
        Layer().symlink("a", ""),
        Layer().file("a", uid=2**40),
        Layer().file("a", uid=-1),
        Layer().add("dev", tarfile.BLKTYPE, devmajor=70_000),
        Layer().add("odd", b"Z"),
        FromTar(b"not a tar archive at all" * 100),
        FromTar(Layer().file("a", b"x" * 5000).tar()[:2000]),
    ],
)
def test_hostile_layers_are_refused(tmp_path: Path, layer: Layer | FromTar) -> None:
    with pytest.raises(ImageRejected):
        applied(tmp_path, layer)


def test_an_empty_archive_is_an_empty_layer(tmp_path: Path) -> None:
    assert names(applied(tmp_path, FromTar(b""), FromTar(bytes(1024)))) == []


def test_a_header_that_would_fill_the_memory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ImageRejected, match="header"):
        applied(tmp_path, Layer().add("pax", tarfile.XHDTYPE, bytes(64 << 20)))


def test_a_sparse_bomb_is_counted_in_full(tmp_path: Path) -> None:
    headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": str(1 << 50)}
    stored = f"1\n{1 << 50}\n0\n".encode().ljust(512, b"\0")
    with pytest.raises(ImageRejected, match="too large"):
        applied(tmp_path, Layer().file("bomb", stored, pax_headers=headers))
    headers["GNU.sparse.realsize"] = "1"
    stored = b"99999999\n".ljust(512, b"\0")
    with pytest.raises(ImageRejected, match="invalid map"):
        applied(tmp_path, Layer().file("bomb", stored, pax_headers=headers))


def test_there_is_a_limit_on_files(tmp_path: Path) -> None:
    layer = Layer()
    for number in range(20):
        layer.file(f"d{number}/x")
    with pytest.raises(ImageRejected, match="too many files"):
        applied(tmp_path, layer, budget=UnpackBudget(entries=30))


def _unpack(folder: Path, data: bytes, pack: Pack, **spoilt: str) -> bytes:
    blob, target = folder / "blob", folder / "layer.tar"
    packed = pack(data)
    blob.write_bytes(packed)
    digest = spoilt.get("digest", sha256_digest(packed))
    layer = Descriptor.model_validate({"digest": digest, "size": len(packed)})
    unpack(blob, layer, spoilt.get("diff_id", sha256_digest(data)), target, UnpackBudget(size=10 << 20))
    return target.read_bytes()


@pytest.mark.parametrize("pack", [plain, gzipped, zstded])
def test_layers_are_unpacked_and_both_digests_checked(tmp_path: Path, pack: Pack) -> None:
    data = Layer().file("a", "text" * 1000).tar()
    assert _unpack(tmp_path, data, pack) == data
    for what in ("digest", "diff_id"):
        with pytest.raises(DigestMismatch):
            _unpack(tmp_path, data, pack, **{what: sha256_digest(b"something else")})


@pytest.mark.parametrize("pack", [gzipped, zstded])
def test_a_compressed_bomb_is_refused(tmp_path: Path, pack: Pack) -> None:
    with pytest.raises(ImageRejected, match="too large"):
        _unpack(tmp_path, bytes(64 << 20), pack)
    assert (tmp_path / "layer.tar").stat().st_size <= 11 << 20


@pytest.mark.parametrize("pack", [gzipped, zstded])
def test_a_stream_that_breaks_off_is_refused(tmp_path: Path, pack: Pack) -> None:
    data = Layer().file("a", bytes(range(256)) * 100).tar()
    with pytest.raises((ImageRejected, DigestMismatch)):
        _unpack(tmp_path, data, lambda d: pack(d)[:-20])


def test_a_layer_of_several_gzip_members(tmp_path: Path) -> None:
    data = Layer().file("a", "text" * 1000).tar()
    assert _unpack(tmp_path, data, lambda d: gzipped(d[:700]) + gzipped(d[700:])) == data
