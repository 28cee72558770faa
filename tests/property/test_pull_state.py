"""Whatever happens in whatever order: every pull ends once, every batch is closed once, and only
blocks that were verified are held."""

from hypothesis import given
from hypothesis import strategies as st

from kvatlas.worker_hooks.transfer.pull_protocol import (
    BatchId,
    BlocksArrived,
    BlocksChecked,
    CheckAndFill,
    CloseBatch,
    Effect,
    EndPull,
    LeaseDenied,
    LeaseGiven,
    Owner,
    Priority,
    PullAsked,
    PullCancelled,
    PullSettings,
    ReadBlocks,
    ReadFailed,
    RequestLease,
    Stimulus,
    TimePassed,
)
from kvatlas.worker_hooks.transfer.pull_state import PullState
from testkit.blocks import a_chain

MS = 1_000_000
DENIALS = ["not_held", "busy", "incompatible", "timed_out", "no_responder", "strange"]
READ_FAILURES = ["timed_out", "disconnected", "refused", "failed", "no_room"]
SETTINGS = PullSettings(
    batch_blocks=3, max_reads=2, max_batches=4, max_batches_per_owner=2, max_retries=1, rest_ms=20
)


class World:
    """Owners, bus and transports that do what hypothesis says."""

    def __init__(self, data: st.DataObject) -> None:
        self.data, self.now_ns = data, 0
        self.state = PullState(SETTINGS)
        self.pending: list[RequestLease | ReadBlocks] = []
        self.pull_of: dict[BatchId, int] = {}
        self.open_batches: set[BatchId] = set()
        #: slots that were filled with verified bytes
        self.verified: set[int] = set()
        self.asked: dict[int, int] = {}
        self.ended: dict[int, EndPull] = {}

    def tell(self, stimulus: Stimulus) -> None:
        stimuli = [stimulus]
        while stimuli:
            effects = self.state.handle(stimuli.pop(), self.now_ns)
            self.state.validate()
            for effect in effects:
                stimuli += self.carry_out(effect)

    def carry_out(self, effect: Effect) -> list[Stimulus]:
        match effect:
            case RequestLease(batch):
                self.open_batches.add(batch)
                self.pending.append(effect)
            case ReadBlocks(batch, deadline_ns):
                assert batch in self.open_batches
                assert deadline_ns >= self.now_ns
                self.pending.append(effect)
            case CheckAndFill(batch, _, slots):
                verdicts = self.data.draw(
                    st.lists(st.integers(0, 5), min_size=len(slots), max_size=len(slots))
                )
                corrupt = [i for i, verdict in enumerate(verdicts) if verdict == 0]
                revoked = [i for i, verdict in enumerate(verdicts) if verdict == 1]
                self.verified |= {s for i, s in enumerate(slots) if verdicts[i] > 1}
                return [BlocksChecked(batch, corrupt, revoked)]
            case CloseBatch(batch):
                self.open_batches.remove(batch)
            case EndPull(pull):
                assert pull not in self.ended
                self.ended[pull] = effect
        return []

    def ask(self) -> None:
        pull = len(self.asked) + 1
        num = self.data.draw(st.integers(0, 7))
        limits = self.data.draw(st.lists(st.integers(0, 7), max_size=3))
        owners = [Owner(f"w{i}", "s", num_blocks=limit) for i, limit in enumerate(limits)]
        slots = range(100 * pull, 100 * pull + num)
        deadline_ns = self.now_ns + self.data.draw(st.integers(0, 200)) * MS
        priority = self.data.draw(st.sampled_from(Priority))
        self.asked[pull] = num
        self.tell(PullAsked(pull, a_chain(*range(num)), slots, owners, deadline_ns, priority))

    def answer(self) -> None:
        at = self.data.draw(st.integers(0, len(self.pending) - 1))
        match self.pending.pop(at):
            case RequestLease(batch, _, _, hashes):
                granted = self.data.draw(st.integers(0, len(hashes) // 16))
                reason = self.data.draw(st.sampled_from(DENIALS))
                expires_ns = self.now_ns + self.data.draw(st.integers(0, 50)) * MS
                if granted:
                    self.tell(LeaseGiven(batch, granted, expires_ns, reason))
                else:
                    self.tell(LeaseDenied(batch, reason))
            case ReadBlocks(batch):
                if self.data.draw(st.booleans()):
                    self.tell(BlocksArrived(batch))
                else:
                    self.tell(ReadFailed(batch, self.data.draw(st.sampled_from(READ_FAILURES))))

    def step(self) -> None:
        what = self.data.draw(st.sampled_from(["ask", "answer", "answer", "pass", "cancel"]))
        if what == "ask" and len(self.asked) < 4:
            self.ask()
        elif what == "answer" and self.pending:
            self.answer()
        elif what == "cancel" and self.asked:
            self.tell(PullCancelled(self.data.draw(st.sampled_from(sorted(self.asked)))))
        else:
            self.now_ns += self.data.draw(st.integers(0, 30)) * MS
            self.tell(TimePassed())


@given(st.data())
def test_every_pull_ends_and_only_verified_blocks_are_held(data: st.DataObject) -> None:
    world = World(data)
    for _ in range(data.draw(st.integers(1, 40))):
        world.step()
    world.now_ns += 10_000 * MS
    world.tell(TimePassed())
    assert set(world.ended) == set(world.asked)
    while world.pending:
        world.answer()
    assert world.open_batches == set()
    for pull, ended in world.ended.items():
        missing = [index for index, _ in ended.missing]
        assert sorted([*ended.held, *missing]) == list(range(world.asked[pull]))
        assert all(100 * pull + index in world.verified for index in ended.held)
