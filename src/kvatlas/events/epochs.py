"""Epochs: the number of an instance's incarnation, given once and never again."""

import logging

from kvatlas.events.bus import KeyValue
from kvatlas.events.subjects import escape_token
from kvatlas.schemas.errors import KeyExists, RevisionConflict
from kvatlas.schemas.ids import InstanceId

_logger = logging.getLogger(__name__)


def next_epoch(previous: int | None, now_ms: int) -> int:
    """Return an epoch above the previous one, and near the wall clock so that people can read it.

    The clock only helps when the bucket was lost: it keeps epochs rising across that.
    """
    return now_ms if previous is None else max(previous + 1, now_ms)


async def allocate_epoch(keys: KeyValue, instance: InstanceId, now_ms: int) -> int:
    """Take the instance's next epoch; nobody else ever gets the same.

    One compare-and-set, repeated while others are faster. Raises BusUnavailable; an epoch that
    was taken in that moment is skipped, which is no harm.
    """
    key = f"{escape_token(instance.worker)}.{instance.rank}"
    while True:
        entry = await keys.get(key)
        previous = None if entry is None else _read(key, entry.value)
        epoch = next_epoch(previous, now_ms)
        value = b"%d" % epoch
        try:
            if entry is None:
                await keys.create(key, value)
            else:
                await keys.update(key, value, entry.revision)
        except (KeyExists, RevisionConflict):
            continue
        return epoch


def _read(key: str, value: bytes) -> int | None:
    if value.isdigit():
        return int(value)
    _logger.warning("the epoch of %s is no number; going on from the clock", key)
    return None
