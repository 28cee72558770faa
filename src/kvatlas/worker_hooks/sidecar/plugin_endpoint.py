"""The endpoint that an engine's plugin is given: a broker, and who the engine is.

    nats://HOST:4222?worker=w0&model=NAME&base_url=http://HOST:8000&block_tokens=64

An engine passes little more than this string on, so all that it does not know of itself stands in
the query. An unknown key is an error that names it: misspelt, it would do nothing for ever.
"""

from typing import Annotated, Any
from urllib.parse import parse_qsl, urlsplit, urlunsplit

import msgspec
from msgspec import Meta, Struct

from kvatlas.schemas.errors import InvalidSetting
from kvatlas.schemas.fleet import UnreusableBlocks
from kvatlas.schemas.hashing import MAX_LOOKAHEAD_TOKENS
from kvatlas.schemas.settings import Replicas

SCHEMES = ("nats", "tls", "ws", "wss")


class PluginEndpoint(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the query may say; empty or None: the plugin asks the engine, or takes a default."""

    nats_url: str = ""
    worker: str = ""
    model: str = ""
    base_url: str = ""
    block_tokens: Annotated[int, Meta(ge=1, le=65_536)] | None = None
    #: tokens behind a block that its hash covers, and blocks at the end of a match that are
    #: computed again (ADR-0024); vLLM's plugin reads both from the engine
    lookahead_tokens: Annotated[int, Meta(ge=0, le=MAX_LOOKAHEAD_TOKENS)] | None = None
    unreusable_blocks: UnreusableBlocks | None = None
    #: 32 hex digits; without it nothing is pulled from here or to here
    kv_fingerprint: Annotated[str, Meta(pattern="^([0-9a-fA-F]{32})?$")] = ""
    p2p_address: str = ""
    #: names of LoRA adapters of the model that requests may use, with commas between
    adapters: str = ""
    include_tokens: bool = False
    #: see LogSettings; says it for those who do not set the environment of an engine
    replicas: Replicas | None = None

    def over(self, shared: dict[str, Any]) -> dict[str, Any]:
        """Return what settings say of any sidecar, with what the query says otherwise."""
        return shared if self.replicas is None else shared | {"replicas": self.replicas}

    def adapters_of(self, model: str) -> dict[str, str]:
        """Return the adapters with their model, as WorkerUp tells them."""
        return {name: model for name in self.adapters.split(",") if name}


def is_plugin_endpoint(endpoint: str) -> bool:
    """Whether an endpoint names a broker rather than a ZMQ socket."""
    return endpoint.partition("://")[0] in SCHEMES


def parse_endpoint(endpoint: str) -> PluginEndpoint:
    """Return what an endpoint says; raises InvalidSetting with the key that is wrong."""
    parts = urlsplit(endpoint)
    if not is_plugin_endpoint(endpoint) or not parts.netloc:
        raise InvalidSetting("endpoint", "kv-events-config", "expected nats://HOST:PORT")
    said: dict[str, str] = {}
    for key, value in parse_qsl(parts.query, keep_blank_values=True):
        if key in said or key == "nats_url":
            raise InvalidSetting(key, "endpoint", "stands there twice or cannot be said here")
        said[key] = value
    url = urlunsplit((parts.scheme, parts.netloc, parts.path, "", ""))
    try:
        return msgspec.convert({**said, "nats_url": url}, PluginEndpoint, strict=False)
    except msgspec.ValidationError as error:
        known = ", ".join(name for name in PluginEndpoint.__struct_fields__ if name != "nats_url")
        raise InvalidSetting("endpoint", "kv-events-config", f"{error}; known: {known}") from error
