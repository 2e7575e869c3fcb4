"""Virtual clusters: what the API, agents and the worker do with them."""

from __future__ import annotations

from repository.clusters.declaring import Declaring
from repository.clusters.reconciling import Reconciling
from repository.clusters.sessions import Logins
from repository.clusters.sharing import Sharing


class Clusters(Declaring, Sharing, Logins, Reconciling):
    """Clusters and their members. Safe to share between threads.

    operators (declaring): list, get, events, open_console, assess, faults, apply, scale, wake,
    drain, resume, retry, delete.
    agents (sharing): share, revisions, take_reports, order_for, append_console.
    who logs in (sessions): door_of, call, note_login.
    worker (reconciling): reconcile.
    """
