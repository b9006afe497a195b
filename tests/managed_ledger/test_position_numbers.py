from cepheid_managed_ledger.position_numbers import PositionNumbers
from cepheid_metadata import Position


def test_who_was_asked_for_longest_ago_goes() -> None:
    numbers = PositionNumbers(limit=2)
    first, second, third = (Position(1, entry) for entry in range(3))
    assert numbers.get(first) is None
    assert [numbers.keep(first, 0), numbers.keep(second, 20)] == [0, 20]
    assert numbers.get(first) == 0, "a number that is 0 is known"
    numbers.keep(third, 30)
    assert [numbers.get(position) for position in (first, second, third)] == [0, None, 30]
