"""Engines by name; each adapter is loaded when it is first asked for."""

from collections.abc import Callable
from importlib import import_module

from kvatlas.schemas.errors import InvalidSetting
from kvatlas.worker_hooks.engines.adapter import EngineAdapter


def _loader(module: str, name: str, *, is_sized: bool = False) -> Callable[..., EngineAdapter]:
    def make(block_tokens: int | None = None) -> EngineAdapter:
        adapter = getattr(import_module(f"kvatlas.worker_hooks.engines.{module}"), name)
        made: EngineAdapter = adapter(block_tokens) if is_sized else adapter()
        return made

    return make


#: each makes the adapter of one instance; the block size helps where a format does not say it
ADAPTERS: dict[str, Callable[..., EngineAdapter]] = {
    "vllm": _loader("vllm", "VllmAdapter", is_sized=True),
    "sglang": _loader("sglang", "SglangAdapter", is_sized=True),
    "trtllm": _loader("trtllm", "TrtllmAdapter", is_sized=True),
    "mooncake": _loader("mooncake", "MooncakeAdapter"),
    "lmcache": _loader("lmcache", "LmcacheAdapter"),
}


def adapter_of(engine: str, block_tokens: int | None = None) -> EngineAdapter:
    """Return a fresh adapter; raises InvalidSetting for an engine that nobody knows."""
    if engine not in ADAPTERS:
        raise InvalidSetting(
            "engine", "its name", f"{engine!r:.60}; known are {', '.join(ADAPTERS)}"
        )
    return ADAPTERS[engine](block_tokens)
