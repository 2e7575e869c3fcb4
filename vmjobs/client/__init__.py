"""The client library: everything that talks to the API speaks through it.

- :class:`Client` for people and their programs: submit, watch, read, cancel.
- :class:`Images` for their images: push, publish, name, share, look after.
- :class:`JobAgentClient` for the agent that runs one job (a ``vmjobs.ports.JobSource``).
- :class:`CondorJobClient` for the checkpoints of transparent jobs (a ``vmjobs.ports.CheckpointStore``).
- :class:`ImageClient` fetches images for a node's cache, :class:`NodeClient` announces a node,
  :class:`ShareClient` speaks for the machines of clusters on it (a ``vmjobs.ports.ShareSource``).

All raise the errors of :mod:`vmjobs.errors`: what the service answered with, or
``Unavailable("api", …)`` where it cannot be reached.
"""

from vmjobs.client.agent import (
    CondorJobClient,
    ImageClient,
    JobAgentClient,
    NodeClient,
    ShareClient,
)
from vmjobs.client.clusters import Clusters
from vmjobs.client.images import Images
from vmjobs.client.transport import Retries, Transport
from vmjobs.client.user import Client

__all__ = [
    "Client",
    "Clusters",
    "CondorJobClient",
    "ImageClient",
    "Images",
    "JobAgentClient",
    "NodeClient",
    "Retries",
    "ShareClient",
    "Transport",
]
