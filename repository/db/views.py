"""Converts rows to the models that clients receive."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel

Model = TypeVar("Model", bound=BaseModel)


def view_of(model: type[Model], row: object, **computed: object) -> Model:
    """Return a row as ``model``, whose fields have the names of its columns.

    computed: fields without a column, and fields whose value differs from the column's.
    """
    return model.model_validate({**columns_of(model, row), **computed})


def columns_of(model: type[BaseModel], row: object) -> dict[str, Any]:
    """Return the columns of a row that are fields of ``model``."""
    return {name: getattr(row, name) for name in model.model_fields if hasattr(row, name)}
