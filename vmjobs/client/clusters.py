"""The API of virtual clusters, for operators and their programs."""

from __future__ import annotations

import builtins
from collections.abc import Iterator
from typing import Literal
from urllib.parse import quote

from vmjobs.client import files
from vmjobs.client.sessions import SessionStream
from vmjobs.client.transport import ApiTransport, parse
from vmjobs.cluster.spec import ClusterSpec
from vmjobs.cluster.ssh_session import ClusterSshSession, SessionRequest
from vmjobs.cluster.wire import (
    ApplyResult,
    Assessment,
    Cluster,
    ClusterEvent,
    ClusterEvents,
    ClusterList,
    ScaleRequest,
)
from vmjobs.errors import NotFound


class Clusters:
    """The virtual clusters of a service: :attr:`vmjobs.client.Client.clusters`.

    Methods raise what the service answers with: ``NotFound``, ``Forbidden``, ``InvalidSpec`` …,
    and ``Unavailable`` where it does not answer in time.
    """

    def __init__(self, http: ApiTransport) -> None:
        self._http = http

    # -- reading

    def list(self) -> builtins.list[Cluster]:
        """All clusters, by name; without their VMs."""
        pages = self._http.pages(ClusterList, "/v1/clusters")
        return [cluster for page in pages for cluster in page.clusters]

    def get(self, name: str) -> Cluster:
        """One cluster with its VMs."""
        return self._http.get(Cluster, _cluster_path(name))

    def events(self, name: str, after: int = 0) -> builtins.list[ClusterEvent]:
        """A cluster's events past number ``after``; the service keeps the last thousand."""
        path = f"{_cluster_path(name)}/events"
        return builtins.list(self._http.get(ClusterEvents, path, {"after": after}).events)

    def console(self, name: str, vm: str, offset: int = 0, incarnation: int = 0) -> Iterator[bytes]:
        """The console of a cluster VM, from ``offset`` to its present end.

        vm: its name. incarnation: 0: the last one; the service also keeps the one before it.
        """
        path = f"{_cluster_path(name)}/members/{_quote_name(vm)}/console?incarnation={incarnation}"
        return files.read_stream(self._http, path, offset)

    # -- changing

    def put(self, spec: ClusterSpec) -> ApplyResult:
        """Declare a cluster. An identical declaration changes nothing.

        Raises:
            InvalidSpec: with every fault of the declaration.
            NotFound: there is no such image.
            Conflict: the cluster is being deleted.
        """
        return self._http.send(ApplyResult, "PUT", _cluster_path(spec.name), spec)

    def assess(self, spec: ClusterSpec) -> Assessment:
        """Ask how much of a declaration would run now.  Raises as :meth:`put`."""
        return self._http.send(Assessment, "POST", "/v1/cluster-assessments", spec)

    def scale(self, name: str, size: int) -> Cluster:
        """Change the number of VMs.

        Raises:
            Conflict: the cluster is being deleted.
        """
        request = ScaleRequest(size=size)
        return self._http.send(Cluster, "POST", f"{_cluster_path(name)}/scale", request)

    def wake(self, name: str) -> None:
        """Start a VM in a cluster that autoscaling has scaled to zero."""
        self._http.call("POST", f"{_cluster_path(name)}/wake", repeatable=True)

    def drain(self, name: str) -> Cluster:
        """Let all VMs end with their jobs, and start none until :meth:`resume`."""
        return self._http.send(Cluster, "POST", f"{_cluster_path(name)}/drain")

    def resume(self, name: str) -> Cluster:
        """Start VMs again after :meth:`drain`.

        Raises:
            Conflict: the cluster is being deleted.
        """
        return self._http.send(Cluster, "POST", f"{_cluster_path(name)}/resume")

    def retry(self, name: str) -> Cluster:
        """Retry failed nodes and images, and a rolled-back declaration, without backoff.

        Raises:
            Conflict: the cluster is being deleted.
        """
        return self._http.send(Cluster, "POST", f"{_cluster_path(name)}/retry")

    def delete(self, name: str, mode: Literal["drain", "now"] = "drain") -> Cluster:
        """Delete a cluster: once its jobs have ended, or now.

        The cluster exists until its VMs are known to be gone.
        """
        return self._http.send(Cluster, "DELETE", _cluster_path(name), params={"mode": mode})

    # -- logging in

    def open_session(self, name: str, vm: str, key: str) -> ClusterSshSession:
        """Open a session for one login to a cluster VM, with an OpenSSH public key.

        Raises:
            NotFound: there is no such VM.
            VmNotRunning, LoginUnavailable: logins to the VM are impossible now.
            Unavailable: its node does not answer.
        """
        path = f"{_cluster_path(name)}/members/{_quote_name(vm)}/sessions"
        answer = self._http.call("POST", path, body=SessionRequest(key=key), repeatable=False)
        return parse(ClusterSshSession, answer)

    def session(self, session: str) -> SessionStream:
        """The operator's side of a session."""
        return SessionStream(self._http, f"/v1/sessions/{_quote_name(session)}")


def _cluster_path(name: str) -> str:
    return f"/v1/clusters/{_quote_name(name)}"


def _quote_name(name: str) -> str:
    """Quote a name for a path; refuses dots alone, which the HTTP client would resolve."""
    if not name.strip() or name in {".", ".."}:
        raise NotFound(f"{name!r}: not found")
    return quote(name, safe="")
