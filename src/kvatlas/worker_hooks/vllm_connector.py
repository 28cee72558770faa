"""vLLM's KV connector: brings a request's missing blocks from peers, and lends its own.

    --kv-transfer-config '{"kv_connector": "KvatlasConnector", "kv_role": "kv_both",
        "kv_connector_module_path": "kvatlas.worker_hooks.vllm_connector",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"serve_bytes": 4000000000}}'

Needs the plugin (`vllm_plugin`), whose sidecar pulls and lends. What to pull stands in a request's
`kv_transfer_params`, as the router's `/v1/route` answers them; without, a router named by the extra
config `router_url` is asked who holds the prompt. A pull that fails is never an error
of the request: the engine computes what did not come.
"""

from collections import Counter
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvatlas.schemas.errors import InvalidBlock, InvalidSetting, PoolUnreadable
from kvatlas.schemas.hashing import BlockHasher
from kvatlas.worker_hooks.connector.finding import HolderFinder, Pending
from kvatlas.worker_hooks.connector.layers import LayerMemory
from kvatlas.worker_hooks.connector.loads import BlockLoader, LoadOutcomes
from kvatlas.worker_hooks.connector.orders import BlockSave, Orders, SidecarAddress
from kvatlas.worker_hooks.connector.requests import RequestBlocks, plan_in
from kvatlas.worker_hooks.connector.slots import PoolSlots
from kvatlas.worker_hooks.connector.stats import BLOCKS, LOADS, SECONDS, added, in_words, stats_of
from kvatlas.worker_hooks.log_lines import printable_log
from kvatlas.worker_hooks.sidecar.beside_engine import plugin_settings
from kvatlas.worker_hooks.transfer.pool import ServePool
from kvatlas.worker_hooks.vllm_plugin.facts import why_no_exchange
from kvatlas.worker_hooks.vllm_plugin.running import current

#: extra config: blocks copied to the serve pool in one step, the longest wait for a pull
SAVE_BLOCKS_PER_STEP, PULL_DEADLINE_SECONDS = "save_blocks_per_step", "pull_deadline_seconds"
DEFAULT_SAVE_BLOCKS_PER_STEP = 64
#: extra config: a router to ask about requests without a plan, and how long it may take
ROUTER_URL, FIND_MS = "router_url", "find_ms"
DEFAULT_FIND_MS = 50.0

#: pools that a worker's side in this process writes to, for a reset on the scheduler's side
_slots_here: dict[str, PoolSlots] = {}

_log = printable_log("vllm.kvatlas")


class OrdersMetadata(KVConnectorMetadata):  # type: ignore[misc]  # no types here
    """One step's orders, as vLLM carries them to the worker's side."""

    def __init__(self, orders: Orders) -> None:
        self.orders = orders


class PullStats(KVConnectorStats):  # type: ignore[misc]
    """What became of the loads of an interval."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: Any) -> "PullStats":
        self.data = added(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        return in_words(self.data)

    def is_empty(self) -> bool:
        return not self.data.get(LOADS)


class PullMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The same for Prometheus, counted since the start."""

    def __init__(
        self, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._loads, self._seconds, self._blocks = (
            self._counter_cls(name=f"vllm:kvatlas_{name}", documentation=text, labelnames=labels)
            for name, text, labels in (
                ("loads", "Requests for which KvatlasConnector has loaded blocks.", labelnames),
                ("load_seconds", "How long these requests waited for that.", labelnames),
                (
                    "load_blocks",
                    "Blocks by what became of them: held and own came, others say why not.",
                    [*labelnames, "outcome"],
                ),
            )
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        self._loads.labels(*labels).inc(transfer_stats_data.get(LOADS, 0))
        self._seconds.labels(*labels).inc(transfer_stats_data.get(SECONDS, 0.0))
        for outcome, number in transfer_stats_data.get(BLOCKS, {}).items():
            self._blocks.labels(*labels, outcome).inc(number)


class KvatlasConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Both sides; vLLM makes one of each."""

    def __init__(
        self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        if transfer.kv_load_failure_policy != "recompute":
            found = transfer.kv_load_failure_policy
            problem = f'{found!r}: with anything but "recompute" a lost peer fails requests'
            raise InvalidSetting("kv_load_failure_policy", "--kv-transfer-config", problem)
        extra = transfer.kv_connector_extra_config or {}
        self._save_budget = int(extra.get(SAVE_BLOCKS_PER_STEP, DEFAULT_SAVE_BLOCKS_PER_STEP))
        default_deadline = plugin_settings().sidecar.pull_deadline_seconds
        self._deadline_seconds = float(extra.get(PULL_DEADLINE_SECONDS, default_deadline))
        self._router_url = str(extra.get(ROUTER_URL, ""))
        self._find_seconds = float(extra.get(FIND_MS, DEFAULT_FIND_MS)) / 1000
        self._finder: HolderFinder | None = None
        self._is_idle = bool(why_no_exchange(vllm_config, kv_cache_config))
        self._num_blocks: int = kv_cache_config.num_blocks
        # scheduler's side
        self._requests: dict[str, RequestBlocks] = {}
        self._tokens: dict[str, Any] = {}
        self._orders = Orders()
        # worker's side
        self._layers: LayerMemory | None = None
        #: as registered; kept while the engine sleeps, for then only its memory goes
        self._kv_caches: dict[str, Any] | None = None
        self._slots: PoolSlots | None = None
        self._loads: BlockLoader | None = None
        #: of the sidecar that slots and loads are of
        self._generation = 1
        #: of loads that came while nothing runs beside the engine
        self._lost_loads: set[str] = set()
        self._lost_blocks: set[int] = set()
        #: of those, and of loads beside a sidecar that has ended
        self._outcomes = LoadOutcomes()

    # --- scheduler's side, nothing of which waits -----------------------------------------------

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        blocks = self._blocks_of(request)
        if blocks is None:
            return 0, False
        if blocks.may_be_found and (finder := self._finder_beside()) is not None:
            found = finder.find(request.request_id, request.prompt_token_ids, request.cache_salt)
            if isinstance(found, Pending):
                return None, False
            blocks.found(found)
        block_tokens = self._block_tokens
        num_held = num_computed_tokens // block_tokens
        wanted = blocks.wanted_blocks(num_held, request.prompt_token_ids)
        return wanted * block_tokens, wanted > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        known = self._requests.get(request.request_id)
        if known is None:
            return
        known.block_ids = list(blocks.get_block_ids()[0])
        if num_external_tokens:
            self._orders.loads.append(known.load(num_external_tokens // self._block_tokens))

    def build_connector_meta(self, scheduler_output: Any) -> OrdersMetadata:
        orders, self._orders = self._orders, Orders()
        running = current()
        if running is not None and not self._is_idle:
            options = running.options
            orders.beside = SidecarAddress(
                options.socket_path, options.pool_path, running.beside.generation
            )
            self._note_blocks(scheduler_output)
            orders.saves = self._saves(scheduler_output.num_scheduled_tokens)
        return OrdersMetadata(orders)

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        self._requests.pop(request.request_id, None)
        self._tokens.pop(request.request_id, None)
        if self._finder is not None:
            self._finder.forget(request.request_id)
        return False, None

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return self.request_finished(request, block_ids)

    def reset_cache(self) -> bool | None:
        """Forget the serve pool with the engine's cache: its KV may be of other weights now.

        Returns False while peers read some of it; that goes with the next steps.
        """
        running = current()
        if running is None or not running.options.num_slots:
            return True
        slots = _slots_here.get(running.options.pool_path)
        if slots is not None:
            return slots.clear()
        self._orders.clears = True  # for the worker's side, which has a process of its own
        try:
            with ServePool.attach(Path(running.options.pool_path)) as pool:
                every = range(pool.num_slots)
                return len(pool.try_evict(every)) == len(every)
        except PoolUnreadable:
            return True  # the sidecar has not made it yet

    @property
    def _block_tokens(self) -> int:
        running = current()
        assert running is not None
        return running.options.descriptor.block_tokens

    def _blocks_of(self, request: Any) -> RequestBlocks | None:
        """Return what is kept of a request; None for one whose blocks have no name of ours."""
        known = self._requests.get(request.request_id)
        running = current()
        if known is not None or running is None or self._is_idle:
            return known
        if request.lora_request is not None or request.mm_features or not request.prompt_token_ids:
            return None  # an adapter's content, or an image's place, is not known here
        options = running.options
        if not options.num_slots:
            return None
        namespace = options.descriptor.namespace(options.model, None, request.cache_salt)
        plan = plan_in(request.kv_transfer_params)
        known = RequestBlocks(request.request_id, BlockHasher(namespace, options.fleet_key), plan)
        self._requests[request.request_id] = known
        self._tokens[request.request_id] = request
        return known

    def _finder_beside(self) -> HolderFinder | None:
        running = current()
        if self._finder is None and self._router_url and running is not None:
            options = running.options
            self._finder = HolderFinder(
                self._router_url,
                options.model,
                options.instance,
                options.descriptor.block_tokens,
                self._find_seconds,
            )
        return self._finder

    def _note_blocks(self, scheduler_output: Any) -> None:
        for new in scheduler_output.scheduled_new_reqs:
            if new.req_id in self._requests:
                self._requests[new.req_id].block_ids = list(new.block_ids[0])
        cached = scheduler_output.scheduled_cached_reqs
        for request_id, new_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            known = self._requests.get(request_id)
            if known is None or new_ids is None:
                continue
            if request_id in cached.resumed_req_ids:
                known.block_ids = list(new_ids[0])
            else:
                known.block_ids += new_ids[0]

    def _saves(self, num_scheduled_tokens: dict[str, int]) -> list[BlockSave]:
        budget, saves = self._save_budget, list[BlockSave]()
        for request_id in num_scheduled_tokens:
            known = self._requests.get(request_id)
            if known is not None and budget > 0:
                request = self._tokens[request_id]
                # this step's tokens are not counted as computed yet
                num_computed = request.num_computed_tokens + num_scheduled_tokens[request_id]
                if num_computed // self._block_tokens > known.num_saved:
                    saves += known.completed(request.all_token_ids[:num_computed], budget)
                budget = self._save_budget - len(saves)
        return saves

    # --- worker's side ------------------------------------------------------------------------

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """The engine's KV may move while it sleeps: it is looked up by tensor, never by address."""
        return True

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        if not self._is_idle:
            self._kv_caches = kv_caches
            self._layers = LayerMemory(kv_caches, self._num_blocks)

    def unregister_kv_caches(self) -> None:
        """Hold none of the engine's KV memory, before it sleeps. Idempotent.

        Loads have been drained by then; one that has not counts as lost, and its blocks are
        computed. What the serve pool has stays lent: it is memory of its own.
        """
        self._end_loads()
        self._layers = None

    def restore_kv_caches(self) -> None:
        """Take the engine's KV memory again, after it has woken up. Idempotent."""
        if self._layers is None and self._kv_caches is not None:
            self._layers = LayerMemory(self._kv_caches, self._num_blocks)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        orders = self._orders_now()
        slots = self._slots_beside(orders.beside)
        if slots is not None:
            if orders.clears:
                slots.clear()
            slots.sweep()
        if not orders.loads:
            return
        loads = self._loads_beside(orders.beside)
        for load in orders.loads:
            if loads is None:
                self._lost_loads.add(load.request_id)
                self._lost_blocks.update(load.block_ids)
                lost = Counter(no_sidecar=len(load.block_ids))
                self._outcomes.add(LoadOutcomes(1, 0.0, lost))
            else:
                loads.start(load)

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        pass

    def wait_for_save(self) -> None:
        """Copy what this step has completed, before the next one may overwrite it."""
        orders = self._orders_now()
        slots = self._slots_beside(orders.beside) if orders.saves else None
        if slots is None or self._layers is None:
            return
        try:
            for save in orders.saves:
                if slots.slot_of(save.block_hash) is None:
                    slots.save(save.block_hash, *self._layers.parts(save.block_id))
        except InvalidBlock as error:
            _log.error("kvatlas: blocks are not lent: %s", error)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        finished, self._lost_loads = self._lost_loads, set()
        if self._loads is not None:
            finished |= self._loads.finished()
        return None, finished or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._lost_blocks = self._lost_blocks, set()
        if self._loads is not None:
            failed |= self._loads.failed()
        return failed

    def get_kv_connector_stats(self) -> PullStats | None:
        outcomes, self._outcomes = self._outcomes, LoadOutcomes()
        if self._loads is not None:
            outcomes.add(self._loads.outcomes())
        return PullStats(data=stats_of(outcomes)) if outcomes.num_loads else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> PullStats:
        return PullStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any
    ) -> PullMetrics:
        return PullMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        if self._finder is not None:
            self._finder.close()
        if self._loads is not None:
            self._loads.close()
            self._loads = None

    def _orders_now(self) -> Orders:
        metadata = self._get_connector_metadata()
        return metadata.orders if isinstance(metadata, OrdersMetadata) else Orders()

    def _slots_beside(self, beside: SidecarAddress | None) -> PoolSlots | None:
        """Return the slots, as soon as the sidecar has made the pool."""
        if beside is not None and beside.generation != self._generation:
            self._generation, self._slots = beside.generation, None
            self._end_loads()
        if self._slots is None and beside is not None and beside.pool_path:
            try:
                pool = ServePool.attach(Path(beside.pool_path))
            except PoolUnreadable:
                return None
            if self._layers is not None and pool.block_bytes != self._layers.block_bytes:
                _log.error("kvatlas: the pool's blocks are of another size than the engine's")
                self._layers = self._kv_caches = None
            self._slots = _slots_here[beside.pool_path] = PoolSlots(pool)
        return self._slots

    def _end_loads(self) -> None:
        """Keep what became of the loads under way, and none of them."""
        if self._loads is not None:
            self._loads.close()
            self._lost_loads |= self._loads.finished()
            self._lost_blocks |= self._loads.failed()
            self._outcomes.add(self._loads.outcomes())
            self._loads = None

    def _loads_beside(self, beside: SidecarAddress | None) -> BlockLoader | None:
        slots, layers = self._slots_beside(beside), self._layers
        if self._loads is None and beside is not None and slots is not None and layers is not None:
            self._loads = BlockLoader(
                beside.socket_path,
                slots,
                lambda block_id, slot: layers.fill(block_id, slots.pool, slot),
                self._deadline_seconds,
            )
        return self._loads
