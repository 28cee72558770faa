"""Whether the engine beside a sidecar lives, from the signs of life in its ring; and the reverse.

    beats, head --look--> moved: alive      still for `silent_seconds`: stalled, until one moves

Pure: the sidecar looks at regular times and passes them. A sidecar that was itself stopped has not
looked, and what it has not looked at does not count as silence.
"""

#: how often the sidecar looks
LOOK_SECONDS = 0.5
#: of the time between two looks, what counts as silence at most
MAX_COUNTED_SECONDS = 2 * LOOK_SECONDS


class EnginePulse:
    """Judges an engine that gives signs of life; one that never gave any is never judged."""

    def __init__(self, silent_seconds: float) -> None:
        self._silent_seconds = silent_seconds
        #: (beats, head) at the last look
        self._seen = (0, 0)
        self._looked_at: float | None = None
        #: seconds without a sign of life, as far as they were looked at
        self.silence_seconds = 0.0
        self.is_stalled = False

    def look(self, beats: int, head: int, now: float) -> bool:
        """Take in the ring's counters; return whether `is_stalled` has changed."""
        last, self._looked_at = self._looked_at, now
        was_stalled = self.is_stalled
        if (beats, head) != self._seen or not beats or last is None:
            self._seen, self.silence_seconds, self.is_stalled = (beats, head), 0.0, False
        else:
            self.silence_seconds += min(max(now - last, 0.0), MAX_COUNTED_SECONDS)
            self.is_stalled = self.silence_seconds >= self._silent_seconds
        return self.is_stalled is not was_stalled
