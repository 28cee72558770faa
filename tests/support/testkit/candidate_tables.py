"""Candidate tables of candidates that a test has as objects."""

import numpy as np

from kvatlas.indexer.reader import InstanceView
from kvatlas.router.decision import price_kernel as k
from kvatlas.router.decision.candidate_set import CandidateSet, GroupKey
from kvatlas.router.decision.candidate_table import CandidateTable
from kvatlas.schemas.fleet import NamespaceDescriptor, WorkerInfo
from kvatlas.schemas.ids import NUM_TIERS
from kvatlas.schemas.routing import Candidate, Question


def a_candidate_table(question: Question) -> CandidateTable:
    """Return the candidate table that such a question is asked of."""
    candidates = question.candidates
    held = np.array([c.held for c in candidates], np.uint32).reshape(len(candidates), NUM_TIERS)
    candidate_table = CandidateTable(a_candidate_set(candidates), held, question.prompt_tokens)
    candidate_table.turn, candidate_table.seed = question.turn, question.seed
    for line, c in enumerate(candidates):
        loads = c.in_flight, c.queued_ms, c.work_ms, c.compute_ms_per_token, c.pull_ms_per_token
        candidate_table.columns[line, k.PREDICTED : k.NUM_ASKED] = c.predicted_blocks, *loads
    return candidate_table


def a_candidate_set(candidates: tuple[Candidate, ...]) -> CandidateSet:
    """Return the candidate set of instances as the candidates show them."""
    infos = [
        WorkerInfo(f"http://{c.worker}", ("m",), NamespaceDescriptor(c.block_tokens))
        for c in candidates
    ]
    views = [
        InstanceView(c.instance, 1, 1, info, c.trust, (), {}, 0, 0)
        for c, info in zip(candidates, infos, strict=True)
    ]
    groups = [
        GroupKey("m", NamespaceDescriptor(16), str(number))
        for number in range(1 + max((c.group for c in candidates), default=-1))
    ]
    group_of, kv_class_of = [c.group for c in candidates], [c.kv_class for c in candidates]
    return CandidateSet(views, infos, groups, group_of, kv_class_of)
