"""Windows and budget of published bytes: pause at the limit, resume at half, nothing forgotten."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cepheid_broker.publish_window import PublishBudget, PublishWindow


class Socket:
    def __init__(self, limit_bytes: int, budget: PublishBudget) -> None:
        self.reading = True
        self.window = PublishWindow(limit_bytes, budget, self.pause, self.resume)

    def pause(self) -> None:
        assert self.reading, "paused twice"
        self.reading = False

    def resume(self) -> None:
        assert not self.reading, "resumed twice"
        self.reading = True


def test_a_window_pauses_at_its_limit_and_resumes_at_half() -> None:
    socket = Socket(100, PublishBudget(10_000))
    socket.window.take(99)
    assert socket.reading
    socket.window.take(50)
    assert not socket.reading
    socket.window.give_back(98)
    assert not socket.reading, "51 of 100 is above half"
    socket.window.give_back(1)
    assert socket.reading


def test_a_full_budget_pauses_those_who_publish_and_resumes_them_together() -> None:
    budget = PublishBudget(100)
    first, second, idle = (Socket(1000, budget) for _ in range(3))
    first.window.take(60)
    second.window.take(50)
    first.window.take(10)
    assert (first.reading, second.reading, idle.reading) == (False, False, True)
    second.window.give_back(50)
    assert not first.reading, "70 of 100 is above half"
    first.window.give_back(20)
    assert (first.reading, second.reading) == (True, True)


def test_a_closed_window_is_not_resumed() -> None:
    budget = PublishBudget(100)
    socket = Socket(1000, budget)
    socket.window.take(100)
    socket.window.close()
    socket.window.give_back(100)
    assert (socket.reading, budget.used_bytes) == (False, 0)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 80)), max_size=60))
def test_whatever_happens_everybody_reads_again_once_everything_is_answered(steps: list[tuple[int, int]]) -> None:
    budget = PublishBudget(150)
    sockets = [Socket(100, budget) for _ in range(3)]
    taken: list[tuple[Socket, int]] = []
    for index, size_bytes in steps:
        if sockets[index].reading:
            sockets[index].window.take(size_bytes)
            taken.append((sockets[index], size_bytes))
        elif taken:
            socket, size = taken.pop(0)
            socket.window.give_back(size)
    for socket, size in taken:
        socket.window.give_back(size)
    assert budget.used_bytes == 0
    assert all(socket.reading for socket in sockets)
