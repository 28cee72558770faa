"""The names of our streams and buckets, their default limits, and how subjects match."""

from kvatlas.events.bus import StreamSpec

KV_EVENTS = "KV_EVENTS"
KV_DECISIONS = "KV_DECISIONS"
KV_DEAD_LETTERS = "KV_DEAD_LETTERS"

#: lease of each instance, with a time to live
LEASES_BUCKET = "kv_leases"
#: newest epoch of each instance, kept for good
EPOCHS_BUCKET = "kv_epochs"

DAY_SECONDS = 86_400.0
MIB = 1 << 20
GIB = 1 << 30


def events_stream(
    max_bytes: int = GIB, max_age_seconds: float = DAY_SECONDS, replicas: int = 1
) -> StreamSpec:
    """Return the spec of the log: everything that changes index state, in one total order.

    One message of 64 blocks takes about 1.2 KB. Inventories must come more often than
    `max_age_seconds`, or a new reader never gets out of unknown history.
    """
    return StreamSpec(
        name=KV_EVENTS,
        subjects=("kv.events.>", "kv.control.>"),
        max_bytes=max_bytes,
        max_age_seconds=max_age_seconds,
        replicas=replicas,
    )


def decisions_stream(
    max_bytes: int = GIB, max_age_seconds: float = 7 * DAY_SECONDS, replicas: int = 1
) -> StreamSpec:
    """Return the spec of the routers' decisions; losing old ones costs explanations only."""
    return StreamSpec(
        name=KV_DECISIONS,
        subjects=("kv.decisions.>",),
        max_bytes=max_bytes,
        max_age_seconds=max_age_seconds,
        replicas=replicas,
    )


def dead_letters_stream(
    max_bytes: int = 64 * MIB, max_age_seconds: float = 7 * DAY_SECONDS, replicas: int = 1
) -> StreamSpec:
    """Return the spec of the dead letters: what no reader of the log could read, and why.

    One message a subject, so that replicas which all find the same leave one letter.
    """
    return StreamSpec(
        name=KV_DEAD_LETTERS,
        subjects=("kv.dead.>",),
        max_bytes=max_bytes,
        max_age_seconds=max_age_seconds,
        replicas=replicas,
        max_messages_per_subject=1,
    )


def subject_matches(pattern: str, subject: str) -> bool:
    """Say whether a subject is in a pattern: `*` is one token, a last `>` one or more."""
    wanted, tokens = pattern.split("."), subject.split(".")
    if wanted[-1] == ">":
        wanted.pop()
        if len(tokens) <= len(wanted):
            return False
        tokens = tokens[: len(wanted)]
    return len(wanted) == len(tokens) and all(
        want in ("*", token) for want, token in zip(wanted, tokens, strict=True)
    )
