"""``vmjobs image build``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import click
from rich.progress import TaskID

from images import recipe as recipes
from images.build.bootstrap import SiteRepository
from images.build.builder import build as build_image
from images.cli.remote import RemoteBuildOptions, build_remotely
from images.store.image_store import ImageEntry, ImageStore
from node.boot_test import BootTest
from vmjobs.cli.common import config, echo, json_option, print_json, print_table
from vmjobs.cli.progress import step_bars


def _complete_recipe(_ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    return [name for name in recipes.names() if name.startswith(incomplete)]


@click.command()
@click.argument("names", metavar="RECIPES...", nargs=-1, shell_complete=_complete_recipe)
@click.option("--force", is_flag=True, help="Build anew even if nothing changed.")
@click.option("--work-dir", type=click.Path(path_type=Path, file_okay=False), help="Scratch directory.")
@click.option("--list", "and_list", is_flag=True, help="List the shipped recipes and exit.")
@click.option(
    "--boot-test/--no-boot-test", default=True, help="Boot the image before it gets its name."
)
@click.option("--repository", metavar="LINE", help="Site packages: 'deb URL SUITE COMPONENT...'.")
@click.option(
    "--repository-key",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The key that signs the repository.",
)
@click.option("--remote", is_flag=True, help="Let the service build, boot and publish it.")
@click.option("--detach", is_flag=True, help="With --remote: print the build's id and exit.")
@click.option("--name", default="", metavar="NAME[:TAG]", help="With --remote: the image's name.")
@click.option("--tag", default="", help="With --remote: instead of the version and `latest`.")
@click.option("--namespace", default="", help="With --remote: namespace of the name.")
@click.option("--public", is_flag=True, help="With --remote: all users may see and boot it.")
@json_option
def build(
    names: tuple[str, ...],
    force: bool,
    work_dir: Path | None,
    and_list: bool,
    boot_test: bool,
    repository: str | None,
    repository_key: Path | None,
    remote: bool,
    detach: bool,
    name: str,
    tag: str,
    namespace: str,
    public: bool,
    as_json: bool,
) -> None:
    """Build images from RECIPES (shipped ones or files) into the local image store.

    Needs no root rights. A recipe whose inputs did not change is not built again. An image is booted
    on every hypervisor that works here, and runs its recipe's probes, before it gets its name.

    With --remote the service does all that, and publishes the images in its repository.
    """
    if and_list:
        _list(as_json)
        return
    if not names:
        raise click.UsageError("name a recipe; --list shows the recipes")
    if (repository is None) != (repository_key is None):
        raise click.UsageError("--repository and --repository-key go together")
    if remote:
        if work_dir or repository or not boot_test:
            raise click.UsageError(
                "--work-dir, --repository and --no-boot-test are for builds on this host"
            )
        options = RemoteBuildOptions(name, tag, namespace, public, force)
        build_remotely(names, options, detach=detach, as_json=as_json)
        return
    if detach or name or tag or namespace or public:
        raise click.UsageError("--detach, --name, --tag, --namespace and --public go with --remote")
    site = SiteRepository(repository, repository_key) if repository and repository_key else None
    built = build_here(names, boot_test, force=force, work_dir=work_dir, site=site)
    if as_json:
        print_json([vars(entry) for entry in built])
        return
    for entry in built:
        echo(f"{entry.name}:{entry.tag} {entry.digest}")
    sys.stdout.flush()


def build_here(
    names: Sequence[str],
    boot_test: bool,
    *,
    force: bool = False,
    work_dir: Path | None = None,
    site: SiteRepository | None = None,
) -> list[ImageEntry]:
    """Build images into the local image store, with a progress bar for each."""
    settings = config()
    store = ImageStore(settings.images)
    built = []
    with step_bars() as bars:
        for recipe in names:
            task = bars.add_task(f"{recipe}: starting", total=1.0)

            def show(step: str, fraction: float, task: TaskID = task, recipe: str = recipe) -> None:
                bars.update(task, description=f"{recipe}: {step}", completed=fraction)

            def say(text: str, task: TaskID = task) -> None:
                bars.update(task, description=text)

            test = BootTest(settings, store, say) if boot_test else None
            work = work_dir or settings.images.parent / "work"
            built.append(build_image(recipe, store, work, show, force, test, site))
            bars.update(task, description=f"{recipe}: done", completed=1.0)
    return built


def _list(as_json: bool) -> None:
    found = [recipes.load(name) for name in recipes.names()]
    if as_json:
        print_json([recipe.model_dump(mode="json") for recipe in found])
        return
    rows = [(r.name, r.version, " + ".join(r.layers[:-1]) or "-", r.description) for r in found]
    print_table(("RECIPE", "VERSION", "BASED ON", "DESCRIPTION"), rows)
