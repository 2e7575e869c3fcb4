"""Settings: one table, read once and passed on; only this module reads the environment.

The fields of :class:`Config` are the table: name, type, default, help. The setting ``state_dir``
is the variable ``VMJOBS_STATE_DIR`` and the key ``state_dir`` in the configuration file (TOML,
``/etc/vmjobs/config.toml`` or the file that ``VMJOBS_CONFIG`` names). The environment overrides the
file.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from ipaddress import IPv4Network
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple
from urllib.parse import urlsplit

from pydantic import Field, StringConstraints, ValidationError, ValidationInfo, field_validator

from vmjobs.agent_socket import DEFAULT_FILE, default_socket
from vmjobs.errors import ConfigError, Fault, reason_of
from vmjobs.model import FrozenModel, HypervisorKind, faults_of
from vmjobs.storage_url import parse_storage_url

PREFIX = "VMJOBS_"
#: A name that is this similar to a setting's (difflib's ratio) is a misspelling of it.
_MISSPELT_RATIO: Final = 0.75

#: A processor feature, as libvirt's cpu_map names it.
_FeatureName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9_.-]*$")]
#: A host name (RFC 1123, section 2.1).
_HOST_NAME: Final = re.compile(r"(?!-)[A-Za-z0-9-]{1,63}(\.[A-Za-z0-9-]{1,63})*\.?")


def _home(kind: str, fallback: str) -> Path:
    return Path(os.environ.get(kind) or Path.home() / fallback) / "vmjobs"


def host_and_port(value: str) -> tuple[str, int]:
    """Split ``HOST:PORT``; the brackets around an IPv6 address are removed.

    Raises:
        ValueError: ``value`` has another form.
    """
    host, colon, port = value.rpartition(":")
    if not (host and colon and port.isascii() and port.isdigit() and int(port) < 65536):
        raise ValueError("must be HOST:PORT")
    return host.removeprefix("[").removesuffix("]"), int(port)


class PoolSetting(NamedTuple):
    """A pool of the setting ``pools``. user: owner of the service's jobs at the schedd."""

    collector: str
    schedd: str
    trust_domain: str
    user: str = "vmjobs"


class Config(FrozenModel):
    """All settings of all roles. Every default works on a laptop."""

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
        None, description="images of this host (vmjobs run, image build); unset: data_dir/images"
    )
    storage_url: str = Field(
        "",
        description="where blobs and images are stored: empty: data_dir/objects; a directory; or "
        "s3://BUCKET/PREFIX?endpoint=URL&region=NAME, with keys where boto3 looks for them",
    )
    image_quota: int = Field(
        0,
        ge=0,
        description="MiB of images, checkpoints, and uploads not yet in use that an owner may "
        "store; 0: no limit",
    )
    max_image_size: int = Field(
        1048576, ge=1, description="refuse images with a disk larger than this many MiB"
    )
    max_input_size: int = Field(65536, ge=1, description="refuse input files larger than this many MiB")
    max_open_uploads: int = Field(
        64, ge=1, description="image uploads that an owner may have open at once"
    )
    upload_seconds: int = Field(
        86400,
        ge=60,
        description="remove uploads to which no data was added for this long, and input files that "
        "no job used for this long",
    )
    checkpoint_seconds: int = Field(
        31 * 86400,
        ge=31 * 86400,
        description="remove checkpoints of transparent jobs that did not start for this long; longer "
        "than any job runs",
    )
    build_seconds: int = Field(7200, ge=1, description="time limit for builds by the service")
    image_trust_dir: Path | None = Field(
        None,
        description="public keys (*.pub): only images signed by one of them are accepted and booted",
    )
    database_url: str = Field("", description="SQLAlchemy URL; empty: SQLite in data_dir")
    broker_url: str = Field("", description="Celery broker URL; empty: files in data_dir")
    broker_ca: Path | None = Field(
        None,
        description="CA certificates (PEM) that verify an amqps:// broker; unset: the system's",
    )
    listen: str = Field("127.0.0.1:8080", description="address and port of the API")
    api_workers: int = Field(2, ge=1, le=64, description="processes that serve the API")
    issuer: str = Field("http://127.0.0.1:8080", description="`iss` of the tokens we issue")
    max_cpus: int = Field(64, ge=1, description="refuse jobs that request more processors")
    max_memory: int = Field(262144, ge=32, description="refuse jobs that request more MiB of memory")
    max_disk: int = Field(1048576, ge=1, description="refuse jobs that request more MiB of disk")
    max_run_seconds: int = Field(30 * 86400, ge=1, description="refuse jobs that request more time")
    max_stream_bytes: int = Field(64 * 1024 * 1024, ge=1, description="stored of a log or console")

    # HTCondor, submit side
    schedd_name: str = Field("", description="schedd to submit to; empty: the local one")
    schedd_pool: str = Field("", description="collector that lists the schedd; empty: local")
    spool_dir: Path = Field(
        Path("/var/lib/vmjobs/spool"),
        description="job directories and event logs, shared with the schedd's host",
    )
    routes: dict[str, str] = Field(
        default_factory=dict,
        description="route name to grid_resource, e.g. site='condor site.grid site.grid'; '' is local",
    )
    default_route: str = Field("local", description="route of jobs that specify none")
    accounting_group: str = Field("", description="accounting group of jobs that specify none")

    # virtual clusters
    pools: dict[str, str] = Field(
        default_factory=dict,
        description="pools that clusters may join, the first by default: name to 'COLLECTOR SCHEDD "
        "TRUST_DOMAIN [USER]', e.g. site='site.grid site.grid grid'; USER (default: vmjobs) owns the "
        "probe jobs at the schedd",
    )
    pool_key_dir: Path | None = Field(
        None, description="directory with HTCondor's signing key of each pool, in a file of that name"
    )
    pool_token_seconds: int = Field(
        600, ge=60, le=86400, description="lifetime of the IDTOKEN of a cluster VM; it is renewed"
    )

    node_lease_seconds: int = Field(
        300, ge=30, description="jobs of a node that is unreachable for longer restart on other nodes"
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
        None, description="file with the node's token; unset: the node does not register with the API"
    )
    node_name: str = Field("", description="this node's name; empty: the host name")
    site: str = Field("", description="the pool of this node, for `image prefetch --site`")
    image_cache_size: int = Field(
        0, ge=0, description="MiB of images to cache on this node; 0: as many as fit"
    )
    image_cache_free: int = Field(
        1024, ge=0, description="MiB of disk that the image cache leaves free for jobs"
    )
    lazy_start: bool = Field(
        False, description="start kvm and qemu VMs before their image is complete; needs nbdkit"
    )
    node_cpus: int = Field(0, ge=0, description="processors to offer; 0: all of the node")
    node_memory: int = Field(0, ge=0, description="MiB of memory to offer; 0: all of the node")
    condor_user: str = Field(
        "condor", description="account, besides root, that HTCondor's starters run as"
    )
    job_users: tuple[str, ...] = Field(
        (),
        description="accounts that jobs run as on this node, the service's and users' own; while one "
        "is missing the node offers nothing; empty: not checked",
    )
    uml_system_calls: Literal["auto", "ptrace", "seccomp"] = Field(
        "auto",
        description="how uml VMs intercept system calls: ptrace; seccomp, faster, but users of the "
        "guest can become root in it; auto: seccomp for jobs, ptrace for cluster VMs",
    )
    kvm_hidden_features: tuple[_FeatureName, ...] = Field(
        (),
        description="processor features that guests of kvm do not see, by libvirt's names; where KVM "
        "itself runs in a VM, QEMU may fail to set up some, such as arch-capabilities",
    )
    network_allow: tuple[str, ...] = Field(
        (),
        description="addresses, networks and hosts that guests may reach in network mode outbound "
        "even if they are not public, or belong to this node",
    )
    network_deny: tuple[str, ...] = Field(
        (),
        description="addresses, networks and hosts that guests may not reach; overrides network_allow",
    )
    cluster_cpus: int = Field(0, ge=0, description="processors for cluster VMs")
    cluster_memory: int = Field(
        0, ge=0, description="MiB of memory for cluster VMs; 0: this node runs none"
    )
    cluster_disk: int = Field(
        0,
        ge=0,
        description="MiB of disk for cluster VMs; 0: half of the free disk",
    )
    hypervisors: tuple[HypervisorKind, ...] = Field(
        tuple(HypervisorKind), description="hypervisors to try, best first"
    )
    isolation: Literal["required", "preferred"] = Field(
        "required",
        description="isolation of VMs from the node; preferred: where isolation does not work, VMs "
        "without a network still run, with all rights of the agent",
    )
    probe_seconds: float = Field(30.0, gt=0, description="deadline for the boot of a probe VM")
    max_console_bytes: int = Field(
        64 * 1024 * 1024, ge=1024, description="stop jobs that write more than this to the console"
    )

    metrics_listen: str = Field(
        "", description="address and port of the agent's /metrics for Prometheus; empty: off"
    )

    # all daemons
    log_level: str = Field("INFO", description="DEBUG, INFO, WARNING or ERROR")
    log_format: Literal["text", "json"] = Field("text", description="format of log lines: text or JSON")

    @field_validator("log_level")
    @classmethod
    def _check_log_level(cls, value: str) -> str:
        if value.upper() not in {"DEBUG", "INFO", "WARNING", "ERROR"}:
            raise ValueError("must be DEBUG, INFO, WARNING or ERROR")
        return value.upper()

    @field_validator("api_url")
    @classmethod
    def _check_api_url(cls, value: str) -> str:
        try:
            address = urlsplit(value)
            good = address.scheme in {"http", "https"} and address.hostname and address.port != 0
        except ValueError:  # brackets without an address, or a port above 65535
            good = False
        if not good:
            raise ValueError(f"must be http://HOST:PORT or https://HOST, not {value!r}")
        return value

    @field_validator("listen", "metrics_listen")
    @classmethod
    def _check_listen(cls, value: str, info: ValidationInfo) -> str:
        if value or info.field_name == "listen":
            host_and_port(value)
        return value

    @field_validator("storage_url")
    @classmethod
    def _check_storage_url(cls, value: str) -> str:
        parse_storage_url(value)
        return value

    @field_validator("network_allow", "network_deny")
    @classmethod
    def _check_addresses(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for word in value:
            try:
                IPv4Network(word, strict=False)
            except ValueError:
                if not _HOST_NAME.fullmatch(word) or word.replace(".", "").isdigit():
                    raise ValueError(
                        f"{word!r} must be an IPv4 address, a network like 192.0.2.0/24 or a host name"
                    ) from None
        return value

    @field_validator("pools")
    @classmethod
    def _check_pools(cls, value: dict[str, str]) -> dict[str, str]:
        for name, words in value.items():
            if len(words.split()) not in {3, 4}:
                raise ValueError(
                    f"{name} must be 'COLLECTOR SCHEDD TRUST_DOMAIN [USER]', not {words!r}"
                )
        return value

    def pool(self, name: str) -> PoolSetting:
        """The setting of one pool.  Raises KeyError."""
        return PoolSetting(*self.pools[name].split())

    @field_validator("routes", "pools", mode="before")
    @classmethod
    def _parse_table(cls, value: Any) -> Any:
        """Parse a table from the environment: ``name=resource;name=resource``."""
        if not isinstance(value, str):
            return value
        pairs = [item.partition("=") for item in value.split(";") if item.strip()]
        return {name.strip(): resource.strip() for name, _, resource in pairs}

    @field_validator(
        "hypervisors",
        "job_users",
        "kvm_hidden_features",
        "network_allow",
        "network_deny",
        mode="before",
    )
    @classmethod
    def _parse_words(cls, value: Any) -> Any:
        return tuple(value.replace(",", " ").split()) if isinstance(value, str) else value

    @property
    def images(self) -> Path:
        """The image store in use."""
        return self.image_dir or self.data_dir / "images"

    @property
    def database(self) -> str:
        """The SQLAlchemy URL in use."""
        return self.database_url or f"sqlite:///{self.data_dir / 'vmjobs.db'}"


def load(environ: Mapping[str, str] | None = None, *, files: Sequence[str] = ()) -> Config:
    """Read the file and the environment, which takes precedence.

    files: names of settings; if one is set, its file must be readable.

    Raises:
        ConfigError: with one fault for every setting that is unknown, misspelt or invalid.
    """
    environ = os.environ if environ is None else environ
    named = environ.get(f"{PREFIX}CONFIG")
    file = Path(named or DEFAULT_FILE)
    values = {**_from_file(file, required=named is not None), **_from_environment(environ)}
    faults = _misspelt_variables(environ)
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
            f"bad settings: {listing}", hint=f"check {file} and {PREFIX}* variables", faults=faults
        )
    return settings


def _from_environment(environ: Mapping[str, str]) -> dict[str, str]:
    known = set(Config.model_fields)
    names = {k: k.removeprefix(PREFIX).lower() for k in environ if k.startswith(PREFIX)}
    return {name: environ[key] for key, name in names.items() if name in known}


def _misspelt_variables(environ: Mapping[str, str]) -> list[Fault]:
    """Report variables that look like a misspelt setting.

    Other unknown variables belong to jobs or deployments.
    """
    found = []
    for variable in filter(lambda name: name.startswith(PREFIX), environ):
        name = variable.removeprefix(PREFIX).lower()
        meant = get_close_matches(name, Config.model_fields, n=1, cutoff=_MISSPELT_RATIO)
        if meant and name not in Config.model_fields:
            what = f"unknown setting; did you mean {PREFIX}{meant[0].upper()}?"
            found.append(Fault(variable, "unknown_setting", what))
    return found


def _from_file(path: Path, *, required: bool) -> dict[str, Any]:
    try:
        if not required and not path.exists():
            return {}
        return tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        message = f"cannot read {path}: {reason_of(error)}"
        hint = f"correct it, or name another file with {PREFIX}CONFIG"
        raise ConfigError(message, hint=hint, faults=[Fault("", "unreadable", message)]) from error
