"""One typed tree of settings: defaults < TOML file < environment < flags.

A setting is named `section.key`. In the file it stands as `key` in `[section]`, in the environment
as KVATLAS_SECTION__KEY, on the command line as `--set section.key=value`. A key that does not
exist, or a value out of range, is an InvalidSetting that names key, source and what is allowed.
"""

import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from kvatlas.schemas.errors import InvalidSetting
from kvatlas.schemas.fleet import NamespaceDescriptor
from kvatlas.schemas.hashing import HashAlgorithm
from kvatlas.schemas.known_names import near_name
from kvatlas.schemas.kv_events import OLDEST_WIRE_VERSION, WIRE_VERSION

ENVIRONMENT_PREFIX = "KVATLAS_"
#: between section and key. Two underscores: Kubernetes announces a service named kvatlas-router as
#: KVATLAS_ROUTER_PORT, which is no setting
ENVIRONMENT_SEPARATOR = "__"

#: finite, so that no sum of them is not
Positive = Annotated[float, Meta(gt=0, le=1e15)]
NotNegative = Annotated[float, Meta(ge=0, le=1e15)]
#: of intervals that something is done at
Seconds = Annotated[float, Meta(ge=0.05, le=86_400)]
#: far below what a supervisor waits before it kills, unless that is raised too
Drain = Annotated[float, Meta(ge=0, le=3_600)]
#: of pauses between looks at something
Milliseconds = Annotated[float, Meta(ge=0.01, le=60_000)]
Share = Annotated[float, Meta(ge=0, le=1)]
Count = Annotated[int, Meta(ge=1)]
Port = Annotated[int, Meta(ge=0, le=65_535)]
WireVersion = Annotated[int, Meta(ge=OLDEST_WIRE_VERSION, le=WIRE_VERSION)]
BlockHash = Annotated[str, Meta(pattern="^(xxh3|sha256)$")]
_ALGORITHMS = {"xxh3": HashAlgorithm.xxh3_128, "sha256": HashAlgorithm.sha256_128}
#: copies that a cluster of brokers keeps of a stream or bucket
Replicas = Annotated[int, Meta(ge=1, le=5)]
#: the names of router/policies
PolicyName = Annotated[
    str, Meta(pattern="^(predicted_ttft|round_robin|random|least_loaded|power_of_two)$")
]


class NatsSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """Where the broker is. An empty `url` starts an embedded one with its streams in `folder`."""

    url: str = ""
    #: file that proves this role, of credentials (JWT and seed) or with an nkey seed; empty: none
    credentials: str = ""
    #: of the embedded broker; empty takes a temporary one that ends with it
    folder: str = ""


class LogSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """Limits of the streams. All owners of a stream have to agree; others only report.

    Too few bytes or seconds discard events before a slow reader or a late joiner has seen them.
    """

    #: of the log; must fit the broker's storage, or it refuses the stream
    max_bytes: Count = 1024**3
    #: has to be more than the time between two inventories of a worker (an hour)
    max_age_seconds: Positive = 24 * 3600.0
    #: losing old decisions costs explanations only
    decisions_max_bytes: Count = 128 * 1024**2
    decisions_max_age_seconds: Positive = 7 * 24 * 3600.0
    #: losing old dead letters costs bug reports only; for less time than the log lasts, each start
    #: of an index writes them again
    dead_letters_max_bytes: Count = 64 * 1024**2
    dead_letters_max_age_seconds: Positive = 7 * 24 * 3600.0
    #: of each stream and each bucket: 1 on one broker, 3 in a cluster. Every process makes what it
    #: is first to need, so all of them (workers, bridges, plugins too) have to have the same
    replicas: Replicas = 1


class FleetSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """What all members of a fleet share."""

    #: hex; keys the roots of salted namespaces. Members with different keys never match salted KV
    key: Annotated[str, Meta(pattern="^([0-9a-fA-F]{2})*$", title="hex digits, two a byte")] = ""
    #: how blocks are named: `xxh3` is several times as fast, with `sha256` nobody can choose two
    #: prompts of one name (ADR-0025). Members that differ never match
    block_hash: BlockHash = "xxh3"
    #: minor of the wire that workers write. The newest tells most; while readers of an older
    #: release run, theirs: they skip what they do not know, and may call too much exact (ADR-0012)
    wire_version: WireVersion = WIRE_VERSION

    @property
    def hash_algorithm(self) -> HashAlgorithm:
        """The algorithm that `block_hash` stands for."""
        return _ALGORITHMS[self.block_hash]

    def descriptor(self, block_tokens: int, lookahead_tokens: int = 0) -> NamespaceDescriptor:
        """Return how a member with blocks of this size names them."""
        return NamespaceDescriptor(block_tokens, self.hash_algorithm, lookahead_tokens)

    @property
    def key_bytes(self) -> bytes:
        """The key as bytes."""
        return bytes.fromhex(self.key)


class IndexerSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """The index."""

    #: `flat` is numba over arrays; `reference` its plain-Python twin, many times slower and larger
    kernel: Annotated[str, Meta(pattern="^(flat|reference)$")] = "flat"
    #: at most one snapshot in this time, by whichever replica; seldom makes a start read more of
    #: the log. 0: this replica neither starts from snapshots nor takes any
    snapshot_seconds: Annotated[float, Meta(ge=0, le=86_400)] = 300.0
    #: and only after so many messages of the log; few store the same again, many cost each start
    #: some 10 us a message
    snapshot_messages: Count = 10_000
    #: of each some 40 bytes a block; one that is damaged costs nothing as long as there is another
    snapshots_kept: Annotated[int, Meta(ge=1, le=1_000)] = 3
    #: older ones go, except the newest; longer than the log lasts keeps what nobody can use
    snapshots_kept_seconds: Positive = 24 * 3600.0
    #: where an indexer shares the memory of its index, and where a router finds one to read; on
    #: the same host, in memory (below /dev/shm). Empty: each has an index of its own. It is for the
    #: index alone: a link, other files, or a folder that others may write to is refused
    shared_folder: str = ""
    #: what an instance may say: an engine at 20,000 tokens/s says about 50 KB/s. More throttles it:
    #: for a while nothing that it says counts. Low throttles honest ones, 0 limits nobody
    event_bytes_per_second: NotNegative = 16_000_000.0
    #: and at once, such as inventories after a restart (some 10 MB each)
    event_burst_bytes: Positive = 256_000_000.0
    #: how long the first silence of an epoch lasts, doubled each time up to the maximum
    event_throttle_seconds: Positive = 1.0
    max_event_throttle_seconds: Positive = 300.0


class RouterSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """How requests are judged and where the router listens.

    Costs are predicted milliseconds; router/decision/pricing.py gives the formula.
    """

    #: there are no users: beyond loopback, whoever reaches it may route and read
    host: str = "127.0.0.1"
    #: 0 takes a free one
    port: Port = 8080
    #: several routers of a host listen on the port, and each gets a part of its connections
    is_port_shared: bool = False
    #: after SIGTERM `/readyz` says 503 for so long, and requests are answered as before; short
    #: refuses those of balancers that have not noticed, long delays each update. 0: ends at once
    drain_seconds: Drain = 5.0
    #: comma-separated names that the Host header may have, `*` for any; web pages of other names
    #: can then not read answers. Empty: on loopback its names, those without a dot and
    #: `router.host`; on other addresses any
    allowed_hosts: str = ""
    policy: PolicyName = "predicted_ttft"
    #: larger requests are refused; it bounds the memory of each one under way
    max_body_bytes: Count = 16 * 1024**2
    #: of all bodies that are not answered, beyond the first 64 KiB of each; a request above it gets
    #: 503. Never less than router.max_body_bytes. Of each process
    max_inflight_body_bytes: Count = 256 * 1024**2
    #: open HTTP connections of a process; beyond it the longest idle ones end, and without idle
    #: ones new ones get 503. Fewer where the process may not have as many descriptors
    max_connections: Annotated[int, Meta(ge=16)] = 4_096
    #: how long a connection may be idle between requests; longer than load balancers keep theirs
    #: (60 to 90 s), or they send requests into connections that are ending
    keep_alive_seconds: Annotated[float, Meta(ge=1, le=86_400)] = 120.0
    #: longer prompts are refused; hashing and matching take time in proportion on the one thread
    max_prompt_tokens: Count = 1_000_000
    #: candidates in an answer unless the request says otherwise
    max_candidates: Annotated[int, Meta(ge=1, le=1024)] = 8
    #: queued prefill up to here does not count against a worker: affinity inside, load outside;
    #: long lets requests queue behind a popular prefix, short scatters it
    load_window_ms: NotNegative = 1_000.0
    #: weight of a worker's surplus of cumulative work; higher balances more and reuses less
    balance_weight: NotNegative = 0.01
    #: half-life of cumulative work; short forgets imbalance
    work_half_life_seconds: Positive = 600.0
    #: weight of pull time against compute time; higher pulls less and keeps affinity
    pull_weight: NotNegative = 3.0
    #: a pull of fewer tokens than this is not worth its round trips; high computes what peers have
    min_pull_tokens: Annotated[int, Meta(ge=0)] = 256
    #: part of a match that counts when its worker is not `exact`; 1 believes it all, 0 wastes it
    degraded_match_share: Share = 0.5
    #: part of a predicted match that counts: the blocks are on their way, but may not come
    predicted_match_share: Share = 0.9
    #: life of a predicted entry; too long believes in blocks that were never stored
    predicted_seconds: NotNegative = 4.0
    #: priors of rates, replaced by what workers report; wrong ones misjudge the first requests
    prefill_tokens_per_second: Positive = 10_000.0
    pull_tokens_per_second: Positive = 200_000.0
    #: what is learnt of a worker stays within this factor of its model's rate, whatever is
    #: reported; raise it where one model runs on accelerators whose speeds are further apart
    max_rate_ratio: Annotated[float, Meta(ge=1, le=1_000)] = 3.0
    #: not learnt: what a pull and a read from a tier cost; too low prefers slow copies to computing
    pull_fixed_ms: NotNegative = 5.0
    dram_ms_per_1k_tokens: NotNegative = 3.0
    ssd_ms_per_1k_tokens: NotNegative = 15.0
    remote_ms_per_1k_tokens: NotNegative = 20.0
    #: a worker whose request failed is left out this long, doubled each time up to the maximum;
    #: long wastes a worker that failed once, short sends more requests to a dead one, which
    #: `sidecar.lease_ttl_seconds` bounds
    failure_pause_seconds: NotNegative = 1.0
    max_failure_pause_seconds: NotNegative = 8.0
    #: a request of which nothing is heard for so long is overdue, and a worker that owes several,
    #: while others are reported, is only tried again now and then; short suspects slow workers
    overdue_seconds: Annotated[float, Meta(ge=1)] = 10.0
    #: nor before so many times what such requests take; low suspects workers with long queues
    overdue_factor: Annotated[float, Meta(ge=1)] = 4.0
    #: a request that is never reported done stops counting as load after this; below the longest
    #: request, busy workers look idle
    request_timeout_seconds: Positive = 600.0
    #: decisions waiting for the broker; more are dropped and counted
    max_unrecorded_decisions: Count = 10_000
    #: and their bytes: a decision has its prompt's hashes, 16 bytes a block
    max_unrecorded_decision_bytes: Count = 64 * 1024**2
    #: decisions kept for reports of failures and of what was reused
    max_kept_decisions: Count = 10_000
    #: bytes of those that are kept whole, for GET /v1/decisions/{id}: some KB each, and 1 MB for a
    #: prompt of a million tokens. Few show only the newest
    max_kept_decision_bytes: Count = 64 * 1024**2
    #: of what policies draw; 0 takes another one at each start, so that replicas differ
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0


class ArchiveSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """Where batches and decisions are kept; an empty `url` keeps none."""

    url: str = ""
    #: where `kvatlas archive` says how it does (/healthz, /readyz, /metrics), at router.host; 0
    #: takes a free one
    port: Port = 0


class ReportingSettings(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How an instance is reported, by a sidecar or by a bridge, whatever starts it.

    A field added here is a setting of the section `sidecar` and an option of every sidecar; only
    what makes use of it has to name it.
    """

    #: a worker that is silent for this long is forgotten; short forgets slow ones
    lease_ttl_seconds: Seconds = 15.0
    #: how often digests are published for the index to compare; seldom shows divergence late, and
    #: above the index's patience (15 s) a quiet worker looks `stale`
    digest_seconds: Seconds = 2.0
    #: an engine that gave no sign of life for so long is left out by routers until it gives one;
    #: short takes a long pause of its process for a hang, long sends requests to one that hangs
    engine_silent_seconds: Annotated[float, Meta(ge=1)] = 6.0
    #: events that wait for the broker; more become one resync, and the whole inventory is sent
    max_outbox_bytes: Annotated[int, Meta(ge=65_536)] = 64 * 1024**2
    #: and none of them for longer; an inventory says the same in less than a long story. Less than
    #: a cluster's election (10 s) makes each of them cost every worker an inventory
    max_outbox_seconds: Seconds = 300.0
    #: after a message left, events are put together for so long; long delays what readers know, 0
    #: sends what there is at once: more messages, each of which costs broker and readers
    coalesce_seconds: Annotated[float, Meta(ge=0, le=1)] = 0.002
    #: but not to messages larger than this; few save nothing, many make readers halt
    coalesce_bytes: Annotated[int, Meta(ge=1, le=512 * 1024)] = 64 * 1024
    #: what may be told of one namespace (a tenant): blocks stored and removed. More mutes it for a
    #: while, and answers about it are `degraded`; low mutes honest tenants, 0 limits nobody
    namespace_blocks_per_second: NotNegative = 50_000.0
    #: and at once; below what the engine holds, its listing after a loss mutes who holds much
    namespace_burst_blocks: Positive = 1_000_000.0


class SidecarSettings(ReportingSettings, frozen=True, forbid_unknown_fields=True):
    """What runs beside an engine."""

    #: how blocks travel: `nixl`, or `none`, with which nothing is pulled or served
    transport: Annotated[str, Meta(pattern="^(nixl|none)$")] = "nixl"
    #: how long a pull may take before the engine computes instead; long makes a request wait for a
    #: peer that is slower than computing, short gives up pulls that would have paid
    pull_deadline_seconds: Positive = 2.0
    #: host:port where a sidecar or bridge answers `GET /metrics`; empty: nowhere. Each on a host
    #: needs its own, and reference workers answer at their own address as well
    metrics_address: str = ""
    #: a reference worker that leaves says so first and then serves on for so long, since routers
    #: have just sent requests to it; long delays each update. 0: ends at once. So long have
    #: peers, too, to end what they read of any sidecar that leaves
    drain_seconds: Drain = 5.0


class NixlSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """How blocks travel with `sidecar.transport` = `nixl`."""

    #: UCX_TLS of the transfer process; "" leaves it as it is. `tcp` forbids CMA
    ucx_tls: str = ""
    #: let NIXL spin a core for the source; TCP between hosts needs it, CMA on one host does not
    progress_thread: bool = False
    #: the source looks for peers that often, and while somebody has a lease so often; seldom makes
    #: reads wait, often costs the engine's host some of a core
    idle_ms: Milliseconds = 50.0
    busy_ms: Milliseconds = 0.3
    #: places in quarantine that make the reading agent start again; 0 is half of all. Too low
    #: aborts slow TCP sources, too high lets frozen peers take all places
    max_quarantined: Annotated[int, Meta(ge=0)] = 0
    #: peers kept connected; too few, and reads pay for connecting again
    max_sources: Count = 256
    #: how long the transfer process may take to start; short starts it in vain on busy machines
    start_seconds: Positive = 30.0


class Settings(Struct, frozen=True, forbid_unknown_fields=True):
    """The whole tree."""

    nats: NatsSettings = NatsSettings()
    log: LogSettings = LogSettings()
    fleet: FleetSettings = FleetSettings()
    indexer: IndexerSettings = IndexerSettings()
    router: RouterSettings = RouterSettings()
    archive: ArchiveSettings = ArchiveSettings()
    sidecar: SidecarSettings = SidecarSettings()
    nixl: NixlSettings = NixlSettings()


class _Found(Struct):
    """A value on its way into the tree, and where it came from."""

    value: Any
    source: str
    #: text from a flag or a variable, to be read as whatever the setting is
    is_text: bool = True


def load_settings(
    file: Path | None = None,
    environment: Mapping[str, str] | None = None,
    flags: Iterable[tuple[str, str]] = (),
    options: Iterable[tuple[str, str, str]] = (),
) -> Settings:
    """Merge all sources into one tree; later sources win. Raises InvalidSetting.

    `flags` are keys and values of --set, `options` the same behind the flag that stands for them.
    """
    found: dict[str, _Found] = {}
    if file is not None:
        found |= _from_file(file)
    found |= _from_environment(os.environ if environment is None else environment)
    found |= {key: _Found(value, f"flag --set {key}") for key, value in flags}
    found |= {key: _Found(value, f"flag {flag}") for flag, key, value in options}
    sections: dict[str, dict[str, Any]] = {}
    known = settings_by_key()
    for key, item in found.items():
        if key not in known:
            raise InvalidSetting(key, item.source, f"unknown; {_alike(key, known)}")
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = _convert(key, item, known[key])
    return msgspec.convert(sections, Settings)


def _alike(key: str, known: Iterable[str]) -> str:
    """Return what a key may have been meant to be: one near it, or what its section has."""
    if near := near_name(key, known):
        return f"did you mean {near}?"
    section = key.partition(".")[0]
    siblings = sorted(each for each in known if each.startswith(f"{section}."))
    if siblings:
        return f"known are {', '.join(siblings)}"
    sections = sorted({each.partition(".")[0] for each in known})
    return f"known sections are {', '.join(sections)}"


def variable_of(key: str) -> str:
    """Return the environment variable of a setting."""
    section, _, name = key.partition(".")
    return f"{ENVIRONMENT_PREFIX}{section}{ENVIRONMENT_SEPARATOR}{name}".upper()


def environment_of(settings: Settings, *sections: str) -> dict[str, str]:
    """Return the variables that give another process these sections, defaults included.

    What that process inherits may say otherwise, and a command line would show the fleet's key.
    """
    return {
        variable_of(f"{section}.{name}"): str(value)
        for section in sections
        for name, value in msgspec.structs.asdict(getattr(settings, section)).items()
    }


def settings_by_key() -> dict[str, Any]:
    """Return the type of every setting by its `section.key` name."""
    return {
        f"{section.name}.{field.encode_name}": field.type
        for section in msgspec.structs.fields(Settings)
        for field in msgspec.structs.fields(section.type)
    }


def _convert(key: str, item: _Found, wanted: Any) -> Any:
    try:
        return msgspec.convert(item.value, wanted, strict=not item.is_text)
    except msgspec.ValidationError as error:
        found = "" if item.is_text else f", found {type(item.value).__name__}"
        raise InvalidSetting(key, item.source, f"expected {_expectation(wanted)}{found}") from error


def _expectation(wanted: Any) -> str:
    kind, bounds = kind_and_bounds(wanted)
    return f"{kind}, {bounds}" if bounds else kind


def kind_and_bounds(wanted: Any) -> tuple[str, str]:
    """Return a setting's type and what it may be, in words; empty where it may be anything."""
    kind = getattr(wanted, "__origin__", wanted).__name__
    meta: Meta = next(iter(getattr(wanted, "__metadata__", ())), Meta())
    if meta.title is not None:
        return kind, meta.title
    if meta.pattern is not None:
        names = re.fullmatch(r"\^\(([\w|]+)\)\$", meta.pattern)
        return kind, f"one of {names[1].replace('|', ', ')}" if names else f"as {meta.pattern}"
    low, high = _number(meta.ge), _number(meta.le)
    if low and high:
        return kind, f"{low}..{high}"
    limits = [
        f"above {meta.gt:g}" if meta.gt is not None else "",
        f"at least {low}" if low else "",
        f"at most {high}" if high else "",
    ]
    return kind, ", ".join(filter(None, limits))


def _number(bound: float | None) -> str:
    if bound is None:
        return ""
    return f"{bound:g}" if type(bound) is float else str(bound)


def _from_file(file: Path) -> dict[str, _Found]:
    try:
        tree = tomllib.loads(file.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InvalidSetting("(file)", str(file), str(error)) from error
    found: dict[str, _Found] = {}
    for section, values in tree.items():
        if not isinstance(values, dict):
            raise InvalidSetting(section, str(file), "stands outside a section")
        for name, value in values.items():
            found[f"{section}.{name}"] = _Found(value, str(file), is_text=False)
    return found


def _from_environment(environment: Mapping[str, str]) -> dict[str, _Found]:
    found: dict[str, _Found] = {}
    for variable, value in environment.items():
        section, separator, name = (
            variable.removeprefix(ENVIRONMENT_PREFIX).lower().partition(ENVIRONMENT_SEPARATOR)
        )
        if variable.startswith(ENVIRONMENT_PREFIX) and separator:
            found[f"{section}.{name}"] = _Found(value, f"environment variable {variable}")
    return found
