"""The prefix cache: full pages of keys and values are found again by their tokens and all tokens before them.

The digest of a page is a hash of its tokens and of the digest of the page before it, so equal digests mean equal prefixes
(vLLM, "Automatic Prefix Caching"). Pages of prompts are registered when their prefill is scheduled, which runs before any use
of them; pages of responses when their sequence leaves. No page outlives its version of the weights.

Recurrent layers cannot begin behind pages alone. With them a prefix is found up to the last page behind which a state is kept: behind
the last full page of a prompt, behind the last one of a response, and behind the pages that two prompts have in common (from
the second of them on).
"""

from array import array
from hashlib import blake2b
from typing import TYPE_CHECKING

from .sequence import Chain, Sequence, SequenceGroup

if TYPE_CHECKING:
    from ...trainer.policy.rope import RopeRows
    from .page_pool import PagePool
    from .recurrent.state_pool import StatePool

_DIGEST_BYTES = 16
"""128 bits: no two prefixes of a run have the same digest by chance."""


class PrefixCache:
    """Finds and registers the pages of a pool. The pool owns the pages and drops them in order of age."""

    def __init__(self, pool: "PagePool", states: "StatePool", rope: "RopeRows | None" = None) -> None:
        self._pool = pool
        self._states = states
        self._rope = rope
        self._version = 0
        self.num_found = 0
        """Tokens so far that were found and not prefilled."""

    def find(self, group: SequenceGroup, num_reserved: int) -> None:
        """Give a group without pages those of its prefix that are known, as long as `num_reserved` pages stay free."""
        if self._pool.max_kept == 0:
            return
        is_long = self._rope is not None and self._rope.is_long(len(group.tokens))
        chain = Chain(self._version, 0, b"long" if is_long else b"")
        stateful = chain
        size = self._pool.page_size
        is_shared = len(group.sequences) > 1
        while (chain.num_pages + 1) * size <= group.prefix_length and self._pool.num_free > num_reserved:
            following = self._following(chain, group.tokens)
            page = self._pool.find(following.digest, is_shared)
            if page is None:
                break
            group.pages.append(page)
            chain = following
            if self._states.holds(chain.digest):
                stateful = chain
        if self._states.num_places:
            chain = self._up_to_state(group, stateful)
        group.chain = chain
        group.num_cached = chain.num_pages * size
        self.num_found += group.num_cached

    def register(self, holder: Sequence | SequenceGroup, tokens: list[int], num_cached: int) -> None:
        """Register the full pages of the first `num_cached` tokens, if this version of the weights computed them all."""
        chain = holder.chain
        if chain is None or chain.version != self._version:
            return
        while (chain.num_pages + 1) * self._pool.page_size <= num_cached:
            chain = self._following(chain, tokens)
            self._pool.register(holder.pages[chain.num_pages - 1], chain.digest)
        holder.chain = chain

    def _up_to_state(self, group: SequenceGroup, chain: Chain) -> Chain:
        """Give back the pages behind the last kept state, and copy that state."""
        group.num_known = len(group.pages) * self._pool.page_size
        place = self._states.find(chain.digest) if self._states.has_room(1) else None
        if place is None:
            chain = Chain(chain.version, 0, b"")
        else:
            group.state = self._states.take(place)
        self._pool.give_back(group.pages[chain.num_pages :])
        del group.pages[chain.num_pages :]
        return chain

    def digest_at(self, holder: Sequence | SequenceGroup, tokens: list[int], num_tokens: int) -> bytes | None:
        """The digest of the first tokens, which fill whole pages; None if this version of the weights has not computed them all."""
        chain = holder.chain
        if chain is None or chain.version != self._version or chain.num_pages * self._pool.page_size > num_tokens:
            return None
        while chain.num_pages * self._pool.page_size < num_tokens:
            chain = self._following(chain, tokens)
        return chain.digest

    def forget(self) -> None:
        """Unregister all pages and states, because the weights change."""
        self._version += 1
        self._pool.forget()
        self._states.forget()

    def _following(self, chain: Chain, tokens: list[int]) -> Chain:
        size = self._pool.page_size
        number = chain.num_pages
        return Chain(chain.version, number + 1, digest(tokens[number * size : (number + 1) * size], chain.digest))


def digest(tokens: list[int], before: bytes = b"") -> bytes:
    """A hash of tokens that come after those of another hash."""
    return blake2b(array("q", tokens).tobytes(), key=before, digest_size=_DIGEST_BYTES).digest()
