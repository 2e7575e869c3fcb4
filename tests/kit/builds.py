"""Requests for image builds."""

from __future__ import annotations

from typing import Any

from images import recipe as recipes
from repository.images import Viewer
from repository.service import Repository
from vmjobs.wire import Build, BuildRequest

ADA = Viewer("ada")
RECIPE = recipes.load("generic").model_dump(mode="json")


def wish(recipe: dict[str, Any] | None = None, **changes: Any) -> BuildRequest:
    return BuildRequest.model_validate({"recipe": {**RECIPE, **(recipe or {})}, **changes})


def create(repository: Repository, viewer: Viewer = ADA, **changes: Any) -> Build:
    return repository.builds.create(viewer, wish(**changes))
