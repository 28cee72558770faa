"""Whether what a stream has told is believed, and why not."""

from kvatlas.worker_hooks.bridge.observed import Observed
from kvatlas.worker_hooks.bridge.stimuli import Degrade, Recover
from kvatlas.worker_hooks.bridge.turnover import Turnover


class SourceTrust:
    """One doubt at a time, the latest. Each step returns what it makes the bridge say."""

    def __init__(self, num_blocks: int | None) -> None:
        self._turnover = Turnover(num_blocks)
        #: the reason, "" while all is believed
        self.doubted = ""
        #: whether the doubt is for being away alone
        self.is_for_absence = False

    def learn_num_blocks(self, num_blocks: int) -> None:
        """Know how many blocks the engine has."""
        self._turnover.num_blocks = num_blocks

    def degrade(self, reason: str, *, is_for_absence: bool = False) -> list[Degrade | Recover]:
        """Doubt all that was told so far."""
        self.is_for_absence = is_for_absence
        self.doubted = reason
        self._turnover.begin()
        return [Degrade(reason)]

    def trust(self, *, forgets: bool) -> list[Degrade | Recover]:
        """Believe what is told now; `forgets` what was told before the doubt and not since."""
        self._turnover.end()
        if not self.doubted:
            return []
        self.doubted, self.is_for_absence = "", False
        return [Recover(forgets)]

    def observe(self, observed: Observed) -> list[Degrade | Recover]:
        """Count a batch, which may heal a doubt or be a reason for one."""
        self._turnover.observe(observed)
        if observed.is_cleared or self._turnover.is_complete:
            return self.trust(forgets=True)
        if self._turnover.num_too_many:
            return self.degrade(f"{self._turnover.num_too_many} blocks more than the engine has")
        return []

    def begin_anew(self) -> None:
        """Nothing is held, and nothing is doubted."""
        self._turnover.empty()
        self.doubted, self.is_for_absence = "", False
