"""The client library of the REST API.

- :class:`Client` for users and their programs: submit, watch, read, cancel.
- :class:`Images` for their images: push, publish, tag, share, maintain.
- :class:`JobAgentClient` for the agent that runs one job (a ``JobSource``).
- :class:`CondorJobClient` for the checkpoints of transparent jobs (a ``CheckpointStore``).
- :class:`ImageClient` fetches images for a node's cache, :class:`NodeClient` registers a node,
  :class:`AssignmentClient` serves the cluster VMs of a node (a ``AssignmentSource``).

All raise the errors of :mod:`vmjobs.errors`: the error that the service answered with, or
``Unavailable("api", …)`` if the service is unreachable.
"""

from vmjobs.client.agent import (
    AssignmentClient,
    CondorJobClient,
    ImageClient,
    JobAgentClient,
    NodeClient,
)
from vmjobs.client.clusters import Clusters
from vmjobs.client.images import Images
from vmjobs.client.transport import ApiTransport, Retries
from vmjobs.client.user import Client

__all__ = [
    "ApiTransport",
    "AssignmentClient",
    "Client",
    "Clusters",
    "CondorJobClient",
    "ImageClient",
    "Images",
    "JobAgentClient",
    "NodeClient",
    "Retries",
]
