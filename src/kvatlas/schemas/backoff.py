"""The pause before something that has failed is tried again."""


class Backoff:
    """Doubles from `first` to `last` seconds; begins anew after `reset`."""

    def __init__(self, first: float, last: float) -> None:
        self._first, self._last = first, last
        self._next = first

    def next_seconds(self) -> float:
        """Return how long to wait now, after one more failure."""
        seconds, self._next = self._next, min(2 * self._next, self._last)
        return seconds

    def reset(self) -> None:
        """Note that it has worked."""
        self._next = self._first
