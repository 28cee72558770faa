"""What travels in a request's `kv_transfer_params`: the plan, and whom a stock engine pulls from.

kvatlas           for our connector and for reference engines: the decision and its plan
remote_kv_source  for vLLM's own P2P tier, which pulls by hash but never picks the peer itself
"""

from kvatlas.router.answers import KvatlasParams, KvTransferParams, RemoteKvSource
from kvatlas.router.decision.candidate_set import CandidateSet
from kvatlas.schemas.fleet import host_and_port
from kvatlas.schemas.ids import InstanceId
from kvatlas.schemas.routing import Plan


def transfer_params(
    decision_id: str, plan: Plan, candidate_set: CandidateSet, chosen: int
) -> KvTransferParams:
    """Return what the request for the chosen candidate has to carry."""
    return KvTransferParams(
        KvatlasParams(decision_id, plan),
        _remote_kv_source(decision_id, plan, candidate_set, chosen),
    )


def _remote_kv_source(
    decision_id: str, plan: Plan, candidate_set: CandidateSet, chosen: int
) -> RemoteKvSource | None:
    """Name the owner of the first blocks to pull: the tier takes one source a request."""
    if not plan.pulls or not host_and_port(candidate_set.infos[chosen].p2p_address):
        return None
    owner = InstanceId(plan.pulls[0].worker, plan.pulls[0].rank)
    line = candidate_set.row_of.get(owner)
    address = None if line is None else host_and_port(candidate_set.infos[line].p2p_address)
    return None if address is None else RemoteKvSource(decision_id, *address)
