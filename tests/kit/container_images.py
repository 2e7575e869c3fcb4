"""Container images made by hand, and a registry to store them in."""

from __future__ import annotations

import gzip
import hashlib
import http.client
import io
import json
import subprocess
import tarfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zstandard

from tests.kit.sockets import free_port
from tests.kit.waiting import wait_until

Pack = Callable[[bytes], bytes]


def plain(data: bytes) -> bytes:
    """An uncompressed layer."""
    return data


def gzipped(data: bytes) -> bytes:
    """A layer as engines write it."""
    return gzip.compress(data, 1, mtime=0)


def zstded(data: bytes) -> bytes:
    """A layer as newer engines write it."""
    return zstandard.compress(data, 3)


_TYPES: dict[Callable[[bytes], bytes], str] = {plain: "", gzipped: "+gzip", zstded: "+zstd"}


@dataclass
class Layer:
    pack: Pack = gzipped
    members: list[tuple[tarfile.TarInfo, bytes]] = field(default_factory=list)

    def add(self, name: str, kind: bytes, data: bytes = b"", **fields: Any) -> Layer:
        """Add any entry; ``fields`` are those of ``TarInfo``."""
        info = tarfile.TarInfo(name)
        info.type, info.size, info.mtime = kind, len(data), 1_600_000_000
        for key, value in fields.items():
            setattr(info, key, value)
        self.members.append((info, data))
        return self

    def file(self, name: str, data: bytes | str = b"", mode: int = 0o644, **fields: Any) -> Layer:
        content = data.encode() if isinstance(data, str) else data
        return self.add(name, tarfile.REGTYPE, content, mode=mode, **fields)

    def folder(self, name: str, mode: int = 0o755, **fields: Any) -> Layer:
        return self.add(name, tarfile.DIRTYPE, mode=mode, **fields)

    def symlink(self, name: str, target: str) -> Layer:
        return self.add(name, tarfile.SYMTYPE, linkname=target, mode=0o777)

    def link(self, name: str, target: str) -> Layer:
        """Add a hard link."""
        return self.add(name, tarfile.LNKTYPE, linkname=target)

    def without(self, name: str) -> Layer:
        """Add a whiteout."""
        folder, slash, last = name.rpartition("/")
        return self.file(f"{folder}{slash}.wh.{last}")

    def opaque(self, folder: str) -> Layer:
        """Hide the contents of this directory in the layers below."""
        return self.file(f"{folder}/.wh..wh..opq")

    def tar(self) -> bytes:
        """The layer's archive."""
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
            for info, data in self.members:
                archive.addfile(info, io.BytesIO(data))
        return buffer.getvalue()


@dataclass(frozen=True)
class FromTar:
    """A layer that exists as an archive."""

    data: bytes
    pack: Pack = gzipped

    def tar(self) -> bytes:
        """The layer's archive."""
        return self.data


def write_layout(
    folder: Path,
    layers: Sequence[Layer | FromTar],
    config: dict[str, Any] | None = None,
    *,
    tag: str = "latest",
    architecture: str = "amd64",
) -> str:
    """Write an OCI layout with one image; returns the digest of its manifest."""
    blobs = folder / "blobs" / "sha256"
    blobs.mkdir(parents=True, exist_ok=True)

    def put(data: bytes, kind: str) -> dict[str, Any]:
        digest = hashlib.sha256(data).hexdigest()
        (blobs / digest).write_bytes(data)
        return {"mediaType": kind, "digest": f"sha256:{digest}", "size": len(data)}

    archives = [layer.tar() for layer in layers]
    configuration = {
        "architecture": architecture,
        "os": "linux",
        "config": config or {},
        "rootfs": {
            "type": "layers",
            "diff_ids": [f"sha256:{hashlib.sha256(data).hexdigest()}" for data in archives],
        },
    }
    manifest: dict[str, Any] = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "layers": [
            put(layer.pack(data), f"application/vnd.oci.image.layer.v1.tar{_TYPES[layer.pack]}")
            for layer, data in zip(layers, archives, strict=True)
        ],
    }
    text = json.dumps(configuration).encode()
    manifest["config"] = put(text, "application/vnd.oci.image.config.v1+json")
    descriptor = put(json.dumps(manifest).encode(), manifest["mediaType"])
    descriptor["annotations"] = {"org.opencontainers.image.ref.name": tag}
    descriptor["platform"] = {"os": "linux", "architecture": architecture}
    index = folder / "index.json"
    listed = json.loads(index.read_text())["manifests"] if index.exists() else []
    kind = "application/vnd.oci.image.index.v1+json"
    everything = {"schemaVersion": 2, "mediaType": kind, "manifests": [*listed, descriptor]}
    index.write_text(json.dumps(everything))
    (folder / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    return str(descriptor["digest"])


# --------------------------------------------------------------------------- a registry

#: Credentials for the private repository, with a bcrypt hash: this registry accepts no other kind.
USER, PASSWORD = "reader", "correct horse"
_HASH = "$2y$05$abcdefghijklmnopqrstuuHNbAKRhpaujgo33bRWs.NLUTJO3lOy2"


@dataclass(frozen=True)
class Registry:
    """A registry that runs on this host. folder: where it keeps its blobs."""

    host: str
    folder: Path
    private: bool = False

    def push(self, layout: Path, name: str, tag: str = "latest") -> None:
        """Push an image from an OCI layout, with all its architectures."""
        self.copy(f"oci:{layout}:latest", name, tag)

    def copy(self, source: str, name: str, tag: str = "latest") -> None:
        """Copy an image into this registry."""
        command = ["skopeo", "--insecure-policy", "copy", "--quiet", "--dest-tls-verify=false"]
        command += ["--all", "--preserve-digests"]
        if self.private:
            command.append(f"--dest-creds={USER}:{PASSWORD}")
        subprocess.run(
            [*command, source, f"docker://{self.host}/{name}:{tag}"], check=True, timeout=120
        )

    def blob(self, digest: str) -> Path:
        hexadecimal = digest.removeprefix("sha256:")
        blobs = self.folder / "docker" / "registry" / "v2" / "blobs" / "sha256"
        return blobs / hexadecimal[:2] / hexadecimal / "data"


@contextmanager
def registry(folder: Path, *, private: bool = False) -> Iterator[Registry]:
    """Run Debian's registry on a free port; ``private``: with a password."""
    port, data = free_port(), folder / "data"
    config: dict[str, Any] = {
        "version": 0.1,
        "log": {"accesslog": {"disabled": True}, "level": "warn"},
        "storage": {"filesystem": {"rootdirectory": str(data)}},
        "http": {"addr": f"127.0.0.1:{port}"},
    }
    folder.mkdir(parents=True, exist_ok=True)
    if private:
        (folder / "users").write_text(f"{USER}:{_HASH}\n")
        config["auth"] = {"htpasswd": {"realm": "test", "path": str(folder / "users")}}
    file = folder / "config.yml"
    file.write_text(json.dumps(config))  # JSON is YAML
    command = ["docker-registry", "serve", str(file)]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        wait_until(lambda: _answers(port), 60, (folder / "log").read_text)
        yield Registry(f"127.0.0.1:{port}", data, private)
    finally:
        process.terminate()
        process.wait(30)


def _answers(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    with suppress(OSError), closing(connection):
        connection.request("GET", "/v2/")
        connection.getresponse().read()
        return True
    return False
