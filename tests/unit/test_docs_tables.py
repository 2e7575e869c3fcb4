"""The guides to virtual clusters and to `vmjobs job why` match the code."""

from __future__ import annotations

import re

import pytest

from tests.kit import ROOT
from vmjobs.cli.manifests import read_clusters
from vmjobs.cluster.spec import ClusterSpec
from vmjobs.cluster.vm_state import ClusterVmCode, ClusterVmState
from vmjobs.commands import cluster as cluster_commands
from vmjobs.config import Config

GUIDE = (ROOT / "docs" / "clusters.md").read_text("utf-8")
WHY_GUIDE = (ROOT / "docs" / "htcondor-jobs.md").read_text("utf-8")
SOURCES = (
    "condor/diagnose/findings.py",
    "condor/diagnose/pool_findings.py",
    "condor/diagnose/explainer.py",
    "condor/cli/why_service.py",
)
EXAMPLE = ROOT / "examples" / "worker-cluster.yaml"


def test_the_example_is_valid_and_says_the_defaults() -> None:
    (cluster,) = read_clusters([str(EXAMPLE)]).require_valid()
    spec = cluster.spec.model_dump(exclude={"name", "image", "size", "attributes"})
    default = ClusterSpec(name="x", image="x", size=1).model_dump(
        exclude={"name", "image", "size", "attributes"}
    )
    assert spec == default


@pytest.mark.parametrize("word", [*ClusterVmState, *ClusterVmCode])
def test_every_state_and_reason_is_in_the_tables(word: str) -> None:
    assert any(line.startswith("| `") and f"`{word}`" in line for line in GUIDE.splitlines())


@pytest.mark.parametrize("verb", [verb for verb, row in cluster_commands.table().items() if row.help])
def test_every_command_is_shown(verb: str) -> None:
    assert f"vmjobs cluster {verb} " in GUIDE or f"vmjobs cluster {verb}\n" in GUIDE


def test_settings_that_it_names_exist() -> None:
    for name in ("cluster_cpus", "cluster_memory", "cluster_disk", "pools", "pool_key_dir"):
        assert f"`{name}`" in GUIDE
        assert name in Config.model_fields


def codes_of_why() -> set[str]:
    text = "".join((ROOT / source).read_text("utf-8") for source in SOURCES)
    found = set(re.findall(r'"([A-Z]+_[A-Z_]+|[A-Z]{4,})"', text))
    return found - {"TARGET"}


@pytest.mark.parametrize("code", sorted(codes_of_why()))
def test_every_code_of_why_is_in_the_guide(code: str) -> None:
    assert f"`{code}`" in WHY_GUIDE
