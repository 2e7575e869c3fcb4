"""The cluster repository: operations on virtual clusters for API, agents and worker."""

from __future__ import annotations

from repository.clusters.assignments import ClusterAssignments
from repository.clusters.reconciler import ClusterReconciler
from repository.clusters.sessions import ClusterLogins
from repository.clusters.specs import ClusterSpecs


class Clusters(ClusterSpecs, ClusterAssignments, ClusterLogins, ClusterReconciler):
    """Clusters and their VMs. Safe to share between threads.

    operators (specs): list, get, events, open_console, assess, faults, apply, scale, wake,
    drain, resume, retry, delete.
    agents (assignments): share, revisions, store_reports, order_for, append_console.
    logins (sessions): login_target, notify_node, record_login.
    worker (reconciler): reconcile.
    """
