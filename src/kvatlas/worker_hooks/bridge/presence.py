"""How long an engine has been quiet, or away."""

from kvatlas.worker_hooks.bridge.follow_options import FollowOptions

#: a quiet engine is asked at least so often
MAX_QUIET_SECONDS = 60.0


class Presence:
    """Begins as heard at 0; every time is the caller's."""

    def __init__(self, options: FollowOptions) -> None:
        self._options = options
        self._heard_at = 0.0
        self._quiet_seconds = options.quiet_seconds
        self._away_since: float | None = None

    @property
    def is_away(self) -> bool:
        """Whether the connection is gone."""
        return self._away_since is not None

    def note_message(self, now: float) -> None:
        """The engine has said something, perhaps because it was asked."""
        self._heard_at = now

    def note_live_message(self, now: float) -> None:
        """It has said something by itself, so that silence is worth a question soon."""
        self._heard_at, self._quiet_seconds = now, self._options.quiet_seconds

    def leave(self, now: float) -> None:
        """The connection has gone."""
        self._away_since = now

    def come_back(self) -> None:
        """The connection is there."""
        self._away_since = None

    def is_long_away(self, now: float) -> bool:
        """Whether the connection has been gone for so long that it is a reason to doubt."""
        return self._away_since is not None and now - self._away_since >= self._options.away_seconds

    def is_quiet(self, now: float) -> bool:
        """Whether an engine that is there has said nothing for so long that it is to be asked."""
        return not self.is_away and now - self._heard_at >= self._quiet_seconds

    def wait_longer(self, now: float) -> None:
        """It is asked now; be more patient the next time."""
        self._quiet_seconds = min(self._quiet_seconds * 2, MAX_QUIET_SECONDS)
        self._heard_at = now
