"""The scheduler's side: what a request wants of peers, and which of its blocks they may want.

Pure: no call waits, nothing here knows vLLM. Blocks are counted from the prompt's beginning.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from kvatlas.schemas.digest import split_hashes
from kvatlas.schemas.hashing import BlockHasher, pack_tokens
from kvatlas.schemas.ids import InstanceId
from kvatlas.schemas.routing import Plan, PullStep
from kvatlas.worker_hooks.connector.orders import BlockLoad, BlockRun, BlockSave


class _Params(msgspec.Struct, frozen=True):
    plan: Plan | None = None


class _TransferParams(msgspec.Struct, frozen=True):
    kvatlas: _Params = _Params()


def plan_in(kv_transfer_params: Mapping[str, Any] | None) -> Plan | None:
    """Return the router's plan; None where there is none, or none that can be read."""
    if not kv_transfer_params or "kvatlas" not in kv_transfer_params:
        return None
    try:
        return msgspec.convert(kv_transfer_params, _TransferParams, strict=False).kvatlas.plan
    except msgspec.ValidationError:
        return None


class RequestBlocks:
    """One request: its chain as far as it is computed, its blocks in the engine."""

    def __init__(self, request_id: str, hasher: BlockHasher, plan: Plan | None) -> None:
        self.request_id = request_id
        self._hasher, self._plan = hasher, plan
        self._block_tokens = hasher.namespace.block_tokens
        self._hashes: list[bytes] = []
        self.block_ids: list[int] = []
        #: leading blocks that were ordered to be saved, or skipped
        self.num_saved = 0
        self._has_asked = False
        #: blocks that a load in preparation brings: first and end
        self._wanted = range(0)

    def chain(self, tokens: Sequence[int]) -> list[bytes]:
        """Return the hashes of the full blocks of tokens that begin with those of before."""
        known = len(self._hashes)
        if len(tokens) // self._block_tokens > known:
            rest = pack_tokens(tokens[known * self._block_tokens :])
            parent = self._hashes[-1] if known else None
            self._hashes += split_hashes(self._hasher.chain(rest, parent=parent))
        return self._hashes[: len(tokens) // self._block_tokens]

    @property
    def may_be_found(self) -> bool:
        """Whether nobody has said yet what to pull for the request."""
        return self._plan is None and not self._has_asked

    def found(self, plan: Plan | None) -> None:
        """Take a plan from elsewhere; None is as final."""
        self._plan, self._has_asked = plan, plan is None

    def wanted_blocks(self, num_held: int, tokens: Sequence[int]) -> int:
        """Return how many blocks behind the held ones the plan's pulls bring; asks once only."""
        if self._has_asked or self._plan is None or not self._plan.pulls:
            return 0
        self._has_asked = True
        if self._plan.block_tokens != self._block_tokens:
            return 0
        end = max(step.first_block + step.num_blocks for step in self._plan.pulls)
        end = min(end, len(self.chain(tokens)))
        self._wanted = range(num_held, max(end, num_held))
        return len(self._wanted)

    def load(self, num_blocks: int) -> BlockLoad:
        """Return the load of as many of the wanted blocks as the engine has made room for."""
        assert self._plan is not None
        wanted = self._wanted[:num_blocks]
        self._wanted = range(0)
        block_ids = tuple(self.block_ids[wanted.start : wanted.stop])
        hashes = tuple(self._hashes[wanted.start : wanted.stop])
        return BlockLoad(self.request_id, block_ids, hashes, _runs(wanted, self._plan.pulls))

    def completed(self, tokens: Sequence[int], budget: int) -> list[BlockSave]:
        """Return blocks that are complete with these tokens and not ordered yet, up to a budget."""
        chain = self.chain(tokens)
        end = min(len(chain), len(self.block_ids), self.num_saved + budget)
        first, self.num_saved = self.num_saved, max(end, self.num_saved)
        return [BlockSave(self.block_ids[i], chain[i]) for i in range(first, end)]


def _runs(wanted: range, steps: Sequence[PullStep]) -> tuple[BlockRun, ...]:
    """Cut the wanted blocks where their owners change; positions count from the first wanted."""
    runs: list[BlockRun] = []
    for block in wanted:
        owners = _owners(steps, block)
        if runs and runs[-1].owners == owners:
            runs[-1] = BlockRun(runs[-1].first, runs[-1].num_blocks + 1, owners)
        else:
            runs.append(BlockRun(block - wanted.start, 1, owners))
    return tuple(runs)


def _owners(steps: Sequence[PullStep], block: int) -> tuple[InstanceId, ...]:
    """Return whom to ask for a block: who the plan says, their fallbacks, then the others."""
    covering = [s for s in steps if s.first_block <= block < s.first_block + s.num_blocks]
    order: list[InstanceId] = []
    for step in [*covering, *steps]:
        order += [InstanceId(step.worker, step.rank), *step.fallbacks]
    return tuple(dict.fromkeys(order))
