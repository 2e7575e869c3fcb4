"""The service's metrics for Prometheus."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from flask import Blueprint
from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from werkzeug.wrappers import Response

from api.operation import BinaryBody, Operation, Reply, access_for
from api.services import repository, services
from api.tokens import Scope
from repository.clusters.core import node_lease
from repository.metrics import read_metrics
from vmjobs.model import now

blueprint = Blueprint("metrics", __name__)

READ: Final = access_for(Scope.COMPUTE_READ, Scope.ADMIN)
MEDIA: Final = "text/plain"
#: The format that every release of Prometheus reads, whatever the library's own default is.
CONTENT_TYPE: Final = f"{MEDIA}; version=0.0.4; charset=utf-8"


@blueprint.get("/metrics")
@Operation(
    "getMetrics",
    access=READ,
    replies={200: Reply("the metrics", BinaryBody("Prometheus' text format", MEDIA))},
)
def metrics() -> Response:
    """Show the service's state to Prometheus.

    The metrics cover the whole service: every process gives the same answer.
    """
    return Response(
        generate_latest(ServiceMetrics()),
        content_type=CONTENT_TYPE,
        headers={"Cache-Control": "no-cache"},
    )


class ServiceMetrics(Collector):
    """All metrics of the service, in the form that the library reads."""

    def collect(self) -> Iterable[Metric]:
        """Read the metrics."""
        lease = node_lease(services().config)
        return read_metrics(repository().database, lease, now())
