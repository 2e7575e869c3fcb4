"""A cache of answers that are valid for a few seconds."""

from __future__ import annotations

from repository.images.ttl_cache import TtlCache
from tests.kit.waiting import Clock


def test_an_answer_holds_from_the_moment_of_the_question(clock: Clock) -> None:
    fresh: TtlCache[str, int] = TtlCache(3, 10, clock)
    asked = clock()
    clock.now += 2  # the time that the answer took
    fresh.keep([("a", 1)], asked)
    assert fresh.get("a") == 1
    clock.now += 0.99
    assert fresh.get("a") == 1
    clock.now += 0.01
    assert fresh.get("a") is None


def test_a_new_answer_takes_the_old_ones_place(clock: Clock) -> None:
    fresh: TtlCache[str, int] = TtlCache(3, 2, clock)
    fresh.keep([("a", 1), ("b", 1)], clock())
    clock.now += 2
    fresh.keep([("a", 2)], clock())
    clock.now += 2
    assert (fresh.get("a"), fresh.get("b")) == (2, None)
    fresh.keep([("c", 3)], clock())
    assert (fresh.get("a"), fresh.get("c"), len(fresh)) == (2, 3, 2)


def test_there_are_never_more_than_the_limit(clock: Clock) -> None:
    fresh: TtlCache[int, int] = TtlCache(3, 100, clock)
    for number in range(1000):
        fresh.keep([(number, number), (-number, number)], clock())
        assert len(fresh) <= 100
    assert fresh.get(999) == 999
    assert fresh.get(900) is None
    fresh.keep([(number, 0) for number in range(5000, 6000)], clock())
    assert len(fresh) == 100
