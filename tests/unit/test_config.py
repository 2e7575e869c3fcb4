"""Settings: precedence, where objects are stored, and all errors at once."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from vmjobs.config import host_and_port, load
from vmjobs.errors import ConfigError
from vmjobs.storage_url import S3Location, parse_storage_url


def test_the_environment_wins_over_the_file(path: Path) -> None:
    path.write_text('listen = "127.0.0.1:1"\napi_url = "http://file"\n')
    settings = load({"VMJOBS_CONFIG": str(path), "VMJOBS_API_URL": "http://environment"})
    assert (settings.listen, settings.api_url) == ("127.0.0.1:1", "http://environment")


def test_routes_can_be_given_in_one_variable() -> None:
    settings = load({"VMJOBS_ROUTES": "grid=condor s.x c.x:9618;local="})
    assert settings.routes == {"grid": "condor s.x c.x:9618", "local": ""}


def test_all_bad_settings_are_told_at_once(path: Path) -> None:
    path.write_text('listen = "nowhere"\nmetrics_listen = "9100"\nunknown_key = 1\n')
    with pytest.raises(ConfigError) as refused:
        load(
            {
                "VMJOBS_CONFIG": str(path),
                "VMJOBS_MAX_CPUS": "0",
                "VMJOBS_LOG_LEVEL": "LOUD",
                "VMJOBS_LOG_FORMAT": "xml",
                "VMJOBS_API_URL": "api.example.org",
                "VMJOBS_HYPERVISOR": "uml",
                "VMJOBS_ARRAY_INDEX": "3",
            }
        )
    bad = ("listen", "metrics_listen", "unknown_key", "max_cpus", "log_level", "log_format", "api_url")
    assert {f.field for f in refused.value.faults} == {*bad, "VMJOBS_HYPERVISOR"}
    assert "VMJOBS_HYPERVISOR: unknown setting; did you mean VMJOBS_HYPERVISORS?" in str(refused.value)


def test_a_file_that_a_service_needs_must_be_there(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("t")
    there = {"VMJOBS_AGENT_TOKEN_FILE": str(tmp_path / "token")}
    assert load(there, files=["agent_token_file"]).agent_token_file == tmp_path / "token"
    assert load({}, files=["agent_token_file"]).agent_token_file is None
    gone = {"VMJOBS_AGENT_TOKEN_FILE": "/none", "VMJOBS_LISTEN": "x"}
    with pytest.raises(ConfigError, match=r"listen: must be.*; agent_token_file: cannot read"):
        load(gone, files=["agent_token_file"])


@pytest.mark.parametrize("value", [":1", "a:", "a:65536", "a:-1", "a:x", "a:\u00b2", "a"])
def test_what_is_no_address_and_port(value: str) -> None:
    for name in ("LISTEN", "METRICS_LISTEN"):
        with pytest.raises(ConfigError, match="must be HOST:PORT"):
            load({f"VMJOBS_{name}": value})


@pytest.mark.parametrize("value", ["api.example", "ftp://a", "http://", "http://a:99999", "http://[a"])
def test_what_is_no_url_of_an_api(value: str) -> None:
    with pytest.raises(ConfigError, match="api_url: must be http://HOST:PORT"):
        load({"VMJOBS_API_URL": value})


def test_an_address_and_a_port() -> None:
    assert host_and_port("127.0.0.1:0") == ("127.0.0.1", 0)
    assert host_and_port("[::1]:9109") == ("::1", 9109)
    assert load({"VMJOBS_METRICS_LISTEN": "[::1]:9109"}).metrics_listen == "[::1]:9109"
    assert load({}).metrics_listen == ""


def test_a_file_that_is_broken_or_not_there_is_named(path: Path) -> None:
    path.write_text("= = =")
    for named in (str(path), "/none"):
        with pytest.raises(ConfigError, match=named):
            load({"VMJOBS_CONFIG": named})


def test_a_place_that_is_not_for_whoever_asks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(_path: Path) -> bool:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "exists", closed)
    with pytest.raises(
        ConfigError, match=r"^cannot read /etc/vmjobs/config\.toml: .*denied"
    ) as refused:
        load({})
    assert "VMJOBS_CONFIG" in refused.value.hint


def test_defaults_need_no_server() -> None:
    settings = load({})
    assert settings.database.startswith("sqlite:///")
    assert settings.broker_url == ""


SECRET = "hunter2"


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("", None),
        ("/srv/vmjobs", Path("/srv/vmjobs")),
        ("s3://bucket", S3Location("bucket")),
        ("s3://bucket/", S3Location("bucket")),
        ("s3://my.bucket/a/b-c/", S3Location("my.bucket", "a/b-c")),
        (
            "s3://bucket/a?endpoint=https://s3.example.org:9000/&region=eu-west-1",
            S3Location("bucket", "a", "https://s3.example.org:9000", "eu-west-1"),
        ),
        ("s3://bucket?endpoint=http://[::1]:80", S3Location("bucket", "", "http://[::1]:80")),
    ],
)
def test_places(text: str, meant: S3Location | Path | None) -> None:
    assert parse_storage_url(text) == meant


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("objects", ["absolute path"]),
        ("~/objects", ["absolute path"]),
        ("file:///srv", ["absolute path"]),
        ("http://s3.example.org/bucket", ["s3://BUCKET"]),
        ("s3:bucket", ["'' is not a valid bucket name"]),
        ("s3://", ["'' is not a valid bucket name"]),
        ("s3://Bucket", ["not a valid bucket name"]),
        ("s3://[bucket", ["is not a URL"]),
        (f"s3://key:{SECRET}@bucket", ["must not contain keys"]),
        ("s3://bucket/../other", ["the prefix"]),
        ("s3://bucket/a//b", ["the prefix"]),
        ("s3://bucket/%2e%2e", ["the prefix"]),
        ("s3://bucket/a#b", ["'#'"]),
        ("s3://bucket?endpoint=s3.example.org", ["endpoint must be"]),
        (f"s3://bucket?endpoint=http://key:{SECRET}@host", ["endpoint must be"]),
        ("s3://bucket?endpoint=http://host:99999", ["endpoint must be"]),
        ("s3://bucket?endpoint=", ["endpoint must be"]),
        ("s3://bucket?region=", ["'' is not a valid region name"]),
        ("s3://bucket?region=a&region=b", ["region is given more than once"]),
        (
            "s3://B/A?endpoint=x&region=_&secret=y#z",
            ["bucket name", "the prefix", "endpoint", "region name", "'secret'", "'#'"],
        ),
    ],
)
def test_all_that_is_wrong_is_said_at_once(text: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        load({"VMJOBS_CONFIG": "/dev/null", "VMJOBS_STORAGE_URL": text, "VMJOBS_LISTEN": "x"})
    told = {fault.field: fault.message for fault in refused.value.faults}
    assert set(told) == {"listen", "storage_url"}
    for word in words:
        assert word in told["storage_url"]
    assert SECRET not in f"{refused.value}{told}"
