"""Which node's word about a stream counts."""

import pytest
from nats.js.api import ClusterInfo, PeerInfo

from kvatlas.events.nats.quorum import speaks_for_majority

SECOND = 10**9


def peers(*active_seconds: float) -> list[PeerInfo]:
    return [PeerInfo(active=int(seconds * SECOND)) for seconds in active_seconds]


@pytest.mark.parametrize(
    ("cluster", "expected"),
    [
        pytest.param(None, True, id="a broker of its own"),
        pytest.param(ClusterInfo(leader="n0"), True, id="one copy"),
        pytest.param(ClusterInfo(), False, id="one copy, on a node that is away"),
        pytest.param(ClusterInfo(leader="n0", replicas=peers(0.2, 0.9)), True, id="all well"),
        pytest.param(ClusterInfo(leader="n0", replicas=peers(0.2, 60.0)), True, id="one away"),
        pytest.param(ClusterInfo(leader="n0", replicas=peers(3.1, 60.0)), False, id="cut off"),
        pytest.param(ClusterInfo(leader="n0", replicas=peers(0.0, 0.0)), False, id="never heard"),
        pytest.param(ClusterInfo(replicas=peers(0.2, 0.9, 0.1)), False, id="knows no leader"),
        pytest.param(
            ClusterInfo(leader="n0", replicas=peers(0.2, 0.2, 9.0, 9.0)), True, id="three of five"
        ),
        pytest.param(
            ClusterInfo(leader="n0", replicas=peers(0.2, 9.0, 9.0, 9.0)), False, id="two of five"
        ),
    ],
)
def test_a_leader_counts_while_it_hears_of_a_majority(
    cluster: ClusterInfo | None, expected: bool
) -> None:
    assert speaks_for_majority(cluster) is expected
