"""The guides in docs/ match the code."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path

import yaml
from prometheus_client.core import InfoMetricFamily, Metric

from api.tokens import Scope
from repository.metrics import METRICS, metric_family
from tests.kit import ROOT
from tests.kit.gateway_specs import gateway_spec
from vmjobs.agent.metrics import AgentMetrics
from vmjobs.cli.logs import SUBJECTS
from vmjobs.cli.manifests import read_clusters
from vmjobs.cluster.spec import ClusterSpec
from vmjobs.cluster.vm_state import ClusterVmCode, ClusterVmState, Phase
from vmjobs.cluster.wire import ClusterVmReport, ClusterVmReports
from vmjobs.commands import cluster as cluster_commands
from vmjobs.config import Config
from vmjobs.gateway.assignments import GatewayAssignments
from vmjobs.gateway.directory import GatewayDirectory, InstalledGateway, vm_id
from vmjobs.gateway.metrics import GatewayMetrics
from vmjobs.gateway.spec import parse_gateway
from vmjobs.hypervisor.base import ProbeResult
from vmjobs.model import CAPABILITIES, BootMethod, Capabilities, HypervisorKind, now

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


def test_every_state_and_reason_is_in_the_tables() -> None:
    rows = "".join(line for line in GUIDE.splitlines() if line.startswith("| `"))
    assert [word for word in (*ClusterVmState, *ClusterVmCode) if f"`{word}`" not in rows] == []


def test_every_command_is_shown() -> None:
    shown = re.findall(r"vmjobs cluster (\w+)[ \n]", GUIDE)
    assert {verb for verb, row in cluster_commands.table().items() if row.help} <= set(shown)


def test_settings_that_it_names_exist() -> None:
    for name in ("cluster_cpus", "cluster_memory", "cluster_disk", "pools", "pool_key_dir"):
        assert f"`{name}`" in GUIDE
        assert name in Config.model_fields


def test_every_code_of_why_is_in_the_guide() -> None:
    text = "".join((ROOT / source).read_text("utf-8") for source in SOURCES)
    codes = set(re.findall(r'"([A-Z]+_[A-Z_]+|[A-Z]{4,})"', text)) - {"TARGET"}
    assert codes
    assert [code for code in codes if f"`{code}`" not in WHY_GUIDE] == []


METRICS_GUIDE = (ROOT / "docs" / "metrics.md").read_text("utf-8")
ROW = re.compile(r"^\| `(vmjobs_\w+)` \|([^|]*)\|", re.MULTILINE)

Labels = frozenset[str]


class Cache:
    hits = misses = 1

    def used(self) -> int:
        return 1


def service() -> Iterable[Metric]:
    """Return the service's metrics, with a value for each."""
    yield InfoMetricFamily("vmjobs", "The service's release.", {"version": "1.0"})
    for name, (_, labels) in METRICS.items():
        yield metric_family(name, {("x",) * len(labels): 1})


def agent() -> Iterable[Metric]:
    """Return the agent's metrics, with a value for each."""
    made = AgentMetrics()
    made.probes = lambda: (ProbeResult(HypervisorKind.UML, True, "", 1.0),)
    made.cache = Cache()
    made.job_step("boot", 1.0)
    report = ClusterVmReport(
        id="0" * 32, incarnation=1, phase=Phase.WAITING, code=ClusterVmCode.GUEST_LOST, since=now()
    )
    made.member(report, report.model_copy(update={"failures": 1}))
    return made.registry.collect()


def gateway(folder: Path) -> Iterable[Metric]:
    """Return the metrics of a gateway with a VM that reports how full its disk is."""
    place = GatewayDirectory(folder)
    declared = parse_gateway(gateway_spec())
    images = {vm.name: f"sha256:{'0' * 64}" for vm in declared.machines}
    installed = InstalledGateway(schema=1, gateway=declared, images=images, kind=HypervisorKind.UML)
    assignments = GatewayAssignments(place, installed)
    ce = vm_id("ce")
    report = ClusterVmReport(
        id=ce, incarnation=1, phase=Phase.RUNNING, code=ClusterVmCode.PROGRESS, since=now()
    )
    assignments.report(ClusterVmReports(reports=(report,)))
    assignments.words(ce, 1, b"vmjobs-gateway: up\nvmjobs-gateway: full 7\n")
    return GatewayMetrics(place, assignments).registry().collect()


def of_code(metrics: Iterable[Metric]) -> dict[str, Labels]:
    """Return the labels of each metric, by its name in the guide."""
    suffixes = {"counter": "_total", "info": "_info"}
    found = {}
    for metric in metrics:
        if metric.name.startswith("vmjobs"):
            labels = frozenset().union(*(sample.labels for sample in metric.samples))
            found[metric.name + suffixes.get(metric.type, "")] = labels - {"le"}
    return found


def test_the_tables_have_every_metric_with_its_labels_and_no_other(tmp_path: Path) -> None:
    rows = {
        name: frozenset(re.findall(r"`(\w+)`", labels)) for name, labels in ROW.findall(METRICS_GUIDE)
    }
    assert rows == of_code(service()) | of_code(agent()) | of_code(gateway(tmp_path))
    assert all(name.startswith("vmjobs_agent_") for name in of_code(agent()))


def test_the_example_can_be_read_by_a_program() -> None:
    text = METRICS_GUIDE[METRICS_GUIDE.index("    scrape_configs:") :].partition("\n\n")[0]
    (of_service, of_agent) = yaml.safe_load(text)["scrape_configs"]
    assert of_service["authorization"]["credentials_file"]
    port = re.search(r'metrics_listen = "127\.0\.0\.1:(\d+)"', METRICS_GUIDE)
    assert port is not None
    assert of_agent["static_configs"][0]["targets"][0].endswith(f":{port[1]}")


def test_what_it_names_exists() -> None:
    for name in ("metrics_listen", "log_format", "log_level", "node_lease_seconds"):
        assert f"`{name}`" in METRICS_GUIDE or f"{name} = " in METRICS_GUIDE
        assert name in Config.model_fields
    for scope in (Scope.COMPUTE_READ, Scope.ADMIN):
        assert f"`{scope}`" in METRICS_GUIDE
    logs = METRICS_GUIDE.partition("## Logs")[2]
    assert all(f"`{subject}`" in logs for subject in SUBJECTS)


#: What drivers declare, by the beginning of its row in docs/hypervisors.md.
DECLARED: dict[str, Callable[[Capabilities], object]] = {
    "boots images": lambda one: "yes" if one.boots_image_kernel else "yes, with its own kernel",
    "boots disks by BIOS": lambda one: BootMethod.BIOS in one.boots,
    "boots disks by UEFI": lambda one: BootMethod.UEFI in one.boots,
    "cloud-init": lambda one: one.cloud_init,
    "[checkpoints]": lambda one: one.can_save,
    "[lazy start]": lambda one: one.lazy_start,
    "private networks": lambda one: one.private_networks,
    "limits the speed": lambda one: one.limits_disks,
    "processors are": lambda one: "emulated" if one.emulated else "the node's",
    "emulates other": lambda one: ", ".join(one.architectures) or False,
    "maximum number": lambda one: one.cpus,
    "the same for a cluster": lambda one: one.shared_cpus,
}


def test_the_table_of_hypervisors_is_what_drivers_declare() -> None:
    page = (ROOT / "docs" / "hypervisors.md").read_text("utf-8")
    head, _, *rows = page.split("\n\n")[2].splitlines()
    assert head == "".join(f"| `{kind}` " for kind in ("", *HypervisorKind)).replace("`` ", "") + "|"
    assert len(rows) == len(DECLARED)
    for row, (name, declared) in zip(rows, DECLARED.items(), strict=True):
        words = [str(declared(CAPABILITIES[kind])) for kind in HypervisorKind]
        cells = [{"True": "yes", "False": "no"}.get(word, word) for word in words]
        assert row.startswith(f"| {name}")
        assert row.split(" | ", 1)[1] == " | ".join(cells) + " |", name
