"""Settings: one table, read once, handed in; nothing reads the environment anywhere else.

The fields of :class:`Config` are the table: name, type, default, help. The setting ``state_dir``
is the variable ``VMJOBS_STATE_DIR`` and the key ``state_dir`` in the configuration file (TOML,
``/etc/vmjobs/config.toml`` or what ``VMJOBS_CONFIG`` names). The environment wins over the file.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from vmjobs.agent_socket import DEFAULT_FILE, default_socket
from vmjobs.errors import ConfigError, Fault, reason_of
from vmjobs.model import HypervisorKind, faults_of
from vmjobs.storage import parse_storage_url

PREFIX = "VMJOBS_"
#: Names that have so much in common (difflib's ratio) are one and a misspelling of it.
_ALIKE: Final = 0.75


#: A name of a host (RFC 1123, section 2.1).
_HOST: Final = re.compile(r"(?!-)[A-Za-z0-9-]{1,63}(\.[A-Za-z0-9-]{1,63})*\.?")


def _home(kind: str, fallback: str) -> Path:
    return Path(os.environ.get(kind) or Path.home() / fallback) / "vmjobs"


def host_and_port(value: str) -> tuple[str, int]:
    """``HOST:PORT`` in its parts; an IPv6 address has brackets, which are left out.

    Raises:
        ValueError: it is not that.
    """
    host, colon, port = value.rpartition(":")
    if not (host and colon and port.isascii() and port.isdigit() and int(port) < 65536):
        raise ValueError("must be HOST:PORT")
    return host.removeprefix("[").removesuffix("]"), int(port)


class PoolSetting(NamedTuple):
    """What the setting ``pools`` says of a pool. user: whose the service's jobs are at the schedd."""

    collector: str
    schedd: str
    trust_domain: str
    user: str = "vmjobs"


class Config(BaseModel):
    """All settings of all roles. Each has a default that works on a laptop."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    # client
    api_url: str = Field("http://127.0.0.1:8080", description="base URL of the API")
    token_file: Path = Field(
        default_factory=lambda: _home("XDG_CONFIG_HOME", ".config") / "token",
        description="file with the bearer token",
    )

    # server
    data_dir: Path = Field(
        default_factory=lambda: _home("XDG_DATA_HOME", ".local/share"),
        description="blobs, streams, keys and the default database",
    )
    image_dir: Path | None = Field(
        None, description="images of this machine (vmjobs run, image build); unset: data_dir/images"
    )
    storage_url: str = Field(
        "",
        description="where blobs and images are kept: empty: data_dir/objects; a directory; or "
        "s3://BUCKET/PREFIX?endpoint=URL&region=NAME, with keys where boto3 looks for them",
    )
    image_quota: int = Field(
        0,
        ge=0,
        description="MiB of images, saved machines, and uploads not yet in use that an owner may "
        "keep; 0: no limit",
    )
    max_image_size: int = Field(
        1048576, ge=1, description="refuse images whose disk is larger than so many MiB"
    )
    max_input_size: int = Field(
        65536, ge=1, description="refuse input files that are larger than so many MiB"
    )
    max_open_uploads: int = Field(
        64, ge=1, description="uploads of images that an owner may have open at once"
    )
    upload_seconds: int = Field(
        86400,
        ge=60,
        description="an upload that nothing was added to for so long is given up; an input file that "
        "no job used for so long is removed",
    )
    checkpoint_seconds: int = Field(
        31 * 86400,
        ge=31 * 86400,
        description="what was saved of a job that HTCondor alone knows, and that did not begin for so "
        "long, is removed; longer than any job runs",
    )
    build_seconds: int = Field(
        7200, ge=1, description="a build by the service that is not done after so long has failed"
    )
    image_trust_dir: Path | None = Field(
        None, description="public keys (*.pub): only images signed by one of them are taken and booted"
    )
    database_url: str = Field("", description="SQLAlchemy URL; empty: SQLite in data_dir")
    broker_url: str = Field("", description="Celery broker URL; empty: files in data_dir")
    broker_ca: Path | None = Field(
        None,
        description="certificates (PEM) by which an amqps:// broker is known; unset: the system's",
    )
    listen: str = Field("127.0.0.1:8080", description="address and port of the API")
    api_workers: int = Field(2, ge=1, le=64, description="processes that serve the API")
    issuer: str = Field("http://127.0.0.1:8080", description="`iss` of the tokens we issue")
    max_cpus: int = Field(64, ge=1, description="refuse jobs that ask for more processors")
    max_memory: int = Field(262144, ge=32, description="refuse jobs that ask for more MiB of memory")
    max_disk: int = Field(1048576, ge=1, description="refuse jobs that ask for more MiB of disk")
    max_run_seconds: int = Field(30 * 86400, ge=1, description="refuse jobs that ask for more time")
    max_stream_bytes: int = Field(64 * 1024 * 1024, ge=1, description="kept of a log or console")

    # HTCondor, submit side
    schedd_name: str = Field("", description="schedd to submit to; empty: the local one")
    schedd_pool: str = Field("", description="collector that knows the schedd; empty: local")
    spool_dir: Path = Field(
        Path("/var/lib/vmjobs/spool"),
        description="job directories and event logs, shared with the schedd's host",
    )
    routes: dict[str, str] = Field(
        default_factory=dict,
        description="route name to grid_resource, e.g. site='condor site.grid site.grid'; '' is local",
    )
    default_route: str = Field("local", description="route of jobs that name none")
    accounting_group: str = Field("", description="accounting group of jobs that name none")

    # virtual clusters
    pools: dict[str, str] = Field(
        default_factory=dict,
        description="pools that clusters may join, the first by default: name to 'COLLECTOR SCHEDD "
        "TRUST_DOMAIN [USER]', e.g. site='site.grid site.grid grid'; probe jobs go to the schedd, and "
        "are USER's there (vmjobs)",
    )
    pool_key_dir: Path | None = Field(
        None, description="a signing key of HTCondor's for each pool, in a file of the pool's name"
    )
    pool_token_seconds: int = Field(
        600, ge=60, le=86400, description="life of the IDTOKEN of a cluster's machine; it is renewed"
    )

    node_lease_seconds: int = Field(
        300, ge=30, description="a node that is out of reach for longer loses its jobs to others"
    )

    # execute node
    state_dir: Path = Field(
        default_factory=lambda: _home("XDG_STATE_HOME", ".local/state"),
        description="the agent's journal, run directories and image cache",
    )
    socket: Path = Field(
        default_factory=lambda: Path(default_socket()),
        description="the agent's Unix socket",
    )
    agent_token_file: Path | None = Field(
        None, description="file with the node's token; unset: the node is not announced to the API"
    )
    node_name: str = Field("", description="this node's name; empty: the host name")
    site: str = Field("", description="the pool that this node belongs to, for `image prefetch --site`")
    image_cache_size: int = Field(
        0, ge=0, description="MiB of images to keep on this node; 0: all that fits"
    )
    image_cache_free: int = Field(
        1024, ge=0, description="MiB of disk that the image cache leaves free for jobs"
    )
    lazy_start: bool = Field(
        False, description="start kvm and qemu machines before their image is complete; needs nbdkit"
    )
    node_cpus: int = Field(0, ge=0, description="processors to offer; 0: all that there are")
    node_memory: int = Field(0, ge=0, description="MiB of memory to offer; 0: all that there is")
    condor_user: str = Field(
        "condor", description="whose processes HTCondor's starters are, beside root"
    )
    job_users: tuple[str, ...] = Field(
        (),
        description="accounts as which jobs run here, the service's and people's own; while one is "
        "missing the node offers nothing; empty: not checked",
    )
    uml_system_calls: Literal["auto", "ptrace", "seccomp"] = Field(
        "auto",
        description="how uml machines catch system calls: ptrace; seccomp, faster, but users of "
        "its guest can become root; auto: seccomp for jobs, ptrace for machines of clusters",
    )
    network_allow: tuple[str, ...] = Field(
        (),
        description="addresses, networks and hosts that guests may reach in network mode outbound "
        "though they are not public, or this node's own",
    )
    network_deny: tuple[str, ...] = Field(
        (),
        description="addresses, networks and hosts that guests may not reach, whatever else is said",
    )
    cluster_cpus: int = Field(0, ge=0, description="processors for machines of virtual clusters")
    cluster_memory: int = Field(
        0, ge=0, description="MiB of memory for machines of virtual clusters; 0: none come here"
    )
    cluster_disk: int = Field(
        0,
        ge=0,
        description="MiB of disk for machines of virtual clusters; 0: half of what others leave",
    )
    hypervisors: tuple[HypervisorKind, ...] = Field(
        tuple(HypervisorKind), description="hypervisors to try, best first"
    )
    isolation: Literal["required", "preferred"] = Field(
        "required",
        description="of machines from the node; preferred: where that does not work those without a "
        "network run all the same, with all rights of the agent",
    )
    probe_seconds: float = Field(30.0, gt=0, description="deadline for a probe's boot")
    max_console_bytes: int = Field(
        64 * 1024 * 1024, ge=1024, description="a console longer than this ends the job"
    )

    metrics_listen: str = Field(
        "", description="address and port of the agent's /metrics for Prometheus; empty: nowhere"
    )

    # all that run on
    log_level: str = Field("INFO", description="DEBUG, INFO, WARNING or ERROR")
    log_format: Literal["text", "json"] = Field(
        "text", description="lines of the log: text for people, or JSON"
    )

    @field_validator("log_level")
    @classmethod
    def _known_level(cls, value: str) -> str:
        if value.upper() not in {"DEBUG", "INFO", "WARNING", "ERROR"}:
            raise ValueError("must be DEBUG, INFO, WARNING or ERROR")
        return value.upper()

    @field_validator("api_url")
    @classmethod
    def _web_address(cls, value: str) -> str:
        try:
            address = urlsplit(value)
            good = address.scheme in {"http", "https"} and address.hostname and address.port != 0
        except ValueError:  # brackets without an address in them, or a port beyond 65535
            good = False
        if not good:
            raise ValueError(f"must be http://HOST:PORT or https://HOST, not {value!r}")
        return value

    @field_validator("listen")
    @classmethod
    def _host_and_port(cls, value: str) -> str:
        host_and_port(value)
        return value

    @field_validator("metrics_listen")
    @classmethod
    def _nowhere_or_host_and_port(cls, value: str) -> str:
        if value:
            host_and_port(value)
        return value

    @field_validator("storage_url")
    @classmethod
    def _usable_storage(cls, value: str) -> str:
        parse_storage_url(value)
        return value

    @field_validator("network_allow", "network_deny")
    @classmethod
    def _addresses(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for word in value:
            try:
                IPv4Network(word, strict=False)
            except ValueError:
                if not _HOST.fullmatch(word) or word.replace(".", "").isdigit():
                    raise ValueError(
                        f"{word!r} is no IPv4 address, no network such as 192.0.2.0/24 and no host name"
                    ) from None
        return value

    @field_validator("pools")
    @classmethod
    def _complete_pools(cls, value: dict[str, str]) -> dict[str, str]:
        for name, words in value.items():
            if len(words.split()) not in {3, 4}:
                raise ValueError(
                    f"{name} must be 'COLLECTOR SCHEDD TRUST_DOMAIN [USER]', not {words!r}"
                )
        return value

    def pool(self, name: str) -> PoolSetting:
        """One of the pools.  Raises KeyError."""
        return PoolSetting(*self.pools[name].split())

    @field_validator("routes", "pools", mode="before")
    @classmethod
    def _table_from_text(cls, value: Any) -> Any:
        """In the environment a table is ``name=resource;name=resource``."""
        if not isinstance(value, str):
            return value
        pairs = [item.partition("=") for item in value.split(";") if item.strip()]
        return {name.strip(): resource.strip() for name, _, resource in pairs}

    @field_validator("hypervisors", "job_users", "network_allow", "network_deny", mode="before")
    @classmethod
    def _words_from_text(cls, value: Any) -> Any:
        return tuple(value.replace(",", " ").split()) if isinstance(value, str) else value

    @property
    def images(self) -> Path:
        """The image store in force."""
        return self.image_dir or self.data_dir / "images"

    @property
    def database(self) -> str:
        """The SQLAlchemy URL in force."""
        return self.database_url or f"sqlite:///{self.data_dir / 'vmjobs.db'}"


def load(
    environ: Mapping[str, str] | None = None,
    overrides: Mapping[str, Any] | None = None,
    *,
    files: Sequence[str] = (),
) -> Config:
    """Read file, environment and overrides, in rising order of precedence.

    files: settings whose files must be readable, where they are set.

    Raises:
        ConfigError: with one fault for every setting that is unknown, misspelt or has a bad value.
    """
    environ = os.environ if environ is None else environ
    named = environ.get(f"{PREFIX}CONFIG")
    file = Path(named or DEFAULT_FILE)
    values: dict[str, Any] = {
        **_from_file(file, required=named is not None),
        **_from_environment(environ),
        **(overrides or {}),
    }
    faults = _misspelt(environ)
    try:
        settings = Config.model_validate(values)
    except ValidationError as error:
        settings, faults = Config.model_validate({}), faults + faults_of(error)
    for name in files:
        if (path := values.get(name)) and not os.access(str(path), os.R_OK):
            faults.append(Fault(name, "unreadable", f"cannot read the file {path}"))
    if faults:
        listing = "; ".join(f"{f.field}: {f.message}" for f in faults)
        raise ConfigError(
            f"bad settings: {listing}", hint=f"look in {file} and at {PREFIX}* variables", faults=faults
        )
    return settings


def _from_environment(environ: Mapping[str, str]) -> dict[str, str]:
    known = set(Config.model_fields)
    names = {k: k.removeprefix(PREFIX).lower() for k in environ if k.startswith(PREFIX)}
    return {name: environ[key] for key, name in names.items() if name in known}


def _misspelt(environ: Mapping[str, str]) -> list[Fault]:
    """Variables that are no settings, and look like one; others are those of jobs and deployments."""
    found = []
    for variable in filter(lambda name: name.startswith(PREFIX), environ):
        name = variable.removeprefix(PREFIX).lower()
        meant = get_close_matches(name, Config.model_fields, n=1, cutoff=_ALIKE)
        if meant and name not in Config.model_fields:
            what = f"there is no such setting; {PREFIX}{meant[0].upper()} is one"
            found.append(Fault(variable, "unknown_setting", what))
    return found


def _from_file(path: Path, *, required: bool) -> dict[str, Any]:
    try:
        if not required and not path.exists():
            return {}
        return tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        message = f"cannot read {path}: {reason_of(error)}"
        hint = f"mend it, or name another file with {PREFIX}CONFIG"
        raise ConfigError(message, hint=hint, faults=[Fault("", "unreadable", message)]) from error
