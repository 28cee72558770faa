"""What settings say of sidecars reaches each of them, whatever starts it."""

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

import kvatlas.cli.bridge  # noqa: F401 - registers its command
from kvatlas.cli.commands import run_command
from kvatlas.schemas.errors import InvalidSetting
from kvatlas.schemas.hashing import HashAlgorithm
from kvatlas.schemas.settings import (
    FleetSettings,
    LogSettings,
    NixlSettings,
    ReportingSettings,
    Settings,
    SidecarSettings,
    environment_of,
    load_settings,
)
from kvatlas.worker_hooks import sglang_plugin
from kvatlas.worker_hooks.reporting.ring import RingWriter
from kvatlas.worker_hooks.sidecar.options import SidecarOptions
from kvatlas.worker_hooks.sidecar.plugin_endpoint import parse_endpoint
from kvatlas.worker_hooks.vllm_plugin import facts

#: no broker, no engine: nothing gets so far
NATS = "nats://127.0.0.1:1"
#: each differs from its default, and is within its bounds
REPORTING = {
    field.name: type(field.default)(field.default / 2)
    for field in msgspec.structs.fields(ReportingSettings)
}
NIXL = NixlSettings("tcp", True, 7.0, 0.7, 7, 77, 7.0)
METRICS = "127.0.0.1:9"
SETTINGS = Settings(
    log=LogSettings(replicas=3),
    fleet=FleetSettings(key="ab" * 16, block_hash="sha256", wire_version=100),
    sidecar=SidecarSettings(**REPORTING, metrics_address=METRICS),
    nixl=NIXL,
)
TOLD = REPORTING | {
    "replicas": 3,
    "fleet_key": bytes.fromhex("ab" * 16),
    "wire_version": 100,
    "nixl": NIXL,
    "metrics_address": METRICS,
}

Starts = Callable[[Path], object]


def a_command(*arguments: str) -> Starts:
    def run(folder: Path) -> int:
        RingWriter.create(folder / "ring").close()
        named = [argument.format(folder=folder) for argument in arguments]
        return run_command([*named, "--nats", NATS])

    return run


def sglang(_: Path) -> None:
    sglang_plugin.sidecar_options(f"{NATS}?model=m&block_tokens=4", 0).validate()


def vllm(_: Path) -> None:
    spread: Any = SimpleNamespace(
        vllm_config=SimpleNamespace(
            model_config=SimpleNamespace(served_model_name="m"),
            kv_transfer_config=None,
            parallel_config=SimpleNamespace(tensor_parallel_size=2),
        ),
        kv_cache_config=SimpleNamespace(kv_cache_groups=[], num_blocks=2),
    )
    said = parse_endpoint(f"{NATS}?worker=w&block_tokens=4")
    facts.sidecar_options(said, load_settings(), 0, spread, "1").validate()


STARTS: dict[str, Starts] = {
    "kvatlas sidecar": a_command(
        "sidecar", "--worker", "w", "--model", "m", "--ring", "{folder}/ring",
        "--socket", "{folder}/socket",
    ),
    "kvatlas bridge": a_command(
        "bridge", "--engine", "vllm", "--worker", "w", "--model", "m",
        "--endpoint", "tcp://127.0.0.1:1", "--block-tokens", "4",
    ),
    "kvatlas worker": a_command("worker", "--name", "w", "--folder", "{folder}"),
    "vllm": vllm,
    "sglang": sglang,
}  # fmt: skip


@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS.keys())
def test_each_sidecar_is_told_what_the_settings_say(
    start: Starts,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    started: list[SidecarOptions] = []

    def validate(options: SidecarOptions) -> None:
        started.append(options)
        raise InvalidSetting("worker", "test", "seen")

    caplog.set_level(logging.INFO, "kvatlas")  # commands set it; this sets it back
    monkeypatch.setattr(SidecarOptions, "validate", validate)
    for variable, value in environment_of(SETTINGS, "log", "fleet", "sidecar", "nixl").items():
        monkeypatch.setenv(variable, value)
    with contextlib.suppress(InvalidSetting):
        start(tmp_path)
    (options,) = started
    assert {name: getattr(options, name) for name in TOLD} == TOLD
    assert options.descriptor.algorithm is HashAlgorithm.sha256_128


@pytest.mark.parametrize("query", ["", "&replicas=5"])
def test_an_endpoint_says_replicas_where_the_environment_of_an_engine_does_not(
    query: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVATLAS_LOG__REPLICAS", "3")
    options = sglang_plugin.sidecar_options(f"{NATS}?model=m&block_tokens=4{query}", 0)
    assert options.replicas == (5 if query else 3)


def test_replicas_in_an_endpoint_have_the_bounds_of_the_setting() -> None:
    with pytest.raises(InvalidSetting, match="replicas"):
        parse_endpoint(f"{NATS}?replicas=6")
