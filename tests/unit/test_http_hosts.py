"""Which hosts and origins a server answers."""

import pytest

from kvatlas.router.http.server.hosts import HostRules

LOOPBACK = HostRules("127.0.0.1")
WIDE = HostRules("0.0.0.0", is_loopback=False)
NAMED = HostRules("0.0.0.0", "kv.example, Console.Example", is_loopback=False)


def status(rules: HostRules, method: str, host: str, origin: str | None = None) -> int:
    headers = [(b"host", host.encode())]
    if origin is not None:
        headers.append((b"origin", origin.encode()))
    refused = rules.judge(method, headers)
    return refused.status if refused else 200


@pytest.mark.parametrize(
    "host",
    ["localhost", "LOCALHOST:8080", "127.0.0.1:8080", "127.8.9.1", "[::1]:8080", "a.localhost"],
)
def test_loopback_answers_to_its_names(host: str) -> None:
    assert status(LOOPBACK, "GET", host) == 200


@pytest.mark.parametrize("host", ["kvatlas-router", "x:80"])
def test_loopback_answers_to_names_that_no_public_page_has(host: str) -> None:
    assert status(LOOPBACK, "GET", host) == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8080", "localhost.evil.example", "10.0.0.1", "", ":80"]
)
def test_loopback_answers_to_no_other(host: str) -> None:
    refused = LOOPBACK.judge("GET", [(b"host", host.encode())])
    assert refused
    assert (refused.status, refused.field) == (421, "host")
    assert "router.allowed_hosts" in refused.detail


def test_another_address_answers_to_any_host_unless_hosts_are_named() -> None:
    assert status(WIDE, "GET", "evil.example") == 200
    assert status(NAMED, "GET", "evil.example") == 421
    for host in ("kv.example", "console.example:443", "10.0.0.1:8080", "localhost"):
        assert status(NAMED, "GET", host) == 200


def test_a_star_accepts_any() -> None:
    assert status(HostRules("127.0.0.1", "*"), "POST", "evil.example", "http://b.example") == 200


def test_the_configured_host_is_accepted() -> None:
    assert status(HostRules("kv.internal.example"), "GET", "kv.internal.example:8080") == 200


@pytest.mark.parametrize(
    ("origin", "expected"),
    [
        (None, 200),
        ("http://localhost:8080", 200),
        ("http://localhost:8081", 403),
        ("http://evil.example", 403),
        ("null", 403),
        ("http://[", 403),
    ],
)
def test_what_a_page_sends_comes_from_the_host_that_it_asks(
    origin: str | None, expected: int
) -> None:
    assert status(LOOPBACK, "POST", "localhost:8080", origin) == expected
    assert status(WIDE, "POST", "localhost:8080", origin) == expected
    assert status(LOOPBACK, "GET", "localhost:8080", origin) == 200


def test_an_origin_without_a_port_has_that_of_its_scheme() -> None:
    assert status(LOOPBACK, "POST", "localhost:80", "http://localhost") == 200
    assert status(LOOPBACK, "POST", "localhost", "https://localhost:443") == 200


def test_pages_of_named_hosts_may_send() -> None:
    assert status(NAMED, "POST", "kv.example", "https://console.example") == 200


def test_two_hosts_are_refused() -> None:
    refused = LOOPBACK.judge("GET", [(b"host", b"localhost"), (b"host", b"localhost")])
    assert refused
    assert refused.status == 400
