"""What a bridge is told when it starts."""

from typing import Annotated

from msgspec import Meta, Struct

from kvatlas.schemas.errors import InvalidSetting
from kvatlas.schemas.fleet import UnreusableBlocks
from kvatlas.schemas.hashing import MAX_LOOKAHEAD_TOKENS
from kvatlas.schemas.settings import Settings
from kvatlas.worker_hooks.sidecar.options import Seconds, check_name

#: engines that publish numbered batches over ZMQ and answer for those of before; the others of
#: `engines` tell what they hold in other ways
FOLLOWED_ENGINES = ("vllm", "sglang", "trtllm")


class BridgeOptions(Struct, frozen=True, kw_only=True):
    """One engine, all of whose ranks one bridge listens to.

    With several ranks the endpoints are those of rank 0; the others count up the port, as engines
    do. Without `ranks` and `endpoint`, `engine_url` has to say where the ranks publish.
    """

    engine: str
    worker: str
    model: str
    #: its broker, its fleet, and how each rank is reported
    settings: Settings
    endpoint: str = ""
    replay_endpoint: str = ""
    #: bind where the engine connects; else connect where the engine binds
    binds: bool = False
    #: the only rank, whose endpoints need no counting
    rank: int | None = None
    num_ranks: int | None = None
    #: 0: learnt from the engine's metrics, or from what it stores (`PageSize`)
    block_tokens: Annotated[int, Meta(ge=0, le=65_536)] = 0
    #: tokens behind a block that its hash covers; None: learnt from what it stores, else 0
    lookahead_tokens: Annotated[int, Meta(ge=0, le=MAX_LOOKAHEAD_TOKENS)] | None = None
    #: blocks at the end of a match that the engine computes again, see WorkerInfo
    unreusable_blocks: UnreusableBlocks = 0
    #: blocks of the engine; 0: learnt from its metrics, or no doubt heals by turnover
    num_blocks: Annotated[int, Meta(ge=0)] = 0
    #: the engine's HTTP server: its size, its ranks, and whether it was started anew
    engine_url: str = ""
    #: where the engine takes requests
    base_url: str = ""
    #: adapters that requests may name before the engine has stored anything for them
    adapters: tuple[str, ...] = ()
    #: with which other engines it may exchange KV by a transfer tier of its own; 16 bytes
    kv_fingerprint: bytes = b""
    #: where that tier listens (host:port) for rank 0; the port counts up with the rank
    p2p_address: str = ""
    #: of each rank, in shared memory; a batch of more than a quarter of it cannot be taken
    ring_bytes: int = 32 * 1024 * 1024
    #: of memory for live batches kept during a replay; more are asked for again
    max_waiting_bytes: int = 64 * 1024 * 1024
    #: without batches for so long, the engine is asked whether one was lost
    quiet_seconds: Seconds = 2.0
    #: away for so long, what the engine holds is doubted
    away_seconds: Seconds = 5.0
    #: a replay without a word for so long has failed
    silent_seconds: Seconds = 5.0
    #: how often the engine's HTTP server is asked
    probe_seconds: Seconds = 5.0
    #: how often the counters are logged
    report_seconds: Seconds = 60.0

    def validate(self) -> None:
        """Raise InvalidSetting for the first rule that is broken."""
        if self.engine not in FOLLOWED_ENGINES:
            known = ", ".join(FOLLOWED_ENGINES)
            problem = f"a bridge cannot follow {self.engine!r:.60}; it follows {known}"
            raise InvalidSetting("engine", "flag --engine", problem)
        check_name("worker", "bridge", self.worker)
        check_name("model", "bridge", self.model)
        for name in self.adapters:
            check_name("adapter", "bridge", name)
        if not self.endpoint and not self.engine_url:
            missing = "no engine: give --endpoint tcp://HOST:PORT or --engine-url"
            raise InvalidSetting("endpoint", "", missing)
        if self.rank is not None and self.num_ranks is not None:
            raise InvalidSetting("ranks", "bridge", "either one rank or a number of them")
        if self.num_ranks == 0:
            raise InvalidSetting("ranks", "bridge", "at least one rank is needed")
