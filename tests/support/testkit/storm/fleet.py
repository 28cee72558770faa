"""A storm from its first process to its verdict."""

import asyncio
import json
import signal
import sqlite3
import sys
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import msgspec
from msgspec import Struct

from kvatlas.events.bus import Message
from kvatlas.events.nats.bus import NatsBus
from kvatlas.events.streams import KV_EVENTS
from kvatlas.schemas.errors import BusUnavailable, StreamRefused
from testkit.ports import kept_port
from testkit.storm import worker_main
from testkit.storm.chains import Chains
from testkit.storm.faults import Fault, schedule
from testkit.storm.processes import BrokerChild, Child, Target, kept_up, role_command
from testkit.storm.truth import Truth
from testkit.storm.verifying import Ended, Recovery, Verdict, judge
from testkit.storm.watching import Asker, Look, Watcher, fetched

START_SECONDS = 120.0
#: how long a recovery is waited for at most before the next fault, and watched at most
WAITED_SECONDS, RECOVERY_SECONDS = 20.0, 90.0
SETTLE_SECONDS = 90.0
#: workers renew within a third of it; `OUTLIVES_LEASE_SECONDS` is more
LEASE_TTL_SECONDS = 6.0
DIGEST_SECONDS = 1.0
#: so often that restarts come upon all kinds of snapshots
SNAPSHOTS = ("--set", "indexer.snapshot_seconds=4", "--set", "indexer.snapshot_messages=100")
INDEXERS: tuple[str, ...] = ("indexer-a", "indexer-b")


class StormOptions(Struct, frozen=True):
    """How hard it blows."""

    seconds: float = 60.0
    seed: int = 1
    num_workers: int = 8
    ops_per_second: float = 15.0
    requests_per_second: float = 12.0
    #: in which a request that met a dead router has its answer
    patience_seconds: float = 20.0


class NotSettled(Exception):
    """Something did not come to rest in time; the text says what."""


async def run_storm(options: StormOptions, folder: Path, say: "Say") -> Verdict:
    """Run a whole storm in a folder and judge it. Raises NotSettled when it never even began."""
    async with _fleet(options, folder, say) as storm:
        await storm.start()
        await storm.blow()
        ended = await storm.settle()
    say("judging")
    return judge(ended, storm.watcher.looks, storm.asker, storm.recoveries, Chains(options.seed))


class Say:
    """Tells people on stderr what happens, with the time since the beginning."""

    def __init__(self, is_silent: bool = False) -> None:
        self._is_silent, self._began = is_silent, time.monotonic()

    def __call__(self, text: str) -> None:
        if not self._is_silent:
            print(f"{time.monotonic() - self._began:7.1f}  {text}", file=sys.stderr, flush=True)


class Storm:
    """All processes, the load and the watch."""

    def __init__(
        self,
        options: StormOptions,
        folder: Path,
        say: Say,
        session: aiohttp.ClientSession,
        targets: dict[str, Target],
        urls: dict[str, str],
    ) -> None:
        self.options, self._folder, self._say, self._session = options, folder, say, session
        self._targets, self._urls = targets, urls
        self.workers = [name for name in targets if name.startswith("w")]
        self.watcher = Watcher(urls)
        router_url = urls["router"]
        self.asker = Asker(
            Chains(options.seed),
            router_url,
            options.seed,
            options.requests_per_second,
            options.patience_seconds,
        )
        self.recoveries: list[Recovery] = []
        #: all were exact everywhere after the last fault
        self.is_settled = False
        self._archive_file = folder / "archive.db"

    async def start(self) -> None:
        """Return when every reader vouches for every worker."""
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(each.keep_up()) for each in self._targets.values()]
            running.append(tasks.create_task(self.watcher.run(self._session)))
            if not await self._until(lambda: self._all_exact(0.0), START_SECONDS):
                raise NotSettled(f"not all exact after {START_SECONDS:g} s: {self._doubts(0.0)}")
            for task in running:
                task.cancel()
        self._say(f"{len(self.workers)} workers are exact everywhere")

    async def blow(self) -> None:
        """Ask, watch and break things for as long as the options say."""
        resting = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            supervised = [tasks.create_task(each.keep_up()) for each in self._targets.values()]
            supervised.append(tasks.create_task(self.watcher.run(self._session)))
            asking = tasks.create_task(self.asker.run(self._session, resting))
            await self._break_things(time.monotonic() + self.options.seconds)
            calm_at = time.monotonic()
            self.is_settled = await self._until(lambda: self._all_exact(calm_at), SETTLE_SECONDS)
            if not self.is_settled:
                self._say(f"not all exact {SETTLE_SECONDS:g} s after: {self._doubts(calm_at)}")
            resting.set()
            await asking
            for task in supervised:
                task.cancel()

    async def _break_things(self, until: float) -> None:
        faults = schedule(self.options.seed, self.workers, list(INDEXERS))
        async with asyncio.TaskGroup() as recovering:
            while time.monotonic() < until:
                fault = next(faults)
                recovery = await self._inflict(fault)
                waiting = recovering.create_task(self._recover(recovery))
                if not fault.overlaps:
                    await asyncio.wait((waiting,), timeout=WAITED_SECONDS)
                await asyncio.sleep(min(fault.pause_seconds, max(until - time.monotonic(), 0)))

    async def _inflict(self, fault: Fault) -> Recovery:
        """Let a fault begin and end; return what has to be reached again from here on."""
        self._say(f"{fault.kind} {fault.target} for {fault.seconds:.1f} s")
        target = self._targets[fault.target]
        if fault.target == "router":
            self.asker.router.begin()
        if fault.kind.startswith("kill"):
            await target.kill()
            await asyncio.sleep(fault.seconds)
            await target.start()
        else:
            target.send(signal.SIGSTOP)
            await asyncio.sleep(fault.seconds)
            target.send(signal.SIGCONT)
        if fault.target == "router":
            self.asker.router.repaired()
        return Recovery(fault.kind, fault.target, time.monotonic())

    async def _recover(self, recovery: Recovery) -> None:
        """Wait until everybody is exact again everywhere, as seen after the fault's end."""
        since, before = recovery.repaired_at, dict(self._positions())
        archived = await self._last_sequence() if recovery.target == "archive" else 0

        def is_over() -> bool:
            readers = [*INDEXERS, "router"] if recovery.target == "router" else list(INDEXERS)
            return self._all_exact(since, before, readers) and self._archived() >= archived

        self.recoveries.append(recovery)
        if await self._until(is_over, RECOVERY_SECONDS):
            recovery.seconds = time.monotonic() - since
            self._say(f"  over {recovery.seconds:.2f} s after {recovery.kind} {recovery.target}")
        else:
            self._say(f"  not over after {RECOVERY_SECONDS:g} s: {self._doubts(since)}")

    async def settle(self) -> Ended:
        """Let all come to rest, one after the other, and gather what they know."""
        async with NatsBus(self._broker.server.url, wait_seconds=30.0) as bus:
            for name in self.workers:
                self._targets[name].send(signal.SIGUSR1)
            alive = await self._agreed("with all workers alive")
            await asyncio.gather(*(self._targets[name].stop() for name in self.workers))
            await self._caught_up(await bus.last_sequence(KV_EVENTS))
            gone = await self._agreed("with all workers gone")
            last = await bus.last_sequence(KV_EVENTS)
            status = await self._targets["archive"].stop()
            first = await bus.first_sequence(KV_EVENTS)
            log = [message async for message in bus.read_range(KV_EVENTS, first, last)]
        return self._ended(alive, gone, log, status)

    def _ended(
        self,
        alive: dict[str, tuple[int, str]],
        gone: dict[str, tuple[int, str]],
        log: list[Message],
        archive_status: int | None,
    ) -> Ended:
        truths = [Truth(path) for path in sorted(self._folder.glob("*.truth"))]
        exits = {
            name: target.num_own_exits
            for name, target in self._targets.items()
            if target.num_own_exits
        }
        url = f"sqlite:///{self._archive_file}"
        return Ended(log, truths, url, [alive, gone], archive_status, exits, self.is_settled)

    async def _agreed(self, when: str) -> dict[str, tuple[int, str]]:
        """Return (sequence, digest) of both indexers at one sequence, or the last looks at them."""
        found: dict[str, tuple[int, str]] = {}
        for _ in range(100):
            asked = (
                fetched(self._session, f"{self._urls[name]}/v1/index/stats") for name in INDEXERS
            )
            answers = await asyncio.gather(*asked)
            for name, answer in zip(INDEXERS, answers, strict=True):
                if answer is not None:
                    stats = msgspec.json.decode(answer)
                    found[name] = stats["stream_sequence"], stats["state_digest"]
            if len(found) == len(INDEXERS) and len({at for at, _ in found.values()}) == 1:
                self._say(f"{when}: {found}")
                return found
            await asyncio.sleep(0.05)
        self._say(f"{when} never at one sequence: {found}")
        return found

    async def _caught_up(self, last: int) -> None:
        """Return when the indexers and the archive have all that is in the log."""

        async def is_there() -> bool:
            for name in INDEXERS:
                answer = await fetched(self._session, f"{self._urls[name]}/v1/index/stats")
                if answer is None or msgspec.json.decode(answer)["stream_sequence"] < last:
                    return False
            return self._archived() >= last

        deadline = time.monotonic() + SETTLE_SECONDS
        while not await is_there():
            if time.monotonic() > deadline:
                self._say(f"not all readers are at {last} after {SETTLE_SECONDS:g} s")
                return
            await asyncio.sleep(0.1)

    # --- what is known at the moment -------------------------------------------------------------

    @property
    def _broker(self) -> BrokerChild:
        broker = self._targets["broker"]
        assert isinstance(broker, BrokerChild)
        return broker

    async def _until(self, condition: Callable[[], bool], seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(0.05)
        return True

    def _all_exact(
        self,
        since: float,
        before: dict[str, tuple[int, int]] | None = None,
        readers: list[str] | None = None,
    ) -> bool:
        """Say whether the readers vouch for all workers, each of which has spoken since."""
        return not self._doubts(since, before, readers)

    def _doubts(
        self,
        since: float,
        before: dict[str, tuple[int, int]] | None = None,
        readers: list[str] | None = None,
    ) -> list[str]:
        doubts = []
        for reader in readers or list(self._urls):
            look = self.watcher.newest.get(reader)
            if look is None or look.asked_at < since:
                doubts.append(f"{reader} does not answer")
                continue
            doubts += _doubts_of(look, self.workers, before or {})
        return doubts

    def _positions(self) -> dict[str, tuple[int, int]]:
        """Return the newest (epoch, seq) of each worker that any reader has shown."""
        found: dict[str, tuple[int, int]] = {}
        for look in self.watcher.newest.values():
            for each in look.workers:
                found[each.worker] = max(found.get(each.worker, (0, 0)), (each.epoch, each.seq))
        return found

    async def _last_sequence(self) -> int:
        try:
            async with NatsBus(self._broker.server.url, wait_seconds=2.0) as bus:
                return await bus.last_sequence(KV_EVENTS)
        except (BusUnavailable, StreamRefused):
            return 0

    def _archived(self) -> int:
        try:
            uri = f"file:{self._archive_file}?mode=ro"
            with sqlite3.connect(uri, uri=True, timeout=1.0) as archive:
                query = "select sequence from cursors where stream = ?"
                row = archive.execute(query, (KV_EVENTS,)).fetchone()
            archive.close()
            return int(row[0]) if row else 0
        except sqlite3.Error:
            return 0


def _doubts_of(look: Look, workers: list[str], before: dict[str, tuple[int, int]]) -> list[str]:
    seen = {each.worker: each for each in look.workers}
    doubts = []
    for name in workers:
        each = seen.get(name)
        if each is None or not each.is_exact:
            doubts.append(f"{look.reader}: {name} is {each.trust if each else 'unknown'}")
        elif (each.epoch, each.seq) <= before.get(name, (0, 0)):
            doubts.append(f"{look.reader}: {name} has not spoken since")
    return doubts


@asynccontextmanager
async def _fleet(options: StormOptions, folder: Path, say: Say) -> AsyncGenerator[Storm, None]:
    """Start everything; stop everything."""
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        broker = BrokerChild(folder / "nats")
        targets: dict[str, Target] = {"broker": await enter(kept_up(broker))}
        nats_url, urls = broker.server.url, {}
        for name in (*INDEXERS, "router"):
            port = kept_port()
            urls[name] = f"http://127.0.0.1:{port}"
            role = name.partition("-")[0]
            more = "--port", str(port), *SNAPSHOTS
            targets[name] = await enter(kept_up(_role(name, role, nats_url, folder, *more)))
        archive_url = f"sqlite:///{folder / 'archive.db'}"
        archive = _role("archive", "archive", nats_url, folder, "--archive", archive_url)
        targets["archive"] = await enter(kept_up(archive))
        for number in range(options.num_workers):
            worker = _worker(options, folder, nats_url, f"w{number}")
            targets[worker.name] = await enter(kept_up(worker))
        # a connection that is kept may be to a process that has been killed since
        connector = aiohttp.TCPConnector(force_close=True)
        async with aiohttp.ClientSession(connector=connector) as session:
            yield Storm(options, folder, say, session, targets, urls)


def _role(name: str, role: str, nats_url: str, folder: Path, *more: str) -> Child:
    command = role_command(role, nats_url, *more)
    return Child(name, lambda _: command, folder / f"{name}.log")


def _worker(options: StormOptions, folder: Path, nats_url: str, name: str) -> Child:
    def command(start: int) -> list[str]:
        given = worker_main.WorkerOptions(
            nats_url=nats_url,
            name=name,
            start=start,
            seed=options.seed,
            folder=str(folder),
            ops_per_second=options.ops_per_second,
            lease_ttl_seconds=LEASE_TTL_SECONDS,
            digest_seconds=DIGEST_SECONDS,
        )
        as_json = json.dumps(msgspec.to_builtins(given))
        return [sys.executable, "-P", str(Path(worker_main.__file__)), as_json]

    return Child(name, command, folder / f"{name}.log")
