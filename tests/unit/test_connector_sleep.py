"""The connector while its engine sleeps. vLLM is not here: its base classes are stood in for."""

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvatlas.worker_hooks.connector.loads import LoadOutcomes
from kvatlas.worker_hooks.connector.orders import BlockLoad, Orders, SidecarAddress

CONNECTOR = "kvatlas.worker_hooks.vllm_connector"
V1 = "vllm.distributed.kv_transfer.kv_connector.v1"
NUM_BLOCKS = 3


class StandIn:
    """A base class of vLLM's, of which only the constructor is used."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.metadata: Any = None

    def _get_connector_metadata(self) -> Any:
        return self.metadata


class Piece:
    """A contiguous part of a tensor."""

    nbytes = 8

    def is_contiguous(self) -> bool:
        return True


class Layer:
    """A tensor of a layer, by block."""

    shape = (NUM_BLOCKS, 2, 4)

    def __getitem__(self, block: int) -> Piece:
        return Piece()


class EndedLoads:
    """Loads of which one is under way when they are closed."""

    is_closed = False

    def close(self) -> None:
        self.is_closed = True

    def finished(self) -> set[str]:
        return {"r1"} if self.is_closed else set()

    def failed(self) -> set[int]:
        return {2} if self.is_closed else set()

    def outcomes(self) -> LoadOutcomes:
        return LoadOutcomes(int(self.is_closed))


@pytest.fixture
def connector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    names = ("KVConnectorBase_V1", "KVConnectorMetadata", "KVConnectorRole", "SupportsHMA")
    base, metrics = ModuleType(f"{V1}.base"), ModuleType(f"{V1}.metrics")
    for name in names:
        setattr(base, name, type(name, (StandIn,), {}))
    for name in ("KVConnectorPromMetrics", "KVConnectorStats"):
        setattr(metrics, name, type(name, (StandIn,), {}))
    parents = ("vllm", "vllm.distributed", "vllm.distributed.kv_transfer")
    for parent in (*parents, f"{parents[-1]}.kv_connector", V1):
        monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    monkeypatch.setitem(sys.modules, base.__name__, base)
    monkeypatch.setitem(sys.modules, metrics.__name__, metrics)
    monkeypatch.delitem(sys.modules, CONNECTOR, raising=False)
    module = importlib.import_module(CONNECTOR)
    transfer = SimpleNamespace(
        kv_load_failure_policy="recompute", kv_connector_extra_config={}, kv_connector="x"
    )
    config = SimpleNamespace(
        kv_transfer_config=transfer,
        parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1),
    )
    kv_cache = SimpleNamespace(num_blocks=NUM_BLOCKS, kv_cache_groups=[0])
    made = module.KvatlasConnector(config, None, kv_cache)
    made.register_kv_caches({"layer": Layer()})
    yield made
    # as it was imported it has stand-ins for bases
    sys.modules.pop(CONNECTOR, None)


def test_it_follows_an_engine_into_sleep(connector: Any) -> None:
    assert type(connector).supports_sleep_mode(None) is True


def test_nothing_of_the_engines_memory_is_held_while_it_sleeps(connector: Any) -> None:
    assert connector._layers is not None
    for _ in range(2):  # idempotent
        connector.unregister_kv_caches()
        assert vars(connector)["_layers"] is None
    for _ in range(2):
        connector.restore_kv_caches()
        assert vars(connector)["_layers"].block_bytes == 8
    restored = connector._layers
    connector.restore_kv_caches()
    assert connector._layers is restored


def test_a_load_that_was_under_way_is_reported_as_failed(connector: Any) -> None:
    loads = connector._loads = EndedLoads()
    connector.unregister_kv_caches()
    assert loads.is_closed
    assert connector._loads is None
    assert connector.get_block_ids_with_load_errors() == {2}
    assert connector.get_finished(set()) == (None, {"r1"})
    assert connector._outcomes.num_loads == 1


def test_a_load_that_comes_meanwhile_is_computed(connector: Any) -> None:
    connector.unregister_kv_caches()
    orders = Orders()
    orders.beside = SidecarAddress("", "", 1)
    orders.loads.append(BlockLoad("r2", (1,), (b"h" * 16,), ()))
    connector.metadata = sys.modules[CONNECTOR].OrdersMetadata(orders)
    connector.start_load_kv(None)
    assert connector.get_block_ids_with_load_errors() == {1}
    assert connector.get_finished(set()) == (None, {"r2"})


def test_what_was_never_registered_is_not_restored(connector: Any) -> None:
    connector._kv_caches = connector._layers = None
    connector.restore_kv_caches()
    assert connector._layers is None
