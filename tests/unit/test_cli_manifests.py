"""Cluster manifests: how they are read, and the position of each fault."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from vmjobs.cli import manifests
from vmjobs.cli.manifests import ManifestFinding, read_clusters
from vmjobs.cluster.spec import ClusterVmLimits, SizeRange
from vmjobs.errors import Fault, InvalidSpec

GOOD = """\
# workers for everybody
name: workers
image: worker
size: 3
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def found(text: str | bytes) -> tuple[ManifestFinding, ...]:
    Path("c.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_clusters(["c.yaml"]).findings


def told(text: str | bytes) -> list[str]:
    """The faults as users see them."""
    return [f"{finding.fault.field}: {finding.fault.message}" for finding in found(text)]


def test_documents_and_files_are_read_in_order() -> None:
    Path("a.yaml").write_text(
        f"---\n{GOOD}---\nname: b\nimage: worker:2\nsize: {{min: 1, max: 4}}\n---\n"
    )
    Path("c.json").write_text(json.dumps({"name": "c", "image": "worker", "size": 0, "memory": 512}))
    clusters = read_clusters(["a.yaml", "c.json"]).require_valid()
    assert [(c.file, c.spec.name) for c in clusters] == [
        ("a.yaml", "workers"),
        ("a.yaml", "b"),
        ("c.json", "c"),
    ]
    assert clusters[1].spec.size == SizeRange(min=1, max=4)
    assert clusters[2].spec.memory == 512


def test_values_are_what_they_look_like() -> None:
    Path("c.yaml").write_text(
        GOOD
        + """\
nodes: [node1.*, "node2.*"]
attributes: {Country: no, Tier: 2, Fast: true, Load: 0.5, Time: 12:30, Version: "1.10"}
limits:
  cpu_percent: 50
"""
    )
    (cluster,) = read_clusters(["c.yaml"]).require_valid()
    tier = {"Tier": 2, "Fast": True, "Load": 0.5}
    assert cluster.spec.attributes == {"Country": "no", "Time": "12:30", "Version": "1.10", **tier}
    assert cluster.spec.nodes == ("node1.*", "node2.*")
    assert cluster.spec.limits == ClusterVmLimits(cpu_percent=50)


def test_standard_input_is_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(GOOD.encode() + b"cpus: x\n")))
    (finding,) = read_clusters(["-"]).findings
    assert str(finding.place) == "<stdin>:5:1"


def test_all_faults_of_all_documents_and_files_come_at_once() -> None:
    Path("a.yaml").write_text(f"{GOOD}cpu: 2\n---\nname: Not_This\nsize: 1\n")
    Path("b.yaml").write_text("name: b\nimage: worker\nsize: {min: 3, max: 1}\nmemroy: 12\n")
    with pytest.raises(InvalidSpec, match="has 5 faults") as error:
        read_clusters(["a.yaml", "b.yaml"]).require_valid()
    assert [(f.field, f.message) for f in error.value.faults] == [
        ("a.yaml:5:1", "cpu: there is no such field; did you mean cpus?"),
        ("a.yaml:7:1", f"name: {manifests._PATTERN_MESSAGES['name']}"),
        ("a.yaml:7:1", "image: is missing"),
        ("b.yaml:3:1", "size: min (3) is larger than max (1)"),
        ("b.yaml:4:1", "memroy: there is no such field; did you mean memory?"),
    ]


VALUE = "must be true, false, a number, or at most 1024 characters of text"
NO_FIELD = "there is no such field"


@pytest.mark.parametrize(
    ("lines", "fault"),
    [
        ("cpus: two\n", "5:1: cpus: must be a valid integer"),
        ("cpus: 2\ncpus: 3\n", "6:1: cpus: is on line 5 as well"),
        (
            "limits:\n  cpu_procent: 5\n",
            f"6:3: limits.cpu_procent: {NO_FIELD}; did you mean cpu_percent?",
        ),
        ("<<: {cpus: 2}\n", f"5:1: <<: {NO_FIELD}"),
        ("nodes:\n- node1\n- a b\n", f"7:3: nodes.1: {manifests._PATTERN_MESSAGES['nodes']}"),
        ("nodes: node1\n", "5:1: nodes: must be a list"),
        ("attributes: {A: 2026-11-20, B: ~}\n", f"5:29: attributes.B: {VALUE}"),
        ("cpus: !run [ls]\n", "5:7: cpus: has the tag !run, which is not supported"),
        ("cpus: !!int two\n", "5:7: cpus: is not a valid int"),
        (f"cpus: {'9' * 5000}\n", "5:7: cpus: is not a valid int"),
        ("? [a, b]\n: 1\n", "5:3: a key must be text"),
        (b"site: \xff\n", "5:7: is not text in UTF-8"),
        ("site: a\x07b\n", "5:8: has a character that YAML does not allow"),
    ],
)
def test_a_fault_is_told_with_its_line(lines: str | bytes, fault: str) -> None:
    added = lines if isinstance(lines, bytes) else lines.encode()
    assert told(GOOD.encode() + added) == [f"c.yaml:{fault}"]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("- a\n- b\n", "1:1: must be a mapping, KEY: VALUE"),
        ("", "1:1: declares no cluster"),
        ("# nothing\n---\n---\n", "1:1: declares no cluster"),
        ("name: a\n  image: b\n", "2:8: is not YAML: mapping values are not allowed here"),
        ("name: *nobody\n", "1:7: is not YAML: found undefined alias 'nobody'"),
        ("[" * 1500, "1:1: is nested more than 16 levels deep"),
        (" " * (manifests.MAX_BYTES + 1), "1:1: has more than 1 MiB"),
    ],
)
def test_a_file_that_declares_nothing_is_a_fault(text: str, fault: str) -> None:
    assert told(text) == [f"c.yaml:{fault}"]


def test_a_file_that_cannot_be_read_is_one_fault_among_others() -> None:
    Path("a.yaml").write_text(f"{GOOD}cpus: 0\n")
    found = read_clusters(["nowhere.yaml", ".", "a.yaml"]).findings
    assert [f.fault.message for f in found] == [
        "cannot be read: No such file or directory",
        "cannot be read: Is a directory",
        "cpus: must be greater than or equal to 1",
    ]


def test_good_documents_before_a_broken_one_are_still_checked() -> None:
    assert told(f"{GOOD}cpu: 1\n---\nname: [\n") == [
        "c.yaml:5:1: cpu: there is no such field; did you mean cpus?",
        "c.yaml:8:1: is not YAML: expected the node content, but found '<stream end>'",
    ]


def test_aliases_within_reason_are_fine_and_others_refused_at_once() -> None:
    Path("c.yaml").write_text(f"{GOOD}cpus: &n 2\nboot_seconds: *n\n")
    (cluster,) = read_clusters(["c.yaml"]).require_valid()
    assert (cluster.spec.cpus, cluster.spec.boot_seconds) == (2, 2)
    laughs = "\n".join(
        f"  a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9) if n else 'lol'}]" for n in range(12)
    )
    (finding,) = found(f"{GOOD}attributes:\n{laughs}\n")
    assert "counting what aliases stand for" in finding.message
    itself = " ".join(told(f"{GOOD}attributes: &a {{x: *a}}\n"))
    assert "is nested more than 16 levels deep" in itself


def test_one_name_twice_is_refused_with_both_places() -> None:
    Path("a.yaml").write_text(GOOD)
    Path("b.yaml").write_text(GOOD)
    (finding,) = read_clusters(["a.yaml", "b.yaml"]).findings
    assert str(finding.place) == "b.yaml:2:1"
    assert finding.message == "workers is declared at a.yaml:2:1 as well"


def test_a_fault_that_the_service_finds_has_a_place() -> None:
    Path("a.yaml").write_text(f"{GOOD}limits: {{cpu_percent: 5}}\n")
    (cluster,) = read_clusters(["a.yaml"]).require_valid()
    for field, place in (
        ("spec.image", "3:1"),
        ("size.machines", "4:1"),
        ("limits.cpu_percent", "5:10"),
        ("site", "2:1"),
        ("", "2:1"),
    ):
        assert str(cluster.finding(Fault(field, "x", "y")).place) == f"a.yaml:{place}", field
