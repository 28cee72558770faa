"""Learnt rates: milliseconds per token, from reports of which some may be wrong or false. Pure.

    report --is_plausible--> sample --> the newest samples of a worker --weighted median--> estimate
                                        with its model's rate as two more samples, and clamped to it

Reports come from clients that nothing vouches for, and a client may misread what is asked. So a
report has to fit in the time that has passed, no single report moves an estimate, and an estimate
stays near that of its model's other workers. A worker whose estimate keeps requests away reports
nothing: its samples are dropped one by one, until it is priced as its peers are and tried again.

The median and its tolerance of up to half of all samples: Huber, Robust Statistics (1981), 3.2.
"""

from collections import deque

#: samples of one worker, and of all workers of a model together
WORKER_SAMPLES, MODEL_SAMPLES = 15, 63
#: samples that the rate from above counts for: a worker's model, a model's setting
REFERENCE_SAMPLES = 2
#: a longer report weighs no more than this, or one could outweigh all others
MAX_SAMPLE_TOKENS = 1_000
#: a model's rate stays within this factor of the configured one
MAX_MODEL_RATIO = 30.0
#: share and milliseconds by which a reported time may exceed the time that has passed
TIME_TOLERANCE, TIME_TOLERANCE_MS = 0.1, 50.0
#: no engine generates a token of one request in less
MIN_OUTPUT_TOKEN_MS = 0.1


def is_plausible(
    reported_ms: float,
    elapsed_ms: float,
    ttft_ms: float | None = None,
    output_tokens: int | None = None,
) -> bool:
    """Say whether a prefill or a pull can have taken `reported_ms`.

    `elapsed_ms` has passed from the decision to the report, `ttft_ms` from the decision to the
    first token. Where output tokens are reported, the request has ended, and what they took at
    least is no part of its prefill: this finds clients that report a whole latency.
    """
    latest_ms = elapsed_ms if ttft_ms is None else min(elapsed_ms, ttft_ms)
    if reported_ms > latest_ms * (1 + TIME_TOLERANCE) + TIME_TOLERANCE_MS:
        return False
    if ttft_ms is not None or not output_tokens:
        return True
    return reported_ms + (output_tokens - 1) * MIN_OUTPUT_TOKEN_MS <= elapsed_ms + TIME_TOLERANCE_MS


class RateEstimate:
    """The weighted median of the newest samples and of a reference rate, clamped to the reference.

    `max_ratio` is the factor by which the estimate may differ from the reference. O(samples) each.
    """

    def __init__(self, reference_ms_per_token: float, max_samples: int, max_ratio: float) -> None:
        self._max_ratio = max_ratio
        #: (milliseconds per token, weight in tokens), the oldest first
        self._samples: deque[tuple[float, float]] = deque(maxlen=max_samples)
        #: the present estimate, and what it was before it was clamped
        self.ms_per_token = self._median = reference_ms_per_token

    def __len__(self) -> int:
        """Number of samples that the estimate rests on."""
        return len(self._samples)

    def learn(self, tokens: int, ms: float, reference_ms_per_token: float) -> None:
        """Add a report of `tokens` (more than 0) that took `ms`."""
        self._samples.append((ms / tokens, min(tokens, MAX_SAMPLE_TOKENS)))
        self._estimate(reference_ms_per_token)

    def drop_oldest(self, reference_ms_per_token: float) -> None:
        """Drop a sample, if there is one: the estimate comes nearer to the reference."""
        if self._samples:
            self._samples.popleft()
        self._estimate(reference_ms_per_token)

    def follow(self, reference_ms_per_token: float) -> None:
        """Be clamped to the reference as it is by now; equal it where samples are too few."""
        if len(self._samples) < REFERENCE_SAMPLES:
            self._median = reference_ms_per_token
        self._clamp(reference_ms_per_token)

    def _estimate(self, reference: float) -> None:
        self._median = reference
        if self._samples:
            mean_weight = sum(weight for _, weight in self._samples) / len(self._samples)
            weighed = [*self._samples, (reference, REFERENCE_SAMPLES * mean_weight)]
            self._median = _weighted_median(weighed)
        self._clamp(reference)

    def _clamp(self, reference: float) -> None:
        low, high = reference / self._max_ratio, reference * self._max_ratio
        self.ms_per_token = min(max(self._median, low), high)


class ModelRate:
    """The rate of all workers of a model together; its reference is the configured rate."""

    def __init__(self, configured_ms_per_token: float) -> None:
        self._configured = configured_ms_per_token
        self._estimate = RateEstimate(configured_ms_per_token, MODEL_SAMPLES, MAX_MODEL_RATIO)

    @property
    def ms_per_token(self) -> float:
        """The present estimate."""
        return self._estimate.ms_per_token

    def learn(self, tokens: int, ms: float) -> None:
        """Add a report of any worker."""
        self._estimate.learn(tokens, ms, self._configured)


def _weighted_median(samples: list[tuple[float, float]]) -> float:
    """Return the lowest value that, with those below it, has half of all weight."""
    samples.sort()
    half = sum(weight for _, weight in samples) / 2
    below = 0.0
    for value, weight in samples:
        below += weight
        if below >= half:
            return value
    return samples[-1][0]
