"""A stand-in for the part of SGLang that a publisher sees; SGLang itself is not run here.

Written after SGLang 0.5.23: the registry of publishers and what it passes to a constructor (all
fields of the configuration but `publisher` and `format`, those of later versions included), the
batch and its events in the map form, and the arguments of the process. The engine's own hash is
faked by counting: it is opaque to whoever reads it.
"""

import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, ClassVar

import msgspec


class KVCacheEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True, tag_field="type"):
    """Base of all events."""


class BlockStored(KVCacheEvent):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None = None
    cache_salt: str | None = None
    lora_name: str | None = None


class BlockRemoved(KVCacheEvent):
    block_hashes: list[int]
    medium: str | None = None


class AllBlocksCleared(KVCacheEvent):
    pass


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    attn_dp_rank: int | None = None


class EventPublisher(ABC):
    @abstractmethod
    def publish(self, events: KVEventBatch) -> None: ...

    @abstractmethod
    def shutdown(self) -> None: ...

    def describe_local_source(self, block_size: int) -> object:
        return None


class EventPublisherFactory:
    _registry: ClassVar[dict[str, Callable[..., EventPublisher]]] = {}

    @classmethod
    def register_publisher(cls, name: str, ctor: Callable[..., EventPublisher]) -> None:
        if name in cls._registry:
            raise KeyError(f"publisher '{name}' already registered")
        cls._registry[name] = ctor

    @classmethod
    def create(cls, config: str, attn_dp_rank: int = 0) -> EventPublisher:
        fields: dict[str, Any] = {
            "publisher": "null", "endpoint": "tcp://*:5557", "bind": None, "replay_endpoint": None,
            "buffer_steps": 10_000, "hwm": 100_000, "max_queue_size": 100_000, "topic": "",
            "format": "default",
        }  # fmt: skip
        fields |= json.loads(config)
        fields.pop("format")
        return cls._registry[fields.pop("publisher")](attn_dp_rank=attn_dp_rank, **fields)


class ServerArgs:
    """What the process was started with."""

    def __init__(self) -> None:
        self.served_model_name = "m"
        self.page_size = 4
        self.host, self.port = "127.0.0.1", 30_000


@contextmanager
def sglang_installed() -> Generator[ServerArgs, None, None]:
    """Let `import sglang` find this stand-in."""
    arguments = ServerArgs()
    EventPublisherFactory._registry.clear()
    events = ModuleType("sglang.srt.disaggregation.kv_events")
    for kind in (EventPublisher, EventPublisherFactory):
        setattr(events, kind.__name__, kind)
    server_args = ModuleType("sglang.srt.server_args")
    vars(server_args)["get_global_server_args"] = lambda: arguments
    sglang = ModuleType("sglang")
    vars(sglang)["__version__"] = "0.5.23"
    srt, disaggregation = ModuleType("sglang.srt"), ModuleType("sglang.srt.disaggregation")
    vars(disaggregation)["kv_events"] = events
    vars(srt)["server_args"] = server_args
    modules = {
        "sglang": sglang,
        "sglang.srt": srt,
        "sglang.srt.disaggregation": disaggregation,
        events.__name__: events,
        server_args.__name__: server_args,
    }
    sys.modules.update(modules)
    try:
        yield arguments
    finally:
        for name in modules:
            del sys.modules[name]
