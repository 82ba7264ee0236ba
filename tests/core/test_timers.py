"""Timers as data."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pushkv.core.timers import Timers


def test_the_first_is_next_whatever_happens() -> None:
    timers = Timers()
    assert timers.next() is None
    timers.set("b", 2.0)
    timers.set("a", 1.0)
    assert timers.next() == 1.0
    timers.set("a", 3.0)
    assert timers.next() == 2.0
    timers.cancel("b")
    timers.cancel("never set")
    assert timers.next() == 3.0
    assert "a" in timers
    assert "b" not in timers


def test_take_gives_what_is_due_in_order_and_once() -> None:
    timers = Timers()
    for name, when in (("c", 3.0), ("a", 1.0), ("b", 1.0), ("late", 9.0)):
        timers.set(name, when)
    assert timers.take(0.5) == []
    assert timers.take(3.0) == ["a", "b", "c"]
    assert timers.take(3.0) == []
    assert list(timers.pending()) == ["late"]


@given(
    st.lists(
        st.tuples(st.sampled_from("sct"), st.integers(0, 4), st.integers(0, 9)),
        max_size=50,
    )
)
def test_against_a_plain_dict(calls: list[tuple[str, int, int]]) -> None:
    timers, model = Timers(), dict[int, float]()
    for call, name, when in calls:
        if call == "s":
            timers.set(name, when)
            model[name] = when
        elif call == "c":
            timers.cancel(name)
            model.pop(name, None)
        else:
            due = {n for n, w in model.items() if w <= when}
            assert set(timers.take(when)) == due
            model = {n: w for n, w in model.items() if n not in due}
        assert timers.next() == min(model.values(), default=None)
        assert set(timers.pending()) == set(model)


def test_timers_that_are_moved_for_ever_take_no_more_room() -> None:
    timers = Timers()
    for turn in range(10_000):
        timers.set(turn % 8, turn)
    assert len(timers) == 8
    assert len(timers._heap) <= 64 + 2 * 8
    assert timers.next() == 9992
