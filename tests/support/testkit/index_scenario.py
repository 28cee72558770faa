"""The words of index scenarios: each line happens to one IndexState, the answer is what follows.

    batch w1 epoch=1 seq=2: stored 1 2, digest 1 2     a batch of w1, its events between commas
    control w1 epoch=1 expired lease                   a record about w1: kind and reason
    garbage w1 · hole 5..9                             an unreadable message; a loss of the stream
    lease-expired w1 epoch=1                           what a replica's watcher saw
    proposed w1 epoch=1 throttled                      what a replica finds has to be done
    match 1 2 3 · trust w1 · holds w1 · count gaps     questions

Events: up · down REASON · stored, removed, digest BLOCK... [tier=T] · cleared [tier=T] · resync ·
digests BLOCK... (of all tiers, blocks in the first) ·
inventory BLOCK... as_of=N [part=1/2] [tier=T] · muted [REASON] (the namespace; none without) ·
unknown (a tag of the future) · broken TAG.
The answer to what happens is the effects, or `ok`; w1 is rank 0 of w1, w1/3 its rank 3.
"""

import msgspec

from kvatlas.events.bus import Message
from kvatlas.events.codec import DecodedBatch
from kvatlas.indexer.fold.state import IndexState
from kvatlas.indexer.fold.stimuli import (
    BatchArrived,
    ControlArrived,
    Effect,
    HoleSeen,
    LeaseExpired,
    Proposed,
    PublishControl,
    ReportDivergence,
    ReportGap,
    ReportOldEpoch,
    ReportPassed,
    ReportRefused,
    ReportRejected,
    ReportTakeover,
    ReportTrust,
    RequestIntroduction,
    RequestInventory,
    Stimulus,
    stimulus_of,
)
from kvatlas.indexer.index.port import PrefixIndex
from kvatlas.schemas.hashing import reuse_point
from kvatlas.schemas.ids import InstanceId, Tier
from kvatlas.schemas.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KvEvent,
    NamespacesOverBudget,
    RejectedEvent,
    Resync,
    SourceDegraded,
    WorkerDown,
)
from testkit.builders import (
    MODEL,
    ROOT,
    a_batch,
    a_control,
    digest,
    digests,
    hashes,
    inventory,
    removed,
    stored,
    up,
)


class IndexScenario:
    """Answers the lines of one scenario."""

    def __init__(self, index: PrefixIndex) -> None:
        self._state = IndexState(index)
        self._at = 0

    def __call__(self, line: str) -> str:
        command, _, events = line.partition(":")
        # a record's reason may have a colon in it
        verb, *words = (line if line.startswith("control ") else command).split()
        match verb, words:
            case "batch", [name, *rest]:
                return self._batch(_instance(name), _options(rest), events)
            case "control", [name, epoch, kind, reason]:
                worker, rank = _instance(name)
                record = a_control(worker, rank, _options([epoch])["epoch"], kind, reason)
                return self._happens(ControlArrived(self._next(), 0, record))
            case "garbage", [name]:
                subject = f"kv.events.{MODEL}.{name}.0"
                return self._happens(stimulus_of(Message(self._next(), subject, b"\xc1", 0)))
            case "hole", [numbers]:
                first, last = map(int, numbers.split(".."))
                self._at = last
                return self._happens(HoleSeen(first, last + 1))
            case "lease-expired", [name, epoch]:
                return self._happens(
                    LeaseExpired(_instance(name), _options([epoch])["epoch"], 0, "replica")
                )
            case "proposed", [name, epoch, kind]:
                return self._happens(
                    Proposed(_instance(name), _options([epoch])["epoch"], kind, 0, "replica")
                )
            case "match", blocks:
                return self._match(blocks)
            case "trust", [name]:
                view = self._state.instance(_instance(name))
                if view is None:
                    return "unknown"
                reasons = f" ({', '.join(view.trust_reasons)})" if view.trust_reasons else ""
                candidate = "" if self._serves(_instance(name)) else ", no candidate"
                muted = "".join(f"; namespace muted: {why}" for why in view.muted.values())
                return f"{view.trust}{reasons}{candidate}{muted}"
            case "holds", [name]:
                view = self._state.instance(_instance(name))
                assert view is not None
                counts = [f"{tier.name} {digest.count}" for tier, digest in view.digests.items()]
                return ", ".join(counts) or "nothing"
            case "count", [counter]:
                return f"{counter} {getattr(self._state.stats(), counter)}"
        raise ValueError(f"no such line: {line}")

    def _batch(self, name: InstanceId, options: dict[str, int], text: str) -> str:
        events: list[KvEvent] = []
        rejected: list[RejectedEvent] = []
        for position, words in enumerate(filter(None, map(str.split, text.split(",")))):
            match words:
                case ["unknown"]:
                    rejected.append(RejectedEvent(position, "unknown", "tag 'teleported'"))
                case ["broken", kind]:
                    rejected.append(RejectedEvent(position, kind, "cannot be read"))
                case ["digests", *blocks]:
                    events.extend(digests(*map(int, blocks)))
                case _:
                    events.append(_event(words))
        batch = a_batch(worker=name.worker, rank=name.rank, **options)
        batch = msgspec.structs.replace(batch, events=tuple(events))
        decoded = DecodedBatch(batch, tuple(rejected))
        at = self._next()
        return self._happens(BatchArrived(at, at * 1_000_000_000, decoded))

    def _match(self, blocks: list[str]) -> str:
        found = self._state.match(hashes(*map(int, blocks)))
        return ", ".join(f"{_name(m.instance)} {m.num_blocks} {m.trust}" for m in found) or "nobody"

    def _serves(self, name: InstanceId) -> bool:
        return any(view.instance == name for view in self._state.serving(MODEL))

    def _happens(self, stimulus: Stimulus) -> str:
        return "; ".join(map(_say, self._state.handle(stimulus))) or "ok"

    def _next(self) -> int:
        self._at += 1
        return self._at


def _event(words: list[str]) -> KvEvent:
    verb, *rest = words
    blocks = [int(word) for word in rest if word.isdigit()]
    named = dict(word.split("=") for word in rest if "=" in word)
    tier = Tier[named.get("tier", "hbm")]
    match verb:
        case "up":
            return up(ends_at_reuse_points="points" in rest)
        case "down":
            return WorkerDown(" ".join(rest))
        case "stored":
            return stored(*blocks, tier=tier)
        case "removed":
            return removed(*blocks, tier=tier)
        case "digest":
            return digest(*blocks, tier=tier)
        case "cleared":
            return AllBlocksCleared(tier if "tier" in named else None)
        case "points":
            return BlockStored(ROOT, b"".join(map(reuse_point, map(hashes, blocks))))
        case "unpoint":
            return BlockRemoved(ROOT, b"".join(map(reuse_point, map(hashes, blocks))))
        case "resync":
            return Resync(0, 0)
        case "doubted":
            return SourceDegraded(" ".join(rest))
        case "muted":
            return NamespacesOverBudget(ROOT, " ".join(rest)) if rest else NamespacesOverBudget(b"")
        case "inventory":
            part, parts = map(int, named.get("part", "1/1").split("/"))
            return inventory(*blocks, as_of=int(named["as_of"]), tier=tier, part=part, parts=parts)
    raise ValueError(f"no such event: {words}")


def _say(effect: Effect) -> str:
    match effect:
        case PublishControl(record):
            name = _name(record.instance)
            return f"publish: {name} epoch={record.epoch} {record.kind} {record.reason}"
        case RequestInventory(instance, epoch):
            return f"ask {_name(instance)} epoch={epoch} for its inventory"
        case ReportRejected(worker, kind, reason):
            return f"rejected of {worker}: {kind} ({reason})"
        case ReportGap(instance, epoch, expected, found):
            return f"gap of {_name(instance)} epoch={epoch}: expected {expected}, found {found}"
        case ReportTakeover(instance, epoch, replaced):
            return f"{_name(instance)} epoch={epoch} takes the name of epoch={replaced.epoch}"
        case ReportDivergence(instance, tier, told, found):
            return f"{_name(instance)} says {told.count} blocks in {tier.name}, we {found.count}"
        case ReportTrust(instance, epoch, trust):
            return f"{_name(instance)} epoch={epoch} is {trust}"
        case RequestIntroduction(instance):
            return f"ask {_name(instance)} what it is"
        case ReportOldEpoch(instance, epoch, newer):
            return f"{_name(instance)} epoch={epoch} goes on after epoch={newer}"
        case ReportPassed(instance, epoch, seq, at_seq):
            return f"{_name(instance)} epoch={epoch} seq={seq} comes after seq={at_seq}"
        case ReportRefused(instance, epoch, kind):
            return f"{_name(instance)} epoch={epoch} is refused: {kind}"


def _instance(name: str) -> InstanceId:
    worker, _, rank = name.partition("/")
    return InstanceId(worker, int(rank or 0))


def _name(instance: InstanceId) -> str:
    return f"{instance.worker}/{instance.rank}" if instance.rank else instance.worker


def _options(words: list[str]) -> dict[str, int]:
    return {key: int(value) for key, value in (word.split("=") for word in words)}
