"""What the commands about clusters share: names, what changes, waiting until machines are up."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import click
from rich.console import Console

from vmjobs.cli.support import config, read_token
from vmjobs.cluster.member import Goal, MemberCode, MemberState
from vmjobs.cluster.spec import ClusterSpec, Size
from vmjobs.cluster.wire import Cluster, Member
from vmjobs.errors import Conflict, VMJobsError

if TYPE_CHECKING:
    from vmjobs.client import Client
    from vmjobs.client.clusters import Clusters

_F = TypeVar("_F", bound=Callable[..., Any])

#: Exit status where the time was over first (timeout(1)).
TIMED_OUT = 124
FIRST_POLL = 0.5
LAST_POLL = 2.0


# --------------------------------------------------------------------------- arguments


def _quick_client() -> Client:
    """A client for a shell that waits for completions."""
    from vmjobs.client import Client, Retries  # noqa: PLC0415 - only what needs the network pays

    settings = config()
    patience = Retries(deadline=1.5, connect=0.5, read=1.0)
    return Client(settings.api_url, read_token(settings.token_file), retries=patience)


def complete_cluster(_ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """Names of clusters, for the shell; none where the service does not answer at once."""
    try:
        with _quick_client() as api:
            found = api.clusters.list()
    except VMJobsError:
        return []
    return [cluster.name for cluster in found if cluster.name.startswith(incomplete)]


def complete_member(ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """Names of a cluster's machines, for the shell."""
    try:
        with _quick_client() as api:
            found = api.clusters.get(ctx.params.get("name") or "")
    except VMJobsError:
        return []
    return [member.name for member in found.members if member.name.startswith(incomplete)]


name_argument = click.argument("name", metavar="NAME", shell_complete=complete_cluster)
files_argument = click.argument(
    "files", metavar="FILE...", nargs=-1, required=True, type=click.Path(allow_dash=True)
)


def wait_options(command: _F) -> _F:
    """``--wait`` and ``--timeout``."""
    command = click.option(
        "--timeout", type=float, help="With --wait: seconds at most; then exit with 124."
    )(command)
    return click.option("--wait", is_flag=True, help="Wait until all machines are UP.")(command)


# --------------------------------------------------------------------------- words


def size_text(size: int | Size) -> str:
    """A size as people say it."""
    return f"{size.min} to {size.max}" if isinstance(size, Size) else str(size)


def machines(count: int) -> str:
    """A number of machines as people say it."""
    return "1 machine" if count == 1 else f"{count} machines"


def short(digest: str) -> str:
    """A digest as people compare it."""
    return digest.removeprefix("sha256:")[:12]


def reason(member: Member) -> str:
    """Why a member is where it is, on one line; empty where all goes its way."""
    text = member.message.partition("\n")[0]
    return text if member.code is MemberCode.PROGRESS else f"{member.code}: {text}".removesuffix(": ")


@dataclass(frozen=True)
class Change:
    """A field of a declaration that is another than before. Values are plain."""

    field: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.field}: {_said(self.old)} -> {_said(self.new)}"


def _said(value: Any) -> str:
    return value if isinstance(value, str) and value else "none" if value is None else json.dumps(value)


def changes(cluster: Cluster, spec: ClusterSpec, image: str) -> list[Change]:
    """What ``spec``, whose image is the digest ``image``, changes of a cluster as it was declared
    last, be it that this failed: field by field.
    """
    declared = cluster.failed or cluster
    old, new = dict(_flat(declared.spec)), dict(_flat(spec))
    if declared.image != image:  # the same name may mean another image by now
        old["image"] = f"{old['image']} ({short(declared.image)})"
        new["image"] = f"{new['image']} ({short(image)})"
    fields = dict.fromkeys([*new, *old])
    found = [Change(f, old.get(f), new.get(f)) for f in fields]
    # As JSON, since to Python 1 is true.
    return [change for change in found if json.dumps(change.old) != json.dumps(change.new)]


def _flat(spec: ClusterSpec) -> Iterator[tuple[str, Any]]:
    for field, value in spec.model_dump(mode="json").items():
        if field in {"attributes", "limits"}:
            yield from ((f"{field}.{name}", item) for name, item in value.items())
        else:
            yield field, value


# --------------------------------------------------------------------------- waiting


def settled(cluster: Cluster) -> bool:
    """As many machines as wanted are UP, and none is left as it was declared before."""
    up = [m for m in cluster.members if m.state is MemberState.UP and m.goal is Goal.RUN]
    fresh = [m for m in up if m.generation == cluster.generation]
    return len(fresh) == len(up) and len(up) >= cluster.target


def wait_until_up(
    api: Clusters, names: Sequence[str], timeout: float | None, *, as_declared: bool = True
) -> list[Cluster]:
    """Wait until all clusters are settled, and show how far they are. Exits with 124 after ``timeout``.

    as_declared: one that went back to an earlier generation is not what is waited for.

    Raises:
        Conflict: a cluster is draining or being deleted, or went back: it will not be up.
    """
    end = None if timeout is None else time.monotonic() + timeout
    terminal = Console(stderr=True)
    watch = _Watch(quiet=terminal.is_terminal)
    pause = FIRST_POLL
    with terminal.status("waiting") as status:
        while True:
            found = [_going_up(api.get(name), as_declared) for name in names]
            if watch.news(found):
                pause = FIRST_POLL
            status.update("; ".join(_progress(cluster) for cluster in found))
            left = LAST_POLL if end is None else end - time.monotonic()
            if all(settled(cluster) for cluster in found) or left <= 0:
                break
            time.sleep(min(pause, left))
            pause = min(LAST_POLL, pause * 1.5)
    late = [cluster for cluster in found if not settled(cluster)]
    for cluster in late:
        _tell_why(cluster)
    if late:
        sys.exit(TIMED_OUT)
    return found


class _Watch:
    """Tells every new state of a member on a line, where no terminal shows them."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._seen: dict[str, tuple[MemberState, str]] = {}

    def news(self, found: Sequence[Cluster]) -> bool:
        """Whether anything is new."""
        fresh = False
        for member in (member for cluster in found for member in cluster.members):
            seen = (member.state, reason(member))
            if self._seen.get(member.id) != seen:
                self._seen[member.id] = seen
                fresh = True
                if not self._quiet:
                    click.echo(_line(member), err=True)
        return fresh


def _going_up(cluster: Cluster, as_declared: bool) -> Cluster:
    if cluster.deleting:
        raise Conflict(f"{cluster.name} is being deleted: its machines will not be up")
    if cluster.draining:
        hint = f"`vmjobs cluster resume {cluster.name}` has machines started again"
        raise Conflict(f"{cluster.name} is drained: its machines will not be up", hint=hint)
    if cluster.failed and as_declared:
        raise Conflict(f"{cluster.name}: {cluster.failed.message}", hint=try_again(cluster))
    return cluster


def try_again(cluster: Cluster) -> str:
    """What to do about a declaration that the cluster went back from."""
    return f"mend the declaration, or try it again: `vmjobs cluster retry {cluster.name}`"


def _progress(cluster: Cluster) -> str:
    states = [member.state for member in cluster.members if member.state is not MemberState.UP]
    others = ", ".join(f"{states.count(s)} {s}" for s in MemberState if s in states)
    return f"{cluster.name}: {cluster.up} of {cluster.target} UP" + (f" ({others})" if others else "")


def _line(member: Member) -> str:
    where = f" on {member.node}" if member.node else ""
    why = reason(member)
    return f"{member.name} {member.state}{where}" + (f": {why}" if why else "")


def _tell_why(cluster: Cluster) -> None:
    click.echo(f"vmjobs: not all is up in time: {_progress(cluster)}", err=True)
    for member in cluster.members:
        if member.state is not MemberState.UP:
            click.echo(f"  {_line(member)}", err=True)
        elif member.generation != cluster.generation:
            click.echo(f"  {_line(member)} (still as it was declared before)", err=True)
