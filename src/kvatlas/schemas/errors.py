"""Every error that kvatlas raises, as one tree.

KvatlasError
  InvalidInput                 what somebody sent or wrote is wrong; names the field
    MalformedSignal            an announcement of a router cannot be read
    MalformedBatch             a payload is no event batch
      BatchTooLarge            more bytes than the limit
      UnsupportedVersion       a newer major version of the wire
    MalformedLetter            a message among the dead letters is none
    MalformedEvent             a record of the ring is no event of an engine
    InvalidBlock               token, block size or extra that cannot be hashed
    InvalidSetting             a setting that is unknown or out of range
    InvalidSubject             a subject outside the grammar
    InvalidTrace               a line of a request trace
    CaptureUnreadable          a file that is no recording of an engine's batches
    CaptureDamaged             a recording that ends, or goes wrong, within a batch
    InvalidRequest             a field of a request, over HTTP or on the command line
      PromptTooLarge           more tokens or bytes than the limit
      RequestTooSlow           a body that does not come to its end
      UnsupportedContentType   a body in a format that is not read
  NotFound                     a name that nothing answers to
    NotAnsweredHere            another process of the same role has the answer
    UnknownModel               no worker serves the model, nor did one lately
    UnknownDecision            no decision with this id
    UnknownPolicy              no policy of this name
    UnknownInstance            no instance of the index with this number
    UnknownWorker              no living worker of this name and rank
    UnknownLetter              no dead letter about this message of the log
  Unavailable                  something that we need is away for now
    BusUnavailable             no broker, or it does not answer
      RequestTimedOut          nobody answered within the deadline
      NoResponder              nobody listens on the subject
    IndexUnavailable           no index has been published for this process to read
    RequestFailed              who serves the subject answered with an error
    FolderUnusable             a folder that we need cannot be made, read or written
    ServerNotStarted           the embedded nats-server did not come up
    NoCandidate                no live worker for the request
    TransportUnavailable       a transfer library is missing or refuses
    RingUnusable               the file between engine and sidecar is no ring, or is taken
    EndpointUnusable           an engine's socket that cannot be opened
    SidecarUnavailable         the sidecar does not answer its engine
    NoAnswer                   a server that the doctor asks is away or answers something else
      KeyRefused               an engine wants another API key
    EngineStopped              the engine ended while a request was in it
    ArchiveUnavailable         the archive's database does not answer
      ArchiveDamaged           what it holds is not what an archiver writes
    PoolUnreadable             a file that is no serve pool, or not yet
    SidecarEnded               a sidecar ended before its worker did
    RouterNotStarted           a router process did not begin to listen
    WorkerNotStarted           a reference worker did not come up
    FleetNotStarted            the demo's fleet did not come up
    RequestRefused             a request of the demo was refused for good
    DemoStopped                a signal ended a demo before its end
    RequestLost                no living worker took a request of the demo
  Conflict                     somebody else was first
    ForeignFile                a file or folder in the way that kvatlas has not made
    KeyExists                  create of a key that exists
    RevisionConflict           compare-and-set lost
    StreamRefused              the broker refuses a stream or a message
      MessageTooLarge          more bytes than the broker takes
    Fenced                     a newer epoch of this instance is alive
    ArchiveMismatch            the archive holds another log than the stream has
    ArchiveNewer               the archive was written by a later version
    PoolInUse                  another live process owns the serve pool
    SlotInUse                  a slot of the serve pool that is not empty
  LimitReached                 a bound that protects the service
    IndexFull                  no instance number or table space left
    PoolTooLarge               less shared memory than the serve pool needs
"""

from collections.abc import Sequence
from pathlib import Path

from kvatlas.schemas.known_names import few_names


class KvatlasError(Exception):
    """The root: catch it to catch everything of ours."""


class InvalidInput(KvatlasError):
    """What somebody sent or wrote is wrong."""


class MalformedSignal(InvalidInput):
    """An announcement of a router that cannot be read."""


class MalformedBatch(InvalidInput):
    """A payload is no event batch; the text says where."""


class BatchTooLarge(MalformedBatch):
    """A payload has more bytes than a batch may have."""

    def __init__(self, num_bytes: int, limit_bytes: int) -> None:
        super().__init__(f"a batch of {num_bytes} bytes, the limit is {limit_bytes}")
        self.num_bytes, self.limit_bytes = num_bytes, limit_bytes


class UnsupportedVersion(MalformedBatch):
    """A payload was written by a newer major version."""

    def __init__(self, found: int, supported: int) -> None:
        super().__init__(f"wire version {found}, this reader knows up to {supported}")
        self.found, self.supported = found, supported


class MalformedLetter(InvalidInput):
    """A message among the dead letters is none, or of a newer major version."""


class MalformedEvent(InvalidInput):
    """A record of the ring is no event of an engine."""


class InvalidBlock(InvalidInput):
    """Tokens, block size or extras that cannot be hashed."""


class InvalidSetting(InvalidInput):
    """A setting is unknown, out of range or missing; without a source the problem says it all."""

    def __init__(self, key: str, source: str, problem: str) -> None:
        super().__init__(f"setting {key} from {source}: {problem}" if source else problem)
        self.key, self.source, self.problem = key, source, problem


class InvalidSubject(InvalidInput):
    """A subject that the grammar does not produce."""

    def __init__(self, subject: str) -> None:
        super().__init__(f"no kvatlas subject: {subject!r}")
        self.subject = subject


class InvalidTrace(InvalidInput):
    """A line of a request trace cannot be played."""

    def __init__(self, file: Path, line: int, problem: str) -> None:
        super().__init__(f"{file}:{line}: {problem}")
        self.file, self.line, self.problem = file, line, problem


class CaptureUnreadable(InvalidInput):
    """A file is no recording of an engine's batches, or cannot be opened."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(f"capture {path}: {problem}")
        self.path, self.problem = path, problem


class CaptureDamaged(InvalidInput):
    """A recording is whole up to `offset` only."""

    def __init__(self, path: Path, offset: int, problem: str) -> None:
        super().__init__(f"capture {path}: damaged at byte {offset}: {problem}")
        self.path, self.offset, self.problem = path, offset, problem


class InvalidRequest(InvalidInput):
    """A field of a request is wrong; `field` names it."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field, self.problem = field, problem


class PromptTooLarge(InvalidRequest):
    """A prompt or body over the limit."""


class RequestTooSlow(InvalidRequest):
    """A body that does not come to its end."""


class UnsupportedContentType(InvalidRequest):
    """A body in a format that is not read."""


class NotFound(KvatlasError):
    """A name that nothing answers to."""


class NotAnsweredHere(NotFound):
    """Another process of the same role has the answer."""


class UnknownModel(NotFound):
    """No worker serves the model; the text names the first of those that are `served`."""

    def __init__(self, model: str, served: Sequence[str] = ()) -> None:
        self.model, self.served = model, served
        known = f"; served are {few_names(served)}" if served else ""
        super().__init__(f"no worker serves model {model!r}{known}")


class UnknownDecision(NotFound):
    """No decision with this id is kept; an `archive` is named with its `newest` ids."""

    def __init__(self, decision_id: str, archive: str = "", newest: Sequence[str] = ()) -> None:
        text = f"no decision {decision_id!r}"
        if archive and not newest:
            text = f"{archive} holds no decision: has a router answered /v1/route meanwhile?"
        elif archive:
            text = (
                f"{text} in {archive}: expected a `decision_id` of an answer of /v1/route; the"
                f" newest are {', '.join(newest)}; without an id the newest is explained"
            )
        super().__init__(text)
        self.decision_id, self.newest = decision_id, newest


class UnknownPolicy(NotFound):
    """No policy of this name."""

    def __init__(self, name: str, known: tuple[str, ...]) -> None:
        super().__init__(f"no policy {name!r}; known: {', '.join(known)}")
        self.name, self.known = name, known


class UnknownLetter(NotFound):
    """No dead letter about a message of the log, or not any more."""

    def __init__(self, stream_sequence: int) -> None:
        super().__init__(f"no dead letter about message {stream_sequence} of the log")
        self.stream_sequence = stream_sequence


class UnknownInstance(NotFound):
    """The index gave no such instance number, or has forgotten it."""

    def __init__(self, instance: int) -> None:
        super().__init__(f"the index has no instance {instance}")
        self.instance = instance


class UnknownWorker(NotFound):
    """No worker of this name has a lease; the text names the first of those that are `living`."""

    def __init__(self, worker: str, rank: int | None, living: Sequence[str] = ()) -> None:
        self.worker, self.rank, self.living = worker, rank, living
        of_rank = "" if rank is None else f" with rank {rank}"
        known = f"; living are {few_names(living)}" if living else ""
        super().__init__(f"no living worker {worker!r}{of_rank}{known}")


class Unavailable(KvatlasError):
    """Something that we need is away for now; a later try may succeed."""


class BusUnavailable(Unavailable):
    """There is no broker, or it does not answer."""


class IndexUnavailable(Unavailable):
    """No index has been published for this process to read."""


class RequestTimedOut(BusUnavailable):
    """Nobody answered a request within its deadline."""


class NoResponder(BusUnavailable):
    """Nobody listens on the subject of a request."""


class RequestFailed(Unavailable):
    """Who serves the subject of a request answered with an error; the text is its."""


class FolderUnusable(Unavailable):
    """A folder that we need cannot be made, read or written; `name` is the setting for it."""

    def __init__(self, path: Path, problem: str, name: str = "folder") -> None:
        super().__init__(f"{name} {path}: {problem}")
        self.path, self.problem = path, problem


class ServerNotStarted(Unavailable):
    """The embedded nats-server did not come up."""


class NoCandidate(Unavailable):
    """No live worker can take the request."""

    def __init__(self, model: str, reason: str) -> None:
        super().__init__(f"no worker for model {model!r}: {reason}")
        self.model, self.reason = model, reason


class TransportUnavailable(Unavailable):
    """A transfer library is missing, or its backend does not start."""


class RingUnusable(Unavailable):
    """The file between an engine and its sidecar is no ring, or another process holds this end."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(f"ring {path}: {problem}")
        self.path, self.problem = path, problem


class EndpointUnusable(Unavailable):
    """An engine's socket cannot be bound, connected to, or found."""

    def __init__(self, endpoint: str, problem: str) -> None:
        super().__init__(f"endpoint {endpoint}: {problem}")
        self.endpoint, self.problem = endpoint, problem


class SidecarUnavailable(Unavailable):
    """The sidecar is not there, went away, or does not answer its engine in time."""


class NoAnswer(Unavailable):
    """A server that the doctor asks is away, or answers something else."""

    def __init__(self, url: str, problem: str) -> None:
        super().__init__(f"{url}: {problem}")
        self.url, self.problem = url, problem


class KeyRefused(NoAnswer):
    """An engine takes no request with this API key, or without one."""


class EngineStopped(Unavailable):
    """The engine ended while a request was in it."""


class ArchiveUnavailable(Unavailable):
    """The archive's database does not answer or cannot be opened."""


class ArchiveDamaged(ArchiveUnavailable):
    """A table or a row of an archive is not what an archiver writes; the text names it."""

    def __init__(self, archive: str, problem: str) -> None:
        help_ = "read a copy from before the change, or write a new archive"
        super().__init__(f"{archive}: {problem}: {help_}")
        self.archive, self.problem = archive, problem


class PoolUnreadable(Unavailable):
    """A file is no serve pool, one of another version, or not ready yet."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(f"serve pool {path}: {problem}")
        self.path, self.problem = path, problem


class SidecarEnded(Unavailable):
    """A sidecar ended before its worker did."""


class RouterNotStarted(Unavailable):
    """A router process did not begin to listen."""


class WorkerNotStarted(Unavailable):
    """A reference worker ended, or did not introduce itself in time."""


class RequestRefused(Unavailable):
    """A request of the demo was refused for good."""


class DemoStopped(Unavailable):
    """A signal ended a demo before its end."""


class FleetNotStarted(Unavailable):
    """The fleet's process ended, or was not ready in time; the text has its last words."""


class RequestLost(Unavailable):
    """A request found no living worker however often it was tried."""


class Conflict(KvatlasError):
    """Somebody else was first."""


class ForeignFile(Conflict):
    """A file or folder is in the way that kvatlas has not made; it is left as it is.

    `is_in_use` says that it is a socket of a process that lives.
    """

    def __init__(
        self,
        path: Path,
        expected: str,
        found: str,
        change: str,
        name: str = "",
        *,
        is_in_use: bool = False,
    ) -> None:
        where = f"{name} {path}" if name else str(path)
        problem = f"expected {expected}, found {found}, which is left as it is"
        super().__init__(f"{where}: {problem}: {change}")
        self.path, self.found, self.is_in_use = path, found, is_in_use


class KeyExists(Conflict):
    """A key that was to be created exists."""

    def __init__(self, key: str) -> None:
        super().__init__(f"key {key!r} exists")
        self.key = key


class RevisionConflict(Conflict):
    """A key has another revision than expected."""

    def __init__(self, key: str, expected: int) -> None:
        super().__init__(f"key {key!r} is not at revision {expected}")
        self.key, self.expected = key, expected


class StreamRefused(Conflict):
    """The broker refuses a stream or a message for good."""


class MessageTooLarge(StreamRefused):
    """A message is larger than the broker takes; it has not been accepted."""

    def __init__(self, num_bytes: int, limit: int) -> None:
        text = f"a message of {num_bytes} bytes, the broker takes {limit} (its max_payload)"
        super().__init__(text)
        self.num_bytes, self.limit = num_bytes, limit


class Fenced(Conflict):
    """A newer epoch of the same instance is alive, so this one must stop."""

    def __init__(self, instance: str, own_epoch: int, newer_epoch: int) -> None:
        super().__init__(f"{instance}: epoch {own_epoch} is fenced by {newer_epoch}")
        self.instance, self.own_epoch, self.newer_epoch = instance, own_epoch, newer_epoch


class ArchiveMismatch(Conflict):
    """An archive holds another log than the one that it is to follow."""

    def __init__(self, problem: str) -> None:
        given = "give the broker of that log (--data, --nats), or another --archive"
        super().__init__(f"{problem}: the archive holds another log: {given}")


class ArchiveNewer(Conflict):
    """An archive's schema is of a later version than this reader knows."""

    def __init__(self, archive: str, found: int, supported: int) -> None:
        super().__init__(f"{archive} has schema {found}, this version knows up to {supported}")
        self.archive, self.found, self.supported = archive, found, supported


class PoolInUse(Conflict):
    """A serve pool of this name is owned by a process that lives."""

    def __init__(self, path: Path, owner_pid: int) -> None:
        super().__init__(f"serve pool {path} is owned by process {owner_pid}")
        self.path, self.owner_pid = path, owner_pid


class SlotInUse(Conflict):
    """A slot of the serve pool was to be written that is not empty."""

    def __init__(self, slot: int, state: str) -> None:
        super().__init__(f"slot {slot} of the serve pool is {state}, expected empty")
        self.slot, self.state = slot, state


class LimitReached(KvatlasError):
    """A bound that protects the service."""


class IndexFull(LimitReached):
    """The index has no instance number or table space left."""


class PoolTooLarge(LimitReached):
    """There is less shared memory than the serve pool needs."""

    def __init__(self, path: Path, num_bytes: int, shortage: str) -> None:
        super().__init__(f"no room for the serve pool {path}: {shortage}")
        self.path, self.num_bytes = path, num_bytes
