"""What kvatlas has to reach: the measurable part of the design's table, by bench and key."""

from typing import NamedTuple


class Target(NamedTuple):
    """A bound, and which side of it is good."""

    value: float
    at_least: bool = True

    def is_met(self, found: float) -> bool:
        """Say whether a figure reaches it."""
        return found >= self.value if self.at_least else found <= self.value

    def __str__(self) -> str:
        return f"{'at least' if self.at_least else 'at most'} {self.value:g}"


#: bench -> key of a ratio (above 1: kvatlas is ahead) or of an absolute
TARGETS: dict[str, dict[str, Target]] = {
    "index": {
        "apply_stored_unique_64": Target(4),
        "apply_stored_shared_64": Target(4),
        "apply_removed_64": Target(3),
        "match_8192": Target(3),
        "bytes_per_pair_alone_before_growth": Target(30, at_least=False),
        "bytes_per_pair_alone_mean": Target(45, at_least=False),
        "bytes_per_pair_shared16_mean": Target(3, at_least=False),
    },
    "ingest": {
        "rate_64": Target(2),
        "delay_p99_ms_1000": Target(10, at_least=False),
        "delay_p99_ms_10000": Target(25, at_least=False),
    },
    "http": {
        "json_8192": Target(0.833),
        "packed_8192": Target(1.333),
        "by_hash_512": Target(0.769),
        "p99_loaded_over_idle": Target(2, at_least=False),
    },
    "decisions": {
        "score_json_us_256": Target(200, at_least=False),
        "score_json_us_1000": Target(350, at_least=False),
        "score_after_change_json_us_1000": Target(1_000, at_least=False),
    },
    "cold_start": {
        "seconds_2m": Target(2, at_least=False),
        "seconds_10m": Target(8, at_least=False),
    },
    "repair_storm": {
        "p99_storm_over_events_json": Target(2, at_least=False),
        "p99_storm_over_events_packed": Target(2, at_least=False),
        "longest_turn_ms_storm": Target(10, at_least=False),
    },
    "scale": {
        "exponent_match_workers": Target(0.3, at_least=False),
        "exponent_apply_workers": Target(0.3, at_least=False),
    },
    "coordination": {"share_of_ttft_8k": Target(0.01, at_least=False)},
}
