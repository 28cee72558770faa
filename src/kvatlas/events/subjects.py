"""The subjects of the bus, and how names become tokens of a subject.

    kv.events.<model>.<worker>.<rank>     an instance's own events; only it may publish there
    kv.control.<worker>.<rank>            records about an instance by others
    kv.lease.<worker>.<rank>              request: lease blocks at the instance's sidecar
    kv.inventory.<worker>.<rank>          request: publish your inventory
    kv.decisions.<model>                  decisions of routers
    kv.dead.<worker>.<stream sequence>    what stands there in the log and could not be read
    kv.routers                            announcements of routers to one another
    kv.router.<id>                        request: a decision of this router

A token keeps letters, digits, `-` and `_`; every other byte of the UTF-8 name becomes `=XX`
(upper-case hex), an empty name becomes `=`. So names never collide and never split a subject.
"""

import re
from functools import lru_cache

from kvatlas.schemas.errors import InvalidSubject
from kvatlas.schemas.ids import MAX_RANK, InstanceId

#: where routers tell one another what they gave to whom
ROUTERS = "kv.routers"

#: characters of a worker's name in the subject of letters
MAX_LETTERS_TOKEN = 512
_RANK = re.compile(r"0|[1-9][0-9]{0,9}")
_PLAIN = re.compile(rb"[A-Za-z0-9_-]")
_TOKEN = re.compile(r"(?:[A-Za-z0-9_-]|=[0-9A-F]{2})+")


@lru_cache(maxsize=4096)
def escape_token(name: str) -> str:
    """Return the name as one token of a subject or key.

    Raises InvalidSubject for what is no text, such as bytes of a command line that are no UTF-8.
    """
    if not name:
        return "="
    try:
        units = (bytes([unit]) for unit in name.encode())
    except UnicodeEncodeError as error:
        raise InvalidSubject(repr(name)) from error
    return "".join(u.decode() if _PLAIN.match(u) else f"={u[0]:02X}" for u in units)


def unescape_token(token: str) -> str:
    """Return the name that a token stands for; raises InvalidSubject."""
    if token == "=":
        return ""
    if not _TOKEN.fullmatch(token):
        raise InvalidSubject(token)
    plain = re.sub(r"=([0-9A-F]{2})", lambda found: chr(int(found[1], 16)), token)
    try:
        return plain.encode("latin-1").decode()
    except UnicodeDecodeError as error:
        raise InvalidSubject(token) from error


def events_subject(model: str, instance: InstanceId) -> str:
    """Return where an instance publishes its events."""
    return f"kv.events.{escape_token(model)}.{_instance(instance)}"


def control_subject(instance: InstanceId) -> str:
    """Return where others publish records about an instance."""
    return f"kv.control.{_instance(instance)}"


def lease_subject(instance: InstanceId) -> str:
    """Return where an instance's sidecar answers lease requests."""
    return f"kv.lease.{_instance(instance)}"


def inventory_subject(instance: InstanceId) -> str:
    """Return where an instance's sidecar is asked for its inventory."""
    return f"kv.inventory.{_instance(instance)}"


def decisions_subject(model: str) -> str:
    """Return where routers publish decisions about a model."""
    return f"kv.decisions.{escape_token(model)}"


def dead_letter_subject(worker: str, stream_sequence: int) -> str:
    """Return where the letter about a message of the log goes; `worker` may be empty (unknown)."""
    return f"kv.dead.{_letters_token(worker)}.{stream_sequence}"


def dead_letters_of(worker: str) -> str:
    """Return the pattern of all letters about a worker's messages."""
    return f"kv.dead.{_letters_token(worker)}.*"


def _letters_token(worker: str) -> str:
    # whoever writes rubbish may call itself what it likes
    return escape_token(worker)[:MAX_LETTERS_TOKEN]


def router_subject(router_id: str) -> str:
    """Return where a router answers questions about its decisions."""
    return f"kv.router.{escape_token(router_id)}"


def parse_events_subject(subject: str) -> tuple[str, InstanceId]:
    """Return (model, instance) of a subject made by `events_subject`; raises InvalidSubject."""
    match subject.split("."):
        case ["kv", "events", model, worker, token] if (rank := rank_of(token)) is not None:
            return unescape_token(model), InstanceId(unescape_token(worker), rank)
        case _:
            raise InvalidSubject(subject)


def parse_instance_subject(subject: str) -> InstanceId:
    """Return the instance of a control, lease or inventory subject; raises InvalidSubject."""
    match subject.split("."):
        case ["kv", "control" | "lease" | "inventory", worker, token] if (
            rank := rank_of(token)
        ) is not None:
            return InstanceId(unescape_token(worker), rank)
        case _:
            raise InvalidSubject(subject)


def rank_of(token: str) -> int | None:
    """Return the rank that a token stands for; None for any other token, however long."""
    rank = int(token) if _RANK.fullmatch(token) else MAX_RANK + 1
    return rank if rank <= MAX_RANK else None


def worker_of(subject: str) -> str:
    """Return whose subject of the log it is, by its own word; empty where it tells none."""
    try:
        if subject.startswith("kv.control."):
            return parse_instance_subject(subject).worker
        return parse_events_subject(subject)[1].worker
    except InvalidSubject:
        return ""


def _instance(instance: InstanceId) -> str:
    return f"{escape_token(instance.worker)}.{instance.rank}"
