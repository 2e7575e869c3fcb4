"""Database rows of builds: creation from requests, updates, and conversion for callers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from pydantic import ValidationError

from images.recipe import Recipe
from repository.db.ids import new_ids
from repository.db.models import BuildRow
from repository.db.views import view_of
from repository.images import Viewer
from vmjobs.errors import Fault, InvalidRequest
from vmjobs.model import faults_of
from vmjobs.model import now as utc_now
from vmjobs.wire import Build, BuildRequest, BuildState, Visibility

#: Characters of a message that are kept: its beginning and its end.
MAX_MESSAGE_LENGTH: Final = 8000


@dataclass(frozen=True)
class BuildTask:
    """A build that a builder works on. generation: differs each time that the build is begun.

    tags: of the image, within ``namespace``.
    """

    id: str
    generation: int
    owner: Viewer
    recipe: Recipe
    namespace: str
    name: str
    tags: tuple[str, ...]
    visibility: Visibility
    force: bool


def validate_recipe(value: dict[str, Any]) -> Recipe:
    """Validate a recipe from a request.

    Raises:
        InvalidRequest: with every fault, or for what only a host of the user's own can build.
    """
    try:
        recipe = Recipe.model_validate(value)
    except (ValidationError, RecursionError) as error:
        faults = faults_of(error, "recipe.") if isinstance(error, ValidationError) else []
        listing = "; ".join(f"{fault.field}: {fault.message}" for fault in faults[:10])
        raise InvalidRequest(f"this is not a recipe: {listing}", faults=faults) from error
    if recipe.architecture not in {None, "x86_64"}:
        text = f"the recipe {recipe.name} is for {recipe.architecture}"
        raise InvalidRequest(
            f"{text}, and the service builds for x86_64 alone",
            hint="build it on a host of yours, after `make architectures`, and push it",
            faults=[Fault("recipe.architecture", "unknown_architecture", text)],
        )
    if recipe.needs_repository:
        text = f"the recipe {recipe.name} needs packages that only a site's own repository has"
        raise InvalidRequest(
            f"{text}, and the service builds from Debian's alone",
            hint="build it yourself, with --repository and --repository-key, and push it",
            faults=[Fault("recipe.needs_repository", "needs_repository", text)],
        )
    return recipe


def image_names(request: BuildRequest, recipe: Recipe) -> tuple[str, tuple[str, ...]]:
    """Return the name and the tags of the image to build."""
    tags = (request.tag,) if request.tag else tuple(dict.fromkeys((recipe.version, "latest")))
    return request.name or recipe.name, tags


def new_row(viewer: Viewer, key: str, body: dict[str, Any], name: str) -> BuildRow:
    """Create the row of a waiting build.  name: the full name of the image."""
    present = utc_now()
    return BuildRow(
        id=new_ids(1)[0],
        owner=viewer.user,
        key=key or None,
        admin=viewer.admin,
        request=body,
        name=name,
        state=BuildState.QUEUED.value,
        step="waiting for a builder",
        sent=present,
        created=present,
        updated=present,
    )


def set_progress(row: BuildRow, state: BuildState, step: str, fraction: float) -> None:
    row.state, row.step, row.updated = state.value, step, utc_now()
    row.progress = round(1000 * min(1.0, max(0.0, fraction)))


def end_build(row: BuildRow, state: BuildState, code: str, message: str, hint: str = "") -> None:
    """Record that a build has ended, and why."""
    set_progress(row, state, "", row.progress / 1000)
    row.code, row.message, row.hint = code[:32], _storable(message), _storable(hint)


def _storable(text: str) -> str:
    """Make a text storable in every database: no NUL, and a long one loses its middle."""
    text = text.replace("\0", "").encode("utf-8", "replace").decode()
    if len(text) <= MAX_MESSAGE_LENGTH:
        return text
    half = MAX_MESSAGE_LENGTH // 2
    return f"{text[:half]}\n[...]\n{text[-half:]}"


def task_of(row: BuildRow) -> BuildTask:
    """Convert a row for the builder."""
    request = BuildRequest.model_validate(row.request)
    recipe = Recipe.model_validate(request.recipe)
    name, tags = image_names(request, recipe)
    return BuildTask(
        id=row.id,
        generation=row.generation,
        owner=Viewer(row.owner, admin=row.admin),
        recipe=recipe,
        namespace=request.namespace,
        name=name,
        tags=tags,
        visibility=request.visibility,
        force=request.force,
    )


def build_view(row: BuildRow) -> Build:
    """Convert a row for users."""
    return view_of(Build, row, progress=row.progress / 1000)
