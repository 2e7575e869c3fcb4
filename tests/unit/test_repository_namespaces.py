"""Namespaces of users, and who may write to them."""

from __future__ import annotations

import re

import pytest

from repository.images import LIBRARY, Viewer, namespace_of
from repository.images.permissions import require_namespace
from vmjobs.errors import Forbidden

STRANGE = ["library", "Ada", "ada-0123abcd", "../..", "-ada", "ada@cern.ch", "ada/hep", "\u00e4da"]
STRANGE += ["", "ada lovelace", "ada\n", "ada\0", "\ud800", "a" * 65, "A" * 300]


@pytest.mark.parametrize("user", ["ada", "0", "ada.lovelace", "ada-lovelace", "a" * 64, "ada-0123abc"])
def test_a_name_that_can_be_one_is_the_namespace(user: str) -> None:
    assert namespace_of(user) == user


@pytest.mark.parametrize("user", STRANGE)
def test_others_get_one_of_their_own(user: str) -> None:
    made = namespace_of(user)
    assert re.fullmatch(r"[a-z0-9][a-z0-9._-]{0,63}", made)
    assert made != user
    # A user of exactly that name gets another namespace.
    assert namespace_of(made) != made
    assert made == namespace_of(user)


def test_they_all_differ() -> None:
    users = [*STRANGE, "ada", "ADA", "aDa", "ada\u200b", *(namespace_of(user) for user in STRANGE)]
    assert len({namespace_of(user) for user in users}) == len(set(users))


def test_who_writes_where() -> None:
    ada, operator = Viewer("ada"), Viewer("root", admin=True)
    assert require_namespace(ada, "") == require_namespace(ada, "ada") == "ada"
    assert require_namespace(operator, LIBRARY) == LIBRARY
    for viewer, namespace in ((ada, LIBRARY), (ada, "bob"), (operator, "ada"), (ada, "../x")):
        with pytest.raises(Forbidden):
            require_namespace(viewer, namespace)
