"""Which Host and Origin headers a server accepts: what keeps web pages of others away from it.

A page in a browser can send requests to any address that the browser reaches. It may not read the
answer unless its own name leads to that address (DNS rebinding), which the Host header shows; and
what it sends across origins carries an Origin header that is not the host asked.
"""

import ipaddress
from collections.abc import Iterable
from urllib.parse import urlsplit

from kvatlas.router.http.problems import Problem, problem

SETTING = "router.allowed_hosts"
#: headers that are remembered as accepted; more are judged anew each time
_MAX_KNOWN = 256
_MAX_SHOWN = 100
_READING = frozenset(["GET", "HEAD", "OPTIONS"])


class HostRules:
    """The names by which one server may be asked.

    Without `allowed` (comma-separated names, `*` for any), a server on loopback takes loopback
    names and addresses, names without a dot, which no public page has, and `listen_host`; one on
    another address takes any. With it, those names and whatever the address of the server is.
    """

    def __init__(self, listen_host: str, allowed: str = "", *, is_loopback: bool = True) -> None:
        names = {_name(each.strip()) for each in allowed.split(",") if each.strip()}
        self._takes_any = "*" in names or (not names and not is_loopback)
        self._takes_any_origin = "*" in names
        self._takes_addresses = not is_loopback
        self._takes_plain_names = not names
        self._allowed = frozenset(names)
        self._names = self._allowed | {_name(listen_host), "localhost"}
        #: Host headers that were accepted, at most _MAX_KNOWN
        self.known = set[bytes]()

    @classmethod
    def accepting_any(cls) -> "HostRules":
        """Return the rules that accept any host."""
        return cls("", is_loopback=False)

    def accepts(self, host: bytes) -> bool:
        """Return whether a Host header is accepted."""
        if host in self.known:
            return True
        if not self._is_accepted(_name(host.decode("latin-1"))):
            return False
        if len(self.known) < _MAX_KNOWN:
            self.known.add(host)
        return True

    def judge(self, method: str, headers: Iterable[tuple[bytes, bytes]]) -> Problem | None:
        """Return why a request is refused: 400, 421 for its host, 403 for its origin; or None."""
        hosts, origins = list[bytes](), list[bytes]()
        for name, value in headers:
            if name == b"host":
                hosts.append(value)
            elif name == b"origin":
                origins.append(value)
        if len(hosts) > 1:
            return problem(400, "given more than once, expected one", "host")
        for host in hosts:
            if not self.accepts(host):
                found = host.decode("latin-1")[:_MAX_SHOWN]
                detail = f"{found!r} is no name of this server; {SETTING} adds names"
                return problem(421, detail, "host")
        if method in _READING:
            return None
        for origin in origins:
            if not self._is_own(origin.decode("latin-1"), hosts):
                found = origin.decode("latin-1")[:_MAX_SHOWN]
                detail = f"a page of {found!r} may not send this; {SETTING} adds its host"
                return problem(403, detail, "origin")
        return None

    def _is_accepted(self, name: str) -> bool:
        if self._takes_any or name in self._names or name.endswith(".localhost"):
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return self._takes_plain_names and bool(name) and "." not in name
        return self._takes_addresses or address.is_loopback

    def _is_own(self, origin: str, hosts: list[bytes]) -> bool:
        if self._takes_any_origin:
            return True
        try:
            found = urlsplit(origin)
        except ValueError:
            return False
        if found.scheme not in ("http", "https"):
            return False
        default = ":80" if found.scheme == "http" else ":443"
        asked = hosts[0].decode("latin-1").lower() if hosts else ""
        is_same = found.netloc.lower().removesuffix(default) == asked.removesuffix(default)
        return is_same or _name(found.netloc) in self._allowed


def _name(host: str) -> str:
    """Return a host in lower case without its port; an IPv6 address without its brackets."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    name, _, port = host.rpartition(":")
    return (name if ":" not in name and port.isdigit() else host).rstrip(".")
