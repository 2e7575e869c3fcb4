"""How ``vmjobs cluster ssh`` splits its arguments."""

from __future__ import annotations

import pytest

from vmjobs.cli.cluster.ssh import open_login, split_ssh_arguments
from vmjobs.errors import InvalidRequest


@pytest.mark.parametrize(
    ("words", "options", "command"),
    [
        ("w-0", "", ""),
        ("w-0 id -u", "", "id -u"),
        ("w-0 -- id -u", "", "id -u"),
        ("-- w-0 -- id", "", "id"),
        ("-t w-0 top", "-t", "top"),
        ("-tt -v w-0", "-tt -v", ""),
        ("-L 80:here:80 -N w-0", "-L 80:here:80 -N", ""),
        ("-NL80:here:80 w-0", "-NL80:here:80", ""),
        ("-NL 80:here:80 w-0", "-NL 80:here:80", ""),
        ("-l root w-0 rsync --server . /x", "-l root", "rsync --server . /x"),
    ],
)
def test_options_go_before_the_vm(words: str, options: str, command: str) -> None:
    assert split_ssh_arguments(words.split()) == (options.split(), "w-0", command.split())


@pytest.mark.parametrize("words", ["", "--", "-t", "-L 80:x:80", "--loud w-0", "-Z w-0"])
def test_what_is_no_login_is_said_at_once(words: str) -> None:
    with pytest.raises(InvalidRequest):
        split_ssh_arguments(words.split())


@pytest.mark.parametrize("name", ["workers", "-1", "workers-", "workers-one", "root@workers-x"])
def test_a_name_that_no_vm_has(name: str) -> None:
    with pytest.raises(InvalidRequest, match="not the name"), open_login(name):
        pass
