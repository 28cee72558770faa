"""One connection to NATS that is made again whenever it is lost.

nats-py can reconnect by itself, but then sends what it had buffered before our publishers send
again, so that new messages overtake old ones, and it gives up for good on some errors of the
broker. So each nats-py client lives for one connection only; what uses it (`NatsPublisher`,
`PushConsumer`, `NatsService`) starts over on the next one.

A node whose JetStream answers nothing any more is left for another one (nodes.py decides).
"""

import asyncio
import logging
import random
import re
import socket
import ssl
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import ParseResult, urlsplit

import nats.errors
from nats.aio.client import Client, Server
from nats.aio.subscription import Subscription
from nats.js.errors import APIError

from kvatlas.events.bus import OnConnection
from kvatlas.events.nats.broker_clock import BrokerClock
from kvatlas.events.nats.credentials import login_of
from kvatlas.events.nats.errors import DRIVER_ERRORS, translate
from kvatlas.events.nats.nodes import Patience, Servers, Silences, is_address
from kvatlas.events.nats.quorum import is_without_leader
from kvatlas.schemas.conditions import (
    BROKER_AWAY,
    PERMISSION_DENIED,
    Conditions,
    Problems,
    log_changes,
)
from kvatlas.schemas.errors import BusUnavailable, InvalidSetting, KvatlasError, RequestTimedOut

T = TypeVar("T")

#: how long an exchange with the broker may take, unless its caller says otherwise
EXCHANGE_SECONDS = 5.0
#: a dead peer is noticed after three of these
PING_SECONDS = 5
#: nats-py waits without end when this much is unsent as the connection breaks; our publishers
#: keep less in flight, so it never does
UNSENT_BYTES = 64 << 20
#: a lost client tells so, but not before the lost peer has taken what was unsent: look as well
CHECK_SECONDS = 0.5
CLOSE_SECONDS = 2.0
#: until a user that the broker has refused is tried again, with what its file says by then
REFUSED_SECONDS = 1.0
#: until a task that has not heard its cancellation is told again
CANCEL_SECONDS = 0.1

_refusal = re.compile("authorization violation|authentication (expired|revoked)")
#: what differs in the texts of one denial each time
_random_names = re.compile(r"(?<=_inbox\.)[\w.*>-]+|(?<=kvatlas-)[0-9a-f]{16}")

_logger = logging.getLogger(__name__)


class NatsConnection:
    """Gives the present client to whoever asks, and tells when it comes and goes."""

    def __init__(
        self,
        servers: Sequence[str],
        *,
        name: str = "kvatlas",
        creds_file: Path | None = None,
        nkey_file: Path | None = None,
        tls: ssl.SSLContext | None = None,
        reconnect_seconds: float = 0.2,
        conditions: Conditions | None = None,
    ) -> None:
        _check_addresses(servers)
        #: either kind of file
        self._login_file = creds_file or nkey_file
        if self._login_file is not None:
            login_of(self._login_file)
        if conditions is None:
            conditions = Conditions()
            log_changes(conditions, _logger)
        self.conditions = conditions
        self._servers = Servers(servers)
        self._name = name
        self._tls = tls
        self._reconnect_seconds = reconnect_seconds
        self._client: Client | None = None
        #: done when the present client is lost; a new one for each client
        self._gone: asyncio.Future[None] | None = None
        self._up = asyncio.Event()
        self._closed = False
        self._supervisor: asyncio.Task[None] | None = None
        #: pings under way; cancelling one on a live client would break nats-py's reader
        self._pings: set[asyncio.Task[None]] = set()
        self._on_connection: list[OnConnection] = []
        self._on_refusal: list[Callable[[str], None]] = []
        self._on_drop: list[Callable[[Subscription], None]] = []
        self._problems = Problems(conditions, BROKER_AWAY)
        self._denials = Problems(conditions, PERMISSION_DENIED)
        #: in lower case: what we try and may be denied, which is no trouble
        self._tolerated: set[str] = set()
        #: set when the broker has refused the user: what proves it is read anew
        self._refused = asyncio.Event()
        self._silences = Silences()
        self._patience = Patience()
        #: how often a broker was reached
        self.num_connects = 0
        #: how often one was left because its JetStream answered nothing
        self.num_given_up = 0
        #: what time it is where the streams' leaders are
        self.clock = BrokerClock()
        #: bytes that a message may have, as the last broker said
        self.max_payload = 1 << 20

    @property
    def client(self) -> Client | None:
        """The present client, None while the broker is away."""
        return self._client

    @property
    def at(self) -> str | None:
        """The address of the node that it is connected to, if any."""
        return None if self._client is None else _url_of(self._client)

    async def open(self, wait_seconds: float | None) -> None:
        """Connect, trying until a broker is there or `wait_seconds` are over."""
        first: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._supervisor = asyncio.create_task(self._supervise(first))
        try:
            async with asyncio.timeout(wait_seconds):
                await first
        except TimeoutError as error:
            await self.close()
            why = f": {self._problems}" if str(self._problems) else ""
            text = f"no broker at {self.where} within {wait_seconds} s{why}"
            raise BusUnavailable(text) from error
        except (asyncio.CancelledError, KvatlasError):
            await self.close()
            raise

    async def close(self) -> None:
        """End the connection and forget who listens. Closing twice is no error."""
        self._closed = True
        self._up.set()
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.wait((self._supervisor,))
        self._on_connection.clear()
        self._on_refusal.clear()
        self._on_drop.clear()

    def on_connection(self, callback: OnConnection) -> Callable[[], None]:
        """Call back with True after each connect and False at each loss; return how to stop."""
        return _listen(self._on_connection, callback)

    def on_refusal(self, callback: Callable[[str], None]) -> Callable[[], None]:
        """Call back with the broker's text, in lower case, when it denies a permission."""
        return _listen(self._on_refusal, callback)

    def tolerate(self, subject: str) -> None:
        """Take it for no trouble when the broker lets us not publish to a subject."""
        self._tolerated.add(f'"{subject.lower()}"')

    def on_drop(self, callback: Callable[[Subscription], None]) -> Callable[[], None]:
        """Call back when nats-py has dropped a message of a subscription that is full."""
        return _listen(self._on_drop, callback)

    async def present(self) -> tuple[Client, asyncio.Future[None]]:
        """Return the client and the future of its loss, once there is one."""
        while not self._closed:
            if self._client is not None and self._gone is not None:
                return self._client, self._gone
            await self._up.wait()
        raise BusUnavailable("the bus is closed")

    async def next_client(self, after: Client | None) -> Client:
        """Return the present client once it is another one than `after`."""
        while True:
            client, gone = await self.present()
            if client is not after:
                return client
            await asyncio.wait((gone,))

    async def lost(self, client: Client) -> None:
        """Return when the client is not, or no longer, the present one."""
        if client is self._client and self._gone is not None:
            await asyncio.wait((self._gone,))

    async def call(
        self,
        what: str,
        exchange: Callable[[Client], Awaitable[T]],
        timeout_seconds: float = EXCHANGE_SECONDS,
        *,
        is_to_peer: bool = False,
    ) -> T:
        """Run one exchange with the broker and translate what goes wrong.

        Waits for a connection first. Raises BusUnavailable when there is none in time or when
        it is lost meanwhile, RequestTimedOut when the broker is there and does not answer.
        What `is_to_peer` is not answered by JetStream, and says nothing about the broker.
        """
        asked_at = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(timeout_seconds):
                client, gone = await self.present()
                found = await _unless(gone, exchange(client), what)
                self.answered(what)
                return found
        except DRIVER_ERRORS as error:
            if not is_to_peer:
                self._note(error, asked_at, what)
            if isinstance(error, TimeoutError):
                if self._client is None:
                    away = f"{what}: no connection to the broker in {timeout_seconds} s"
                    raise BusUnavailable(away) from error
                late = f"{what}: no answer within {timeout_seconds} s"
                raise RequestTimedOut(late) from error
            raise translate(error, what) from error

    def _note(self, error: Exception, asked_at: float, what: str) -> None:
        if isinstance(error, TimeoutError) or is_without_leader(error):
            self.unanswered(what, asked_at)
        elif isinstance(error, APIError):
            self.answered(what)

    def answered(self, what: str) -> None:
        """Note that JetStream has answered, or that nobody waits for it."""
        self._silences.answered(what)

    def unanswered(self, what: str, asked_at: float) -> None:
        """Leave the present node if it has not answered for too long and there is another one."""
        client, gone = self._client, self._gone
        if client is None or gone is None or gone.done() or (url := _url_of(client)) is None:
            return
        now = asyncio.get_running_loop().time()
        silent_seconds = self._silences.unanswered(what, asked_at, now)
        self._learn(client)
        if self._servers.has_another(url) and self._patience.is_over(silent_seconds, now):
            text = "%s answers nothing, %s for %.1f s: trying another node"
            _logger.warning(text, without_user(url), what, silent_seconds)
            self._servers.give_up(url, _node_of(client))
            self.num_given_up += 1
            gone.set_result(None)

    def _learn(self, client: Client) -> None:
        # what the cluster announced helps when the one that we know is the one that is lost
        known = self._servers.urls[0]
        self._servers.add(_as_same_user(url, known) for url in client.discovered_servers)

    async def settle(self, client: Client) -> None:
        """Return when the broker has handled all that was sent, or the client is lost."""
        if client is not self._client or self._gone is None:
            return
        ping = asyncio.create_task(client.flush(timeout=86_400))
        self._pings.add(ping)
        ping.add_done_callback(self._pings.discard)
        await asyncio.wait((ping, self._gone), return_when=asyncio.FIRST_COMPLETED)

    @property
    def where(self) -> str:
        """The addresses that are tried, without credentials."""
        return ", ".join(map(without_user, self._servers.urls))

    async def _supervise(self, first: asyncio.Future[None]) -> None:
        while True:
            life = asyncio.create_task(self._live(first))
            try:
                await asyncio.wait((life,))
            finally:
                life.cancel()
                await asyncio.wait((life,))
            if not life.cancelled() and (error := life.exception()) is not None:
                # Only what is set wrongly gets here: an address or a file of keys.
                if not isinstance(error, InvalidSetting):
                    error = InvalidSetting(
                        "servers", self.where, f"cannot connect: {_wrong_setting(error)}"
                    )
                if first.done():
                    self._problems.add(str(error))
                else:
                    first.set_exception(error)
            pause = self._reconnect_seconds
            if self._refused.is_set():
                pause = REFUSED_SECONDS
            await asyncio.sleep(pause * random.uniform(0.5, 1.5))

    async def _live(self, first: asyncio.Future[None]) -> None:
        client = _Client()
        try:
            is_connected = await self._connect(client, first)
            if is_connected and self._servers.is_taken(_url_of(client) or "", _node_of(client)):
                await self._until_lost(client, first)
        finally:
            self._down(client)
            if not (self._closed and client.is_connected):
                _abort(client)
            await _close(client)
            await self._end_pings()

    async def _connect(self, client: Client, first: asyncio.Future[None]) -> bool:
        """Return whether there is a connection; without one the user was refused."""
        self._refused.clear()
        login = {} if self._login_file is None else login_of(self._login_file)

        async def on_error(error: Exception) -> None:
            self._on_error(error, first)

        async def on_loss() -> None:
            _forget_unsent(client)
            self._down(client)

        connecting = client.connect(
            servers=self._servers.in_order(),
            dont_randomize=True,
            name=self._name,
            error_cb=on_error,
            disconnected_cb=on_loss,
            reconnect_to_server_handler=_stay_down,
            max_reconnect_attempts=-1,
            reconnect_time_wait=self._reconnect_seconds,  # type: ignore[arg-type]
            ping_interval=PING_SECONDS,
            pending_size=UNSENT_BYTES,
            flush_timeout=EXCHANGE_SECONDS,
            tls=self._tls,
            **login,
        )
        return await _cancellable(connecting, self._refused)

    async def _until_lost(self, client: Client, first: asyncio.Future[None]) -> None:
        gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._client, self._gone = client, gone
        self._problems.end()
        self._denials.end()
        self.num_connects += 1
        self.max_payload = client.max_payload
        self._silences.forget()
        self._learn(client)
        self._up.set()
        if not first.done():
            first.set_result(None)
        if (url := _url_of(client)) is not None:
            again = " again" if self.num_connects > 1 else ""
            _logger.info("connected%s to the broker at %s", again, without_user(url))
        for callback in tuple(self._on_connection):
            callback(True)
        while client.is_connected and not gone.done():
            await asyncio.wait((gone,), timeout=CHECK_SECONDS)

    def _down(self, client: Client) -> None:
        if client is not self._client or self._gone is None:
            return
        self._client = None
        self._up.clear()
        if self._closed:
            self._up.set()
        else:
            why = f": {client.last_error}" if client.last_error is not None else ""
            _logger.warning("the connection to the broker is lost%s", why)
        if not self._gone.done():
            self._gone.set_result(None)
        for callback in tuple(self._on_connection):
            callback(False)

    async def _end_pings(self) -> None:
        for ping in (pings := tuple(self._pings)):
            ping.cancel()
        await asyncio.gather(*pings, return_exceptions=True)

    def _on_error(self, error: Exception, first: asyncio.Future[None]) -> None:
        text = str(error).lower()
        if isinstance(error, nats.errors.SlowConsumerError):
            for on_drop in tuple(self._on_drop):
                on_drop(error.sub)
        elif "permissions violation" in text:
            denied = _random_names.sub("*", text.removeprefix("nats: "))
            if text.rpartition(" ")[2] in self._tolerated:
                _logger.info("the broker denies a permission that we can do without: %s", denied)
            else:
                self._denials.add(f"the broker denies a permission: {denied}")
            for callback in tuple(self._on_refusal):
                callback(text)
        elif isinstance(error, DRIVER_ERRORS):
            problem = str(error) or type(error).__name__
            hint = "" if first.done() else ": look at --nats or nats.url; retrying"
            if _refusal.search(text):
                file = "" if self._login_file is None else f" of {self._login_file}"
                self._refused.set()
                if not first.done():  # the caller of `open` says it
                    refused = f"it refuses them{file}: {problem}"
                    first.set_exception(InvalidSetting("credentials", "the broker", refused))
                    return
                hint = f": look at nats.credentials{file}"
            elif isinstance(error, socket.gaierror):
                problem = f"this name cannot be resolved ({problem})"
            self._problems.add(f"broker {self.where}: {problem}{hint}")
        else:
            _logger.error("a callback of the bus failed", exc_info=error)


async def _cancellable(connecting: Coroutine[Any, Any, None], given_up: asyncio.Event) -> bool:
    """Run nats-py's `connect`, which overhears a cancellation just as an attempt fails.

    Return whether it has connected before it was given up.
    """
    task, giving_up = asyncio.create_task(connecting), asyncio.create_task(given_up.wait())
    try:
        await asyncio.wait((task, giving_up), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            return False
        task.result()
        return True
    finally:
        giving_up.cancel()
        while not task.done():
            task.cancel()
            await asyncio.wait((task,), timeout=CANCEL_SECONDS)
        _ = task.cancelled() or task.exception()  # seen, should nobody raise it


async def _unless(gone: asyncio.Future[None], exchange: Awaitable[T], what: str) -> T:
    """Return what the exchange returns; raise BusUnavailable when the connection goes first."""
    task = asyncio.ensure_future(exchange)
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise BusUnavailable(f"{what}: the connection was lost")
        return task.result()
    finally:
        task.cancel()
        await asyncio.wait((task,))
        _ = task.cancelled() or task.exception()  # seen, should nobody raise it


def _stay_down(_servers: list[Server], _info: dict[str, Any]) -> tuple[None, float]:
    return None, 86_400.0  # how long nats-py waits before it reconnects: we close it first


def _listen(listeners: list[T], callback: T) -> Callable[[], None]:
    listeners.append(callback)

    def stop() -> None:
        if callback in listeners:
            listeners.remove(callback)

    return stop


def _forget_unsent(client: Client) -> None:
    # What nats-py has buffered must not reach the broker later: publishers send it again.
    client._pending.clear()
    client._pending_data_size = 0


def _abort(client: Client) -> None:
    # Closing a socket first waits for its peer to take what is unsent, and this peer is lost.
    _forget_unsent(client)
    writer = getattr(client._transport, "_io_writer", None)
    if writer is not None:
        writer.transport.abort()


async def _close(client: Client) -> None:
    # In a task: of a broken connection nats-py raises this and that, even a cancellation.
    closing = asyncio.create_task(client.close())
    await asyncio.wait((closing,), timeout=CLOSE_SECONDS)
    closing.cancel()
    await asyncio.wait((closing,))
    _ = closing.cancelled() or closing.exception()


def _url_of(client: Client) -> str | None:
    url = client.connected_url
    return None if url is None else url.geturl()


def _node_of(client: Client) -> str:
    return str(client._server_info.get("server_id", ""))


def without_user(url: str) -> str:
    """Return an address without the credentials in it."""
    scheme, slashes, rest = url.rpartition("://")
    return f"{scheme}{slashes}{rest.rpartition('@')[2]}"


def _as_same_user(found: ParseResult, known: str) -> str:
    user, at, _ = urlsplit(known).netloc.rpartition("@")
    return found._replace(netloc=f"{user}{at}{found.netloc}").geturl()


def _check_addresses(servers: Sequence[str]) -> None:
    for server in servers:
        if not is_address(server):
            forms = "nats://HOST:4222, tls://, ws://, wss:// or HOST:4222"
            problem = f"{without_user(server)!r} is no address of a broker: expected {forms}"
            raise InvalidSetting("nats.url", "", problem)


def _wrong_setting(error: BaseException) -> str:
    """Return an error in words; what cannot be read as an address may be a part of a password."""
    text = str(error)
    if not isinstance(error, ValueError) or text == "Port out of range 0-65535":
        return text
    write = "/ as %2F, @ as %40, : as %3A, ? as %3F, # as %23"
    return f"expected HOST:PORT behind user and password; write in these {write}"


class _Client(Client):
    """Survives names that are not UTF-8, which brokers carry and nats-py cannot decode."""

    def _build_message(
        self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: dict[str, str] | None
    ) -> Any:
        try:
            return super()._build_message(sid, subject, reply, data, headers)
        except UnicodeDecodeError:
            return super()._build_message(sid, _utf8(subject), _utf8(reply), data, headers)


def _utf8(name: bytes) -> bytes:
    return name.decode(errors="backslashreplace").encode()
