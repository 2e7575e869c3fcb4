"""What the client library and the API do with fields that they do not know."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, get_args

import pytest
import requests
from pydantic import BaseModel, ValidationError

from api.openapi import declared
from tests.kit.api_site import Site
from vmjobs.client.transport import parse
from vmjobs.errors import Unavailable
from vmjobs.model import JobSpec, Node

pytestmark = [pytest.mark.in_process, pytest.mark.settings(max_disk=64)]


def models_within(kind: Any) -> Iterator[type[BaseModel]]:
    """Every model in a type: itself, those of its fields, and so on."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        yield kind
        for field in kind.model_fields.values():
            yield from models_within(field.annotation)
    for part in get_args(kind):
        yield from models_within(part)


def refuses_unknown_fields(read: Callable[[bytes], object]) -> bool:
    try:
        read(b'{"added_later": 1}')
    except (ValidationError, Unavailable) as error:
        return "extra_forbidden" in str(error.__cause__ or error)
    return False


def test_an_unknown_field_is_a_fault_of_a_request_and_not_of_a_reply(site: Site) -> None:
    """A client may be older than the service; an agent that registers may be newer."""
    for _, _, record in declared(site.app):
        for model in {*models_within(record.body), *models_within(record.query)} - {Node}:
            assert refuses_unknown_fields(model.model_validate_json), model
        for reply in record.replies.values():
            for model in models_within(reply.body):
                assert not refuses_unknown_fields(partial(read_reply, model)), model


def test_an_agent_runs_no_job_that_it_understands_only_in_part() -> None:
    """The field that it does not know may be a limit."""
    assert refuses_unknown_fields(partial(read_reply, JobSpec, strict=True))


def read_reply(model: type[BaseModel], body: bytes, *, strict: bool = False) -> BaseModel:
    answer = requests.Response()
    answer.raw = io.BytesIO(body)
    return parse(model, answer, strict=strict)
