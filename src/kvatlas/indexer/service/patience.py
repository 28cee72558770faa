"""How patient an index service is."""

from msgspec import Struct

from kvatlas.indexer.fold.budgets import BudgetSettings


class IndexServiceLimits(Struct, frozen=True):
    """How patient the service is."""

    #: how often the broker is asked for the log's end; rare makes `lag` coarse
    poll_seconds: float = 0.5
    #: silent for this long by the broker's clock is `stale`; below the interval of digests, live
    #: instances look stale between them
    stale_seconds: float = 15.0
    #: so long without a message, while workers renew leases, the log is taken for not stored; below
    #: a few intervals of digests, an idle fleet looks so
    log_silence_seconds: float = 10.0
    #: an ended lease counts after this, unless it is taken again
    lease_ended_seconds: float = 0.5
    #: the same for an instance that was never seen with a lease
    lease_missing_seconds: float = 30.0
    #: pause after the broker refused a record about an instance
    record_retry_seconds: float = 5.0
    #: this soon after a connect only who renewed a lease since is declared dead; below the interval
    #: of renewals, an outage longer than a lease's time to live kills the whole fleet
    lease_settling_seconds: float = 10.0
    #: a first request for an inventory waits up to this, so that replicas do not ask at once
    inventory_jitter_seconds: float = 0.2
    inventory_timeout_seconds: float = 2.0
    #: who has not answered after this lets another one be asked meanwhile
    inventory_patience_seconds: float = 0.25
    #: pause before asking again, doubled each time up to the maximum
    inventory_retry_seconds: float = 1.0
    inventory_max_retry_seconds: float = 30.0
    #: repairs under way at a time; more heal a broken fleet sooner and delay answers meanwhile
    max_inventory_requests: int = 1
    #: after so many in vain, half a minute by the pauses above, what the instance is believed to
    #: hold is dropped
    max_vain_inventory_requests: int = 6
    #: unknown instances asked what they are each time that the service looks, every `poll_seconds`;
    #: many at a time, and their inventories delay answers after a log was lost
    max_introductions: int = 8
    budget: BudgetSettings = BudgetSettings()
    #: how often the index is counted anew, to find memory that has changed by itself; 0 never
    audit_seconds: float = 600.0
