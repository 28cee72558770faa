"""What the fold has to tell people, as log lines that a bad worker cannot multiply."""

import logging
import time

from kvatlas.events.streams import KV_EVENTS
from kvatlas.indexer.fold.stimuli import (
    Effect,
    ReportDivergence,
    ReportGap,
    ReportRefused,
    ReportRejected,
    ReportTakeover,
    ReportTrust,
)
from kvatlas.schemas.fleet import Trust

#: one line per kind and worker in this time; what is left out is counted in the next one
QUIET_SECONDS = 60.0
#: kinds and workers told apart; beyond that all share one line
MAX_SHOWN = 200
MAX_KEYS = 1024


class EffectLog:
    """Writes effects to a logger, at most one line per kind and worker in QUIET_SECONDS."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        #: (kind, worker) -> when it was last written, and how many were left out since
        self._written: dict[tuple[str, str], tuple[float, int]] = {}

    def report(self, effect: Effect, stream_sequence: int, *, is_history: bool) -> None:
        """Write the effect of a message; what happened before we started only at debug level."""
        match effect:
            case ReportRejected(worker, kind, reason):
                at = f"message {stream_sequence} of {KV_EVENTS}"
                if kind != "unknown":  # no letter is left about what a newer minor version says
                    at = f"{at} (see `kvatlas dead-letters`)"
                what = f"skipped {kind} in {at}: {reason}"
                self._write(("rejected " + kind, worker), what, is_history)
            case ReportRefused(instance, epoch, "instances", reason):
                # one line for all: names that somebody invents must not each have one
                what = f"{instance}, epoch {epoch}, is not taken in: {reason}"
                self._write(("refused", "(new instances)"), what, is_history)
            case ReportRefused(instance, epoch, _, reason):
                what = (
                    f"{instance}, epoch {epoch}, is not taken in: {reason}; check the clocks of"
                    " worker and broker, or who publishes in this name"
                )
                self._write(("refused epoch", instance.worker), what, is_history)
            case ReportGap(instance, epoch, expected, found):
                what = f"gap of {instance}, epoch {epoch}: expected {expected}, got {found}"
                self._write(("gap", instance.worker), what, is_history)
            case ReportTakeover(instance, epoch, replaced):
                who = f"epoch {replaced.epoch} at {replaced.base_url or 'an unknown address'}"
                what = f"{instance}: epoch {epoch} took the name of {who}, which had not gone"
                self._write(("takeover", instance.worker), what, is_history)
            case ReportDivergence(instance, tier, told, found):
                what = f"{instance} holds {told.count} in {tier.name}, the index {found.count}"
                self._write(("divergence", instance.worker), what, is_history)
            case ReportTrust(instance, epoch, trust, reasons):
                why = f" ({', '.join(reasons)})" if reasons else ""
                what = f"{instance}, epoch {epoch}: {trust}{why}"
                is_bad = trust is not Trust.exact
                self._write((trust, instance.worker), what, is_history, is_bad)

    def _write(
        self, key: tuple[str, str], what: str, is_history: bool, is_bad: bool = True
    ) -> None:
        if is_history:
            self._logger.debug("%s", what)
            return
        if key not in self._written and len(self._written) >= MAX_KEYS:
            key = ("(any)", "(others)")
        now = time.monotonic()
        written_at, num_left_out = self._written.get(key, (-QUIET_SECONDS, 0))
        if now - written_at < QUIET_SECONDS:
            self._written[key] = (written_at, num_left_out + 1)
            return
        self._written[key] = (now, 0)
        level = logging.WARNING if is_bad else logging.INFO
        more = f" ({num_left_out} more of {key[1]} left out)" if num_left_out else ""
        self._logger.log(level, "%s: %s%s", _quoted(key[1]), _quoted(what), more)


def _quoted(text: str) -> str:
    """Return others' words as part of one line of bounded length."""
    shown = text if text.isprintable() else repr(text)
    return shown if len(shown) <= MAX_SHOWN else f"{shown[:MAX_SHOWN]}..."
