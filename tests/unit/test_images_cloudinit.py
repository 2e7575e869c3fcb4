"""NoCloud data: the contents of the disk, and the parts of its kit that run without a VM."""

from __future__ import annotations

import ast
import io
import subprocess
from importlib import resources
from pathlib import Path

import pycdlib
import pytest
import yaml

from images.cloudinit import network_config, user_data, write_seed
from vmjobs.errors import HypervisorError
from vmjobs.model import JobSpec, JobTicket, NetworkMode, Strategy

DIGEST = "sha256:" + "0" * 64


def ticket(**fields: object) -> JobTicket:
    spec = JobSpec.model_validate({"strategy": Strategy.IMAGE, "image": "cloud", **fields})
    return JobTicket(job_id="j", attempt="ab" * 16, index=3, count=5, image_digest=DIGEST, spec=spec)


def contents(path: Path) -> dict[str, str]:
    iso = pycdlib.PyCdlib()
    iso.open(str(path))
    found: dict[str, str] = {}
    for kind in ("rr_path", "joliet_path"):  # Linux reads either one
        for name in ("meta-data", "user-data", "network-config"):
            sink = io.BytesIO()
            iso.get_file_from_iso_fp(sink, **{kind: f"/{name}"})
            assert found.setdefault(name, sink.getvalue().decode()) == sink.getvalue().decode()
    iso.close()
    return found


def test_the_disk_is_what_cloud_init_looks_for(path: Path) -> None:
    write_seed(path, ticket(user_data="#cloud-config\nruncmd: [ls]\n", network="outbound"))
    data = path.read_bytes()
    assert data[32769:32774] == b"CD001"
    assert data[32808:32840].rstrip() == b"cidata"
    told = subprocess.run(["blkid", "-p", "-o", "export", path], capture_output=True, check=True)
    assert b"TYPE=iso9660" in told.stdout
    assert b"LABEL=cidata" in told.stdout
    files = contents(path)
    assert files["user-data"] == "#cloud-config\nruncmd: [ls]\n"
    assert yaml.safe_load(files["meta-data"]) == {"instance-id": "ab" * 16, "local-hostname": "vmjob-3"}
    assert yaml.safe_load(files["network-config"]) == network_config(NetworkMode.OUTBOUND)


def test_a_disk_that_cannot_be_made(tmp_path: Path) -> None:
    with pytest.raises(HypervisorError, match="cannot make the cloud-init disk"):
        write_seed(tmp_path / "none" / "seed", ticket())


def test_the_network_needs_nobody_to_answer() -> None:
    (card,) = network_config(NetworkMode.REPOSITORY)["ethernets"].values()
    assert (card["addresses"], card["dhcp4"]) == (["10.0.2.15/24"], False)
    assert "routes" not in card
    (card,) = network_config(NetworkMode.OUTBOUND)["ethernets"].values()
    assert card["routes"][0]["via"] == "10.0.2.2"
    assert network_config(NetworkMode.NONE)["config"] == "disabled"


def test_what_is_in_the_user_data() -> None:
    assert user_data(ticket(user_data="#!/bin/sh\nls\n", script="true").spec) == "#!/bin/sh\nls\n"
    assert yaml.safe_load(user_data(ticket().spec)) == {}
    launcher = user_data(ticket(script="true").spec)
    assert launcher.startswith("#!/bin/sh\n")
    assert subprocess.run(["sh", "-n"], input=launcher.encode(), check=True).returncode == 0
    kit = resources.files("images.guest").joinpath("cloud_kit.py").read_text()
    assert kit in launcher


def test_the_kit_is_python_of_old() -> None:
    kit = resources.files("images.guest").joinpath("cloud_kit.py").read_text()
    ast.parse(kit, feature_version=(3, 6))
    assert kit.isascii()
