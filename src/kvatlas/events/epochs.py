"""Epochs: the number of an instance's incarnation, given once and never again.

An epoch is the time in ms since 1970 at which it was taken, or the one after the last where that is
higher. So one far ahead of the clock is a mistake or a forgery, and believing it would leave no
number for those that follow.
"""

import logging

from kvatlas.events.bus import Entry, KeyValue
from kvatlas.events.subjects import escape_token
from kvatlas.schemas.errors import KeyExists, RevisionConflict
from kvatlas.schemas.ids import InstanceId

#: how far an epoch may be ahead of the broker's clock: more than any two clocks differ
MAX_AHEAD_MS = 24 * 3600 * 1000
#: and how far above the one before it in any case: epochs that begin within a ms
MAX_STEP = 1_000
#: digits of an epoch in its bucket
MAX_DIGITS = 16

_logger = logging.getLogger(__name__)


def next_epoch(previous: int | None, now_ms: int) -> int:
    """Return an epoch above the previous one, and near the wall clock so that people can read it.

    The clock only helps when the bucket was lost: it keeps epochs rising across that.
    """
    return max(now_ms, 1) if previous is None else max(previous + 1, now_ms)


def is_plausible(epoch: int, previous: int, clock_ms: int) -> bool:
    """Say whether an epoch may follow a previous one (0 for none) at a time."""
    return epoch <= max(previous + MAX_STEP, clock_ms + MAX_AHEAD_MS)


async def allocate_epoch(keys: KeyValue, instance: InstanceId, now_ms: int, above: int = 0) -> int:
    """Take the instance's next epoch, above one that is known; nobody else ever gets the same.

    One compare-and-set, repeated while others are faster. What is no epoch, or one far ahead of
    the clock, is replaced. A clock of ours that is far ahead of the broker's is not followed:
    readers would refuse its epochs. Raises BusUnavailable; an epoch that was taken in that moment
    is skipped, which is no harm.
    """
    key = f"{escape_token(instance.worker)}.{instance.rank}"
    while True:
        entry = await keys.get(key)
        previous = None if entry is None else _read(entry, now_ms)
        known = max(above, previous or 0)
        epoch = next_epoch(known or None, now_ms)
        value = b"%d" % epoch
        try:
            if entry is None:
                await keys.create(key, value)
            else:
                await keys.update(key, value, entry.revision)
        except (KeyExists, RevisionConflict):
            continue
        written = await keys.get(key)
        broker_ms = 0 if written is None else written.written_ms
        if not broker_ms or is_plausible(epoch, known, broker_ms):
            return epoch
        _logger.error(
            "the clock of this host is %.1f days ahead of the broker's: the epoch of %s follows"
            " the broker's; set the clock",
            (now_ms - broker_ms) / 86_400_000,
            instance,
        )
        now_ms = broker_ms


def _read(entry: Entry, now_ms: int) -> int | None:
    """Return the epoch in the bucket, or None (and log) where it is none that can be followed."""
    text = entry.value
    if not text.isdigit() or len(text) > MAX_DIGITS:
        shown = text[:MAX_DIGITS]
        _logger.warning(
            "the epoch of %s is no number of at most %d digits but %d bytes, %r...; it is replaced"
            " by the clock",
            entry.key,
            MAX_DIGITS,
            len(text),
            shown,
        )
        return None
    epoch, clock_ms = int(text), max(now_ms, entry.written_ms)
    if not is_plausible(epoch, 0, clock_ms):
        _logger.warning(
            "the epoch of %s is %d, %.1f days ahead of the clock; it is replaced by the clock",
            entry.key,
            epoch,
            (epoch - clock_ms) / 86_400_000,
        )
        return None
    return epoch
