"""The namespaces of an instance's blocks: their hashers, and what of them has been told."""

import hashlib
from collections.abc import Callable

import msgspec

from kvatlas.schemas.fleet import NamespaceDescriptor
from kvatlas.schemas.hashing import BlockHasher
from kvatlas.schemas.kv_events import NamespaceSeen

#: namespaces kept without a block in them; a forgotten one is built, and told, again
MAX_NAMESPACES = 16_384


class Namespaces:
    """One hasher a (LoRA, salt); `used_roots` says which must not be forgotten.

    Of a salt, which is as long as whoever sends it likes, a digest is kept.
    """

    def __init__(
        self,
        model: str,
        descriptor: NamespaceDescriptor,
        fleet_key: bytes,
        used_roots: Callable[[], set[bytes]],
    ) -> None:
        self._model, self._descriptor, self._fleet_key = model, descriptor, fleet_key
        self._used_roots = used_roots
        #: (LoRA, digest of the salt) -> hasher; not more than in _seen
        self._hashers: dict[tuple[str | None, bytes | None], BlockHasher] = {}
        self._seen: dict[bytes, NamespaceSeen] = {}
        #: roots told in this epoch
        self.told: set[bytes] = set()
        self._prune_at = MAX_NAMESPACES

    def hasher(self, lora: str | None, cache_salt: str | None) -> BlockHasher:
        """Return the hasher of a namespace."""
        key = (lora, None if cache_salt is None else _digest(cache_salt))
        hasher = self._hashers.get(key)
        if hasher is None:
            namespace = self._descriptor.namespace(self._model, lora, cache_salt)
            hasher = BlockHasher(namespace, self._fleet_key)
            hasher.namespace = msgspec.structs.replace(namespace, cache_salt=None)
            if len(self._seen) >= self._prune_at:
                self._prune()
            self._hashers[key] = hasher
            self._seen[hasher.root] = NamespaceSeen(
                hasher.root,
                self._model,
                self._descriptor.block_tokens,
                self._descriptor.algorithm,
                lora,
                cache_salt is not None,
                self._descriptor.lookahead_tokens,
            )
        return hasher

    def publish(self, root: bytes) -> NamespaceSeen:
        """Return what a root stands for, and note that it has been told."""
        self.told.add(root)
        return self._seen[root]

    def _prune(self) -> None:
        """Forget the namespaces that no block is in; the next of their blocks tells them again."""
        used = self._used_roots()
        self._seen = {root: seen for root, seen in self._seen.items() if root in used}
        self.told &= used
        self._hashers.clear()
        self._prune_at = max(MAX_NAMESPACES, 2 * len(self._seen))


def _digest(salt: str) -> bytes:
    # salts tell tenants apart, who choose them: two of one digest must not be found
    return hashlib.sha256(salt.encode()).digest()
