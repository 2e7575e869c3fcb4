"""Streams grow by offset up to their limit, also if writes are repeated."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from repository.jobs.streams import StreamStore
from vmjobs.errors import Conflict, InvalidRequest, Unavailable
from vmjobs.model import StreamName

JOB, ATTEMPT, OUT = "a" * 32, "b" * 32, StreamName.OUT


def test_any_order_of_repeats_gives_the_same_bytes(tmp_path: Path) -> None:
    store = StreamStore(tmp_path, 10_000)
    chance = random.Random(7)
    data = chance.randbytes(5000)
    end = 0
    while end < len(data):
        start = chance.randint(0, end)
        stop = min(len(data), start + chance.randint(1, 500))
        end = store.append(JOB, ATTEMPT, OUT, start, data[start:stop])
    assert b"".join(store.open(JOB, ATTEMPT, OUT).chunks()) == data


def test_writers_at_once(tmp_path: Path) -> None:
    store = StreamStore(tmp_path, 1_000_000)
    data = bytes(range(256)) * 100

    def write(_number: int) -> None:
        for start in range(0, len(data), 100):
            store.append(JOB, ATTEMPT, OUT, start, data[start : start + 100])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    assert b"".join(store.open(JOB, ATTEMPT, OUT).chunks()) == data


def test_a_reader_sees_the_stream_as_it_was(tmp_path: Path) -> None:
    store = StreamStore(tmp_path, 100)
    store.append(JOB, ATTEMPT, OUT, 0, b"0123456789")
    reader = store.open(JOB, ATTEMPT, OUT)
    store.append(JOB, ATTEMPT, OUT, 10, b"later")
    assert b"".join(reader.chunks()) == b"0123456789"
    assert b"".join(reader.chunks(3, 6)) == b"345"
    assert b"".join(reader.chunks(8, 1000)) == b"89"
    assert b"".join(reader.chunks(10)) == b""


def test_limits_and_names(tmp_path: Path) -> None:
    store = StreamStore(tmp_path, 4)
    assert store.append(JOB, ATTEMPT, OUT, 0, b"012345") == 4
    assert store.append(JOB, ATTEMPT, OUT, 6, b"67") == 4
    assert store.append(JOB, ATTEMPT, OUT, 2, b"2345") == 4
    with pytest.raises(Conflict):
        store.append(JOB, ATTEMPT, StreamName.ERR, 1, b"hole")
    with pytest.raises(InvalidRequest):
        store.append(JOB, ATTEMPT, OUT, -1, b"x")
    for job, attempt in (("../x", ATTEMPT), (JOB, "../../x"), (JOB, "")):
        with pytest.raises(InvalidRequest):
            store.open(job, attempt, OUT)


def test_a_store_that_cannot_be_written(path: Path) -> None:
    path.write_text("not a directory")
    store = StreamStore(path, 100)
    for ask in (
        lambda: store.append(JOB, ATTEMPT, OUT, 0, b"x"),
        lambda: store.open(JOB, ATTEMPT, OUT),
    ):
        with pytest.raises(Unavailable):
            ask()
