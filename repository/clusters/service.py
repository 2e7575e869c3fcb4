"""The cluster repository: operations on virtual clusters for API, agents and worker."""

from __future__ import annotations

from repository.clusters.declaring import Declaring
from repository.clusters.reconciling import Reconciling
from repository.clusters.sessions import Logins
from repository.clusters.sharing import Sharing


class Clusters(Declaring, Sharing, Logins, Reconciling):
    """Clusters and their VMs. Safe to share between threads.

    operators (specs): list, get, events, open_console, assess, faults, apply, scale, wake,
    drain, resume, retry, delete.
    agents (assignments): share, revisions, store_reports, order_for, append_console.
    logins (sessions): login_target, notify_node, record_login.
    worker (reconciler): reconcile.
    """
