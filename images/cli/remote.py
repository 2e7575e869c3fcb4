"""Builds by the service: ``vmjobs image build --remote`` and ``vmjobs image builds``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import click

from images import recipe as recipes
from images.cli.common import parse_name
from vmjobs.cli.common import echo, format_age, json_option, print_json, print_table, repository
from vmjobs.cli.progress import step_bars
from vmjobs.client.http_errors import error_from_code
from vmjobs.client.images import Images
from vmjobs.wire import Build, BuildRequest, BuildState, Visibility


@dataclass(frozen=True)
class RemoteBuildOptions:
    """Command-line options of a remote build. name: may include a tag."""

    name: str
    tag: str
    namespace: str
    public: bool
    force: bool


def build_remotely(
    names: Sequence[str], options: RemoteBuildOptions, *, detach: bool, as_json: bool
) -> None:
    """Request builds from the service, and follow them unless ``detach``.

    Raises:
        BuildError: an image cannot be built, or fails its boot test. Also the errors of publishing
            an image.
    """
    requests = [_request(name, options) for name in names]
    if options.name and len(names) > 1:
        raise click.UsageError("--name is for one recipe")
    with repository() as images:
        builds = [images.build(request) for request in requests]
        if not detach:
            builds = _follow(images, builds)
    if as_json:
        print_json(builds)
    for build in builds if not as_json else ():
        if detach:
            echo(build.id)
        elif build.state is BuildState.DONE:
            echo(f"{build.name} {build.digest}")
    _raise_first_failure(builds)


def _request(recipe: str, options: RemoteBuildOptions) -> BuildRequest:
    namespace, name, tag = options.namespace, "", options.tag
    if options.name:
        if options.tag and ":" in options.name:
            raise click.UsageError("give --tag or a tag in --name, not both")
        said = parse_name(options.name, options.namespace)
        namespace, name = said.namespace, said.name
        tag = said.tag if ":" in options.name else options.tag
    return BuildRequest(
        recipe=recipes.load(recipe).model_dump(mode="json"),
        namespace=namespace,
        name=name,
        tag=tag,
        visibility=Visibility.PUBLIC if options.public else Visibility.PRIVATE,
        force=options.force,
    )


def _follow(images: Images, builds: Sequence[Build]) -> list[Build]:
    """Wait until all builds have ended. They continue when this command is interrupted."""
    with step_bars() as bars:
        tasks = {b.id: bars.add_task(f"{b.name}: {b.step}", total=1.0) for b in builds}

        def show(build: Build) -> None:
            text = f"{build.name}: {build.step or build.state.lower()}"
            bars.update(tasks[build.id], description=text, completed=build.progress)

        try:
            # A builder takes them one after another, in this order.
            return [images.follow_build(build.id, show) for build in builds]
        except KeyboardInterrupt:
            left = " ".join(build.id for build in builds)
            echo(f"the service continues; see `vmjobs image builds {left}`", err=True)
            raise


def _raise_first_failure(builds: Sequence[Build]) -> None:
    failed = [build for build in builds if build.state is BuildState.FAILED]
    for build in failed[1:]:
        echo(f"vmjobs: {build.name}: {build.message} [{build.code}]", err=True)
    if failed:
        raise error_from_code(failed[0].code, failed[0].message, failed[0].hint)


@click.command("builds")
@click.argument("ids", metavar="[BUILD...]", nargs=-1)
@click.option("--cancel", is_flag=True, help="Cancel BUILDs; they publish nothing.")
@click.option("--wait", is_flag=True, help="Wait until BUILDs have ended.")
@click.option("--limit", type=click.IntRange(1, 1000), default=20, show_default=True)
@json_option
def builds(ids: tuple[str, ...], cancel: bool, wait: bool, limit: int, as_json: bool) -> None:
    """Show builds of images by the service: BUILDs, or your newest."""
    if (cancel or wait) and not ids:
        raise click.UsageError("--cancel and --wait need the ids of builds")
    if cancel and wait:
        raise click.UsageError("give --cancel or --wait, not both")
    with repository() as images:
        if cancel:
            found = [images.cancel_build(build) for build in ids]
        elif ids:
            found = [images.build_state(build) for build in ids]
            found = _follow(images, found) if wait else found
        else:
            found = list(images.builds(limit))
    if as_json:
        print_json(found)
    else:
        rows = [(b.id, b.name, b.state, format_age(b.created), _result_text(b)) for b in found]
        print_table(("BUILD", "IMAGE", "STATE", "CREATED", "DIGEST, STEP OR REASON"), rows, ids=True)
    if wait:
        _raise_first_failure(found)


def _result_text(build: Build) -> str:
    if build.state is BuildState.DONE:
        return build.digest
    if build.state is BuildState.FAILED:
        return f"{build.code}: {build.message.partition(chr(10))[0]}"
    return build.step
