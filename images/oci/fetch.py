"""Fetch container images with skopeo, into a private directory.

A user's credentials are never on a command line: they are in an authentication file that only this
user can read, and that is removed after the import.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from images.manifest import sha256_digest
from images.oci.container import (
    ARCHITECTURE,
    MAX_DOCUMENT,
    ContainerImage,
    digest_checked,
    index_digests,
    is_index,
    read_configuration,
    read_manifest,
)
from images.oci.reference import ContainerReference, ContainerTransport
from vmjobs.errors import (
    BuildError,
    DigestMismatch,
    ImageRejected,
    InvalidRequest,
    NotFound,
    StorageFull,
    Unauthenticated,
    Unavailable,
    VMJobsError,
)
from vmjobs.subprocess import ProgramResult, run

_ASK_SECONDS: Final = 120.0
_COPY_SECONDS: Final = 4 * 3600.0
_KEPT_VARIABLES: Final = re.compile(
    r"(SSL_CERT_(FILE|DIR)|(https?|no)_proxy|(HTTPS?|NO)_PROXY|REGISTRY_AUTH_FILE)"
)
_POLICIES: Final = (Path("~/.config/containers/policy.json"), Path("/etc/containers/policy.json"))
_MESSAGE: Final = re.compile(r'level=fatal msg="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class RegistryAccess:
    """Access to a registry. insecure: by HTTP, or HTTPS with any certificate.

    authfile: as ``skopeo login`` or ``docker login`` writes it. password: for ``username``.
    """

    authfile: Path | None = None
    username: str = ""
    password: str = ""
    insecure: bool = False


class ContainerFetcher:
    """Fetches one container image into ``folder``, a directory that no other user can read."""

    def __init__(self, reference: ContainerReference, access: RegistryAccess, folder: Path) -> None:
        if shutil.which("skopeo") is None:
            raise BuildError(
                "skopeo is not installed, and container images cannot be fetched without it"
            )
        self._reference = reference
        self._folder = folder
        self._common = _policy()
        self._options = []
        if access.insecure and reference.transport is ContainerTransport.REGISTRY:
            self._options.append("--tls-verify=false")
        authfile = self._authfile(access)
        if authfile is not None:
            self._options += ["--authfile", str(authfile)]
        self._raw = b""

    def resolve(self) -> str:
        """Resolve the reference to a digest: of an image, or of an index of images.

        Raises:
            NotFound: there is no such image. Unauthenticated: this user has no access, or needs
            credentials. Unavailable: the registry does not answer.
        """
        command = ["skopeo", *self._common, "inspect", "--raw", *self._options, self._source()]
        self._raw = self._run(command, _ASK_SECONDS).stdout
        if len(self._raw) > MAX_DOCUMENT:
            raise ImageRejected(f"the manifest of {self._reference.text} has {len(self._raw)} bytes")
        if self._reference.digest:
            digest_checked(self._raw, self._reference.digest, f"the manifest of {self._reference.text}")
        return sha256_digest(self._raw)

    def copy(self) -> ContainerImage:
        """Fetch the whole image that :meth:`resolve` found, and check its documents.

        Raises:
            as :meth:`resolve`; also ImageRejected: it is for another architecture or has faults.
            DigestMismatch: the fetched image has another digest.
        """
        target = self._folder / "image"
        options = [option.replace("--tls-verify", "--src-tls-verify") for option in self._options]
        command = ["skopeo", *self._common, "--override-os", "linux", "--override-arch", ARCHITECTURE]
        command += ["copy", "--quiet", "--retry-times", "2", *options]
        command += [self._source(sha256_digest(self._raw)), f"dir:{target}"]
        self._run(command, _COPY_SECONDS)
        data = _read(target / "manifest.json")
        digest = sha256_digest(data)
        asked = sha256_digest(self._raw)
        listed = index_digests(self._raw) if is_index(self._raw) else {asked}
        # An archive has no manifest: skopeo makes one, always the same.
        if digest not in listed and self._reference.transport is not ContainerTransport.ARCHIVE:
            raise DigestMismatch(f"{self._reference.text} is {asked}, but {digest} arrived")
        manifest = read_manifest(data)
        what = f"the configuration of {self._reference.text}"
        text = digest_checked(_read(self.blob(manifest.config.digest)), manifest.config.digest, what)
        configuration = read_configuration(text, manifest)
        return ContainerImage(digest, manifest.layers, configuration)

    def blob(self, digest: str) -> Path:
        """Path of a blob of the copied image."""
        return self._folder / "image" / digest.removeprefix("sha256:")

    def _source(self, digest: str = "") -> str:
        """The reference in skopeo's syntax; pinned to a digest if that is known."""
        reference = self._reference
        if reference.transport is ContainerTransport.REGISTRY:
            pinned = reference.digest or digest
            end = f"@{pinned}" if pinned else f":{reference.tag}"
            return f"docker://{reference.name}{end}"
        # skopeo ends a path at its first colon; the path of this link has none.
        link = self._folder / "source"
        if not link.is_symlink():
            link.symlink_to(reference.path.absolute())
        kind = "oci" if reference.transport is ContainerTransport.LAYOUT else "docker-archive"
        return f"{kind}:{link}" + (f":{reference.tag}" if reference.tag else "")

    def _authfile(self, access: RegistryAccess) -> Path | None:
        if not access.username:
            return access.authfile
        if ":" in access.username or not access.password:
            raise InvalidRequest("a user name for a registry has no ':', and needs a password")
        path = self._folder / "auth.json"
        secret = base64.b64encode(f"{access.username}:{access.password}".encode()).decode()
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump({"auths": {self._reference.registry: {"auth": secret}}}, file)
        return path

    def _run(self, command: list[str], timeout: float) -> ProgramResult:
        env = {name: value for name, value in os.environ.items() if _KEPT_VARIABLES.fullmatch(name)}
        env["TMPDIR"] = str(self._folder)
        try:
            done = run(command, timeout=timeout, env=env, check=False, error=BuildError)
        except BuildError as error:
            raise Unavailable("registry", f"cannot fetch {self._reference.text}: {error}") from error
        if done.returncode != 0:
            raise _failure(self._reference, done.stderr.decode("utf-8", "replace"))
        return done


def _policy() -> list[str]:
    """Options for the site's signature policy; without a policy, signatures are not checked."""
    there = any(path.expanduser().exists() for path in _POLICIES)
    return [] if there else ["--insecure-policy"]


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(MAX_DOCUMENT + 1)
    except OSError as error:
        raise ImageRejected(f"the container image has no {path.name}: {error.strerror}") from error


#: Patterns of skopeo's messages, and the errors for them.
_ERROR_PATTERNS: Final[tuple[tuple[str, type[VMJobsError]], ...]] = (
    (r"permission denied", InvalidRequest),
    (r"unauthorized|authentication required|denied|forbidden", Unauthenticated),
    (r"manifest unknown|name unknown|not known to registry|no descriptor found|\b404\b", NotFound),
    (r"no such file or directory|no image found in (image index|manifest list)", NotFound),
    (r"no image found in .*archive|not a directory", NotFound),
    (r"invalid digest|digest.*(mismatch|did not match)|does not match", DigestMismatch),
    (r"connection refused|no such host|timeout|timed out|dial tcp|x509|EOF|HTTPS client", Unavailable),
    (r"no space left", StorageFull),
)


def _failure(reference: ContainerReference, words: str) -> VMJobsError:
    found = _MESSAGE.findall(words)
    said = (found[-1].replace('\\"', '"') if found else words.strip())[-600:]
    text = f"cannot fetch {reference.text}: {said}"
    # Remove the image's name or path, so that no pattern matches them.
    plain = (
        said.replace(reference.name, "") if reference.name else said.replace(str(reference.path), "")
    )
    kinds = (kind for pattern, kind in _ERROR_PATTERNS if re.search(pattern, plain, re.IGNORECASE))
    kind = next(kinds, ImageRejected)
    if issubclass(kind, Unavailable):
        hint = "a registry without HTTPS needs --insecure" if "HTTP" in said or "x509" in said else ""
        return Unavailable("registry", text, hint=hint)
    hint = "--username NAME --password-stdin, or --authfile FILE" if kind is Unauthenticated else ""
    return kind(text, hint=hint)
