from pathlib import Path

import pytest

from kvatlas.schemas.errors import InvalidSetting
from kvatlas.schemas.settings import (
    Settings,
    environment_of,
    load_settings,
    settings_by_key,
    variable_of,
)


def test_defaults_are_the_bare_tree() -> None:
    assert load_settings(environment={}) == Settings()


def test_flags_win_over_environment_over_file(tmp_path: Path) -> None:
    file = tmp_path / "kvatlas.toml"
    file.write_text('[router]\nport = 1\npolicy = "random"\nseed = 7\n')
    environment = {
        "KVATLAS_ROUTER__PORT": "2",
        "KVATLAS_ROUTER__POLICY": "round_robin",
        "HOME": "x",
    }
    router = load_settings(file, environment, [("router.port", "3")]).router
    assert (router.port, router.policy, router.seed) == (3, "round_robin", 7)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("router.prot", "1", "unknown; did you mean router.port?"),
        ("sidecar.x", "1", "unknown; known are sidecar.coalesce_bytes, "),
        ("x.y", "1", "unknown; known sections are archive, fleet, indexer, "),
        ("router", "1", "unknown"),
        ("router.port", "65536", "expected int, 0..65535"),
        ("router.port", "x", "expected int, 0..65535"),
        ("router.degraded_match_share", "1.5", "expected float, 0..1"),
        ("indexer.kernel", "rust", "expected str, one of flat, reference"),
        ("fleet.key", "abc", "expected str, hex digits, two a byte"),
        ("fleet.wire_version", "99", "expected int, 100..102"),
        ("fleet.wire_version", "200", "expected int, 100..102"),
        ("sidecar.namespace_blocks_per_second", "-1", "expected float, 0..1e+15"),
        ("sidecar.namespace_burst_blocks", "0", "expected float, above 0, at most 1e+15"),
        ("log.replicas", "0", "expected int, 1..5"),
        ("router.policy", "best", "expected str, one of predicted_ttft, round_robin, "),
    ],
)
def test_a_bad_flag_is_named_with_what_is_allowed(key: str, value: str, says: str) -> None:
    with pytest.raises(InvalidSetting) as caught:
        load_settings(environment={}, flags=[(key, value)])
    assert caught.value.key == key
    assert caught.value.source == f"flag --set {key}"
    assert says in caught.value.problem


@pytest.mark.parametrize(
    "variable", ["KVATLAS_ROUTER__PROT", "KVATLAS_ROOTER__PORT", "KVATLAS_X__Y"]
)
def test_an_unknown_variable_is_named(variable: str) -> None:
    with pytest.raises(InvalidSetting, match=variable):
        load_settings(environment={variable: "1"})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("port = 1", "outside a section"),
        ("[router]\nport = '1'", "expected int, 0..65535, found str"),
        ("[router", "Expected ']'"),
        ("[ruter]\nport = 1", "unknown"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "kvatlas.toml"
    file.write_text(text)
    with pytest.raises(InvalidSetting) as caught:
        load_settings(file, {})
    assert caught.value.source == str(file)
    assert says in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match=r"absent\.toml"):
        load_settings(tmp_path / "absent.toml", {})


def test_variables_that_kubernetes_sets_for_a_service_are_no_settings() -> None:
    environment = {
        "KVATLAS_ROUTER_PORT": "tcp://10.0.0.1:8080",
        "KVATLAS_ROUTER_SERVICE_HOST": "10.0.0.1",
        "KVATLAS_PORT_8080_TCP_PROTO": "tcp",
    }
    assert load_settings(environment=environment) == Settings()


def test_another_process_is_told_all_settings_whatever_it_inherits() -> None:
    inherited = {
        "KVATLAS_ROUTER__SEED": "5",
        "KVATLAS_ROUTER__IS_PORT_SHARED": "true",
        "KVATLAS_NATS__FOLDER": "/nats",
    }
    flags = {
        "router.seed": "0",  # as by default
        "router.is_port_shared": "false",
        "router.max_failure_pause_seconds": "1e15",
        "nats.folder": "",
        "fleet.key": "00ff",
        "sidecar.coalesce_seconds": "0.1",
    }
    settings = load_settings(environment=inherited, flags=flags.items())
    told = environment_of(settings, *Settings.__struct_fields__)
    assert load_settings(environment=inherited | told) == settings
    assert told.keys() == {variable_of(key) for key in settings_by_key()}


def test_each_key_has_an_environment_name_of_its_own() -> None:
    names = {key.replace(".", "_").upper() for key in settings_by_key()}
    assert len(names) == len(settings_by_key())
