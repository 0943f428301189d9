"""Locking grows until it is refused, ends near the true limit, and nothing stays locked."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain_cli.errors import DeviceError
from megatrain_cli.measure.lockable import Locker, find_lockable

PAGE = 4096


class Driver:
    """Locks up to so many bytes, and remembers which."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.locked: dict[int, int] = {}
        self.refusals = 0

    def lock(self, address: int, num_bytes: int) -> None:
        if sum(self.locked.values()) + num_bytes > self.most:
            self.refusals += 1
            raise DeviceError("The driver refused.")
        assert address % PAGE == 0
        self.locked[address] = num_bytes

    def unlock(self, address: int) -> None:
        del self.locked[address]


@given(st.integers(0, 300), st.integers(1, 300), st.integers(1, 20))
def test_what_is_found_is_the_limit_to_within_a_first_step(
    most: int, limit: int, first: int
) -> None:
    driver = Driver(most * PAGE)
    with Locker(driver.lock, driver.unlock) as locker:
        found = find_lockable(locker.lock, limit * PAGE, first * PAGE)
        assert sum(driver.locked.values()) == found.num_bytes
        limit = limit // first * first
    assert driver.locked == {}
    assert found.refused == (driver.refusals > 0) == (most < limit)
    if found.refused:
        assert (most - first) * PAGE < found.num_bytes <= most * PAGE
    else:
        assert found.num_bytes == limit * PAGE


def test_steps_double_and_are_halved_after_a_refusal() -> None:
    asked: list[int] = []
    left = 25

    def lock(size: int) -> bool:
        nonlocal left
        asked.append(size)
        if size > left:
            return False
        left -= size
        return True

    found = find_lockable(lock, 1000, 1)
    assert asked == [1, 2, 4, 8, 16, 8, 8, 4, 2, 2, 1]
    assert (found.num_bytes, found.refused) == (25, True)


def test_no_step_begins_when_time_is_up() -> None:
    answers = iter([True, True, False])
    found = find_lockable(lambda size: True, 1000, 10, lambda: next(answers))
    assert (found.num_bytes, found.refused) == (30, False)


def test_everything_is_unlocked_when_something_fails() -> None:
    driver = Driver(100 * PAGE)

    def lock_and_fail() -> None:
        with Locker(driver.lock, driver.unlock) as locker:
            assert locker.lock(PAGE)
            assert locker.lock(3 * PAGE)
            assert len(driver.locked) == 2
            raise RuntimeError("on the way")

    with pytest.raises(RuntimeError, match="on the way"):
        lock_and_fail()
    assert driver.locked == {}


def test_a_range_that_the_system_has_not_is_a_refusal() -> None:
    driver = Driver(1 << 62)
    with Locker(driver.lock, driver.unlock) as locker:
        assert not locker.lock(1 << 60)
    assert driver.locked == {}
