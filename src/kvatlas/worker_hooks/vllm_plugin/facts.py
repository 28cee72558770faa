"""What vLLM's configuration says of a worker; reads attributes, imports nothing of vLLM."""

import hashlib
import os
import re
from pathlib import Path
from typing import Any

from kvatlas.schemas.fleet import KvLayout
from kvatlas.schemas.settings import Settings
from kvatlas.worker_hooks.log_lines import printable_log
from kvatlas.worker_hooks.sidecar.beside_engine import default_worker
from kvatlas.worker_hooks.sidecar.options import SidecarOptions, shared_options
from kvatlas.worker_hooks.sidecar.plugin_endpoint import PluginEndpoint

CONNECTOR = "KvatlasConnector"
#: extra config of the connector: how much of its KV the engine lends to peers
SERVE_BLOCKS, SERVE_BYTES = "serve_blocks", "serve_bytes"

_WINDOWED = re.compile("SlidingWindow|Mamba|ChunkedLocal")
_END_BYTES = 64 * 1024

_log = printable_log(__name__)


def sidecar_options(
    said: PluginEndpoint, settings: Settings, rank: int, scheduler: Any, version: str
) -> SidecarOptions:
    """Return the options of the engine that this scheduler belongs to; raises KvatlasError."""
    config, kv_cache = scheduler.vllm_config, scheduler.kv_cache_config
    names = _served_names(config.model_config)
    block_tokens = said.block_tokens or scheduler.kv_cache_manager.block_pool.hash_block_size
    num_slots, block_bytes = _serve_pool(config, kv_cache)
    lookahead_tokens, num_unreusable = said.lookahead_tokens, said.unreusable_blocks
    if lookahead_tokens is None:
        lookahead_tokens = hash_lookahead(config)
    if num_unreusable is None:
        num_unreusable = dropped_blocks(config)
    options = SidecarOptions(
        nats_url=said.nats_url,
        creds_file=settings.nats.credentials,
        worker=said.worker or _worker_name(config),
        rank=rank,
        model=said.model or names[0],
        aliases=tuple(name for name in names if name != (said.model or names[0])),
        adapters=said.adapters_of(said.model or names[0]),
        base_url=said.base_url,
        descriptor=settings.fleet.descriptor(block_tokens, lookahead_tokens),
        num_unreusable_trailing_blocks=num_unreusable,
        kv_fingerprint=bytes.fromhex(said.kv_fingerprint)
        or _fingerprint(config, kv_cache, version),
        groups=full_groups(kv_cache),
        num_blocks=kv_cache.num_blocks - 1,  # the first is nobody's
        p2p_address=said.p2p_address,
        include_tokens=said.include_tokens,
        versions={"vllm": version},
        ring_path="",
        socket_path="",
        num_slots=num_slots,
        block_bytes=block_bytes,
        tells_pool=num_slots > 0,
        transport=settings.sidecar.transport if num_slots else "none",
        **said.over(shared_options(settings)),
    )
    return options


def hash_lookahead(config: Any) -> int:
    """Return how many tokens behind a block its hash covers; 0 before vLLM 0.33."""
    return int(getattr(config, "num_hash_lookahead_tokens", 0))


def dropped_blocks(config: Any) -> int:
    """Return how many blocks at the end of a match the engine computes again.

    Drafters of the EAGLE family need the tokens behind a block, so without lookahead hashes their
    engine drops the last block that it finds.
    """
    speculative = getattr(config, "speculative_config", None)
    if speculative is None or hash_lookahead(config):
        return 0
    drops = getattr(speculative, "use_eagle_block_drop", None) or speculative.use_eagle
    return int(bool(drops()))


def _worker_name(config: Any) -> str:
    """Return a name that no other engine of this host has, equal in all ranks of this one."""
    name = f"{default_worker(None)}-{config.instance_id}"
    _log.warning("kvatlas: no ?worker= in the endpoint: this one is %s until it restarts", name)
    return name


def _served_names(model_config: Any) -> list[str]:
    served = model_config.served_model_name
    names: list[str] = [served] if isinstance(served, str) else list(served or ())
    return names or [model_config.model]


def _serve_pool(config: Any, kv_cache: Any) -> tuple[int, int]:
    """Return the slots of the serve pool and their bytes; no slots where nothing can be lent."""
    transfer = config.kv_transfer_config
    if transfer is None or transfer.kv_connector != CONNECTOR:
        return 0, 0
    extra = transfer.kv_connector_extra_config or {}
    block_bytes = block_bytes_of(kv_cache)
    if reason := why_no_exchange(config, kv_cache):
        _log.warning("kvatlas: blocks of this engine are neither lent nor pulled: %s", reason)
        return 0, 0
    num_slots = int(extra.get(SERVE_BLOCKS, 0)) or int(extra.get(SERVE_BYTES, 0)) // max(
        block_bytes, 1
    )
    if not num_slots:
        _log.warning(
            "kvatlas: no %s or %s: blocks are neither lent nor pulled", SERVE_BLOCKS, SERVE_BYTES
        )
    return num_slots, block_bytes


def why_no_exchange(config: Any, kv_cache: Any) -> str:
    """Return why this engine's blocks cannot travel; empty when they can."""
    parallel = config.parallel_config
    if parallel.tensor_parallel_size > 1 or parallel.pipeline_parallel_size > 1:
        return "its model is spread over devices"
    if len(kv_cache.kv_cache_groups) != 1:
        return "its model is a hybrid"
    return ""


def block_bytes_of(kv_cache: Any) -> int:
    """Return the bytes of one block over all layers."""
    return int(sum(tensor.size for tensor in kv_cache.kv_cache_tensors) // kv_cache.num_blocks)


def _fingerprint(config: Any, kv_cache: Any, version: str) -> bytes:
    """Return what has to be equal for two engines to exchange KV; nothing where it cannot be."""
    if why_no_exchange(config, kv_cache):
        return b""
    model, spec = config.model_config, kv_cache.kv_cache_groups[0].kv_cache_spec
    backend = f"{config.device_config.device_type} {getattr(config, 'attention_config', '')}"
    layout = KvLayout(
        weights_revision=f"{model.model}@{model.revision or ''} {weights_digest(model.model)}",
        kv_dtype=f"{model.dtype} {config.cache_config.cache_dtype}",
        # everything that decides how a block's bytes are laid out, as far as vLLM says it
        layout=f"vllm {version} {spec!r} {os.environ.get('VLLM_KV_CACHE_LAYOUT', '')}",
        num_layers=sum(len(group.layer_names) for group in kv_cache.kv_cache_groups),
        num_kv_heads=int(getattr(spec, "num_kv_heads", 0)),
        head_size=int(getattr(spec, "head_size", 0)),
        block_bytes=block_bytes_of(kv_cache),
        quantisation=str(model.quantization or "none"),
        attention_backend=backend,
    )
    return layout.fingerprint()


def weights_digest(folder: str) -> str:
    """Return a digest of a folder of weights: names, sizes, and the ends of each file.

    Checkpoints that replace one another under one path differ in it. Empty for a name on a hub,
    whose revision says the same.
    """
    content = hashlib.sha256()
    for file in sorted(Path(folder).glob("*.safetensors")) + sorted(Path(folder).glob("*.bin")):
        size = file.stat().st_size
        content.update(f"{file.name} {size} ".encode())
        with file.open("rb") as opened:
            content.update(opened.read(_END_BYTES))
            opened.seek(max(size - _END_BYTES, 0))
            content.update(opened.read(_END_BYTES))
    return content.hexdigest()[:32] if Path(folder).is_dir() else ""


def full_groups(kv_cache: Any) -> tuple[int, ...]:
    """Return the KV groups of which a prefix needs every block, by the names of their specs."""
    kinds = [type(group.kv_cache_spec).__name__ for group in kv_cache.kv_cache_groups]
    return tuple(i for i, kind in enumerate(kinds) if not _WINDOWED.search(kind)) or (0,)
