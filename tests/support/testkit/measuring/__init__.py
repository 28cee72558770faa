"""What benchmarks share: repetitions in turn, rows, the peer's process, machine, versions."""

from testkit.measuring.bench import Bench, Stopped
from testkit.measuring.peer import Peer, pin_to_one_cpu

__all__ = ["Bench", "Peer", "Stopped", "pin_to_one_cpu"]
