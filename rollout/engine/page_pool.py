"""The pages of the KV cache: their owners, and the tokens that each can be found by. No tensors.

Page 0 has no owner and is never valid. Private pages are taken from the low end, pages that several samples share from the
high end, so that each kind forms a range that attention reads in place. A page whose last owner gives it back is empty, or it
is *kept*: its keys and values stay under the digest of their tokens until the page is needed, the oldest first.
"""

from collections.abc import Iterable

import numpy as np


class PagePool:
    """Reference counts of pages. Every taken page is counted once per owner.

    max_kept: most pages without an owner that are kept; 0 keeps none. in_ranges: attention reads ranges of pages in place, so
    kept pages make way to the middle of the pool by a copy; otherwise the place of a page does not matter.
    """

    def __init__(self, num_pages: int, page_size: int, max_kept: int = 0, in_ranges: bool = True) -> None:
        assert num_pages >= 2, "page 0 is not usable"
        self.num_pages = num_pages
        self.page_size = page_size
        self.max_kept = max_kept
        self.in_ranges = in_ranges
        self.num_owners = np.zeros(num_pages, dtype=np.int32)
        self.is_shared = np.zeros(num_pages, dtype=bool)
        """Whether a page has, or had, several owners since it was taken."""
        self.num_free = num_pages - 1
        """Pages without an owner, the kept ones included."""
        self._is_empty = np.ones(num_pages, dtype=bool)
        self._is_empty[0] = False
        self._pages: dict[bytes, int] = {}
        """Each page that can be found, by its digest."""
        self._digests: list[bytes | None] = [None] * num_pages
        self._kept: dict[bytes, None] = {}
        """Digests of the pages without an owner, the oldest first."""
        self._copies: list[tuple[int, int]] = []
        self.wipes_pages = False
        """Whether a page is overwritten by page 0 when it is taken, because its last owner may have left NaN in it: attention
        multiplies slots that no query sees by 0, and 0 * NaN is NaN."""

    def take(self, is_shared: bool = False) -> int:
        """A page with one owner: the lowest, or the highest for a page that will be shared."""
        assert self.num_free > 0, "the scheduler takes only free pages"
        page = self._next_free(is_shared)
        self._make_empty(page)
        self._is_empty[page] = False
        self.num_free -= 1
        self.num_owners[page] = 1
        self.is_shared[page] = is_shared
        if self.wipes_pages:
            self.copy(0, page)
        return page

    def share(self, pages: Iterable[int]) -> None:
        """Add an owner to each page."""
        for page in pages:
            assert self.num_owners[page] > 0
            self.num_owners[page] += 1
            self.is_shared[page] = True

    def give_back(self, pages: list[int]) -> None:
        """Remove an owner from each page of a sequence. Its last pages count as the oldest: they are found after the others."""
        for page in reversed(pages):
            assert self.num_owners[page] > 0
            self.num_owners[page] -= 1
            if self.num_owners[page] == 0:
                self.num_free += 1
                digest = self._digests[page]
                if digest is None:
                    self._is_empty[page] = True
                else:
                    self._kept[digest] = None
        while len(self._kept) > self.max_kept:
            self._drop(next(iter(self._kept)))

    def register(self, page: int, digest: bytes) -> None:
        """Register a full page, so that it can be found, unless another page has the same tokens."""
        if digest not in self._pages:
            self._set_digest(page, digest)

    def find(self, digest: bytes, is_shared: bool) -> int | None:
        """The page with this digest, with one more owner; None if no page has it."""
        page = self._pages.get(digest)
        if page is None:
            return None
        if self.num_owners[page] == 0:
            del self._kept[digest]
            self.num_free -= 1
            self.is_shared[page] = is_shared
        else:
            self.is_shared[page] = True
        self.num_owners[page] += 1
        return page

    def forget(self) -> None:
        """Unregister all pages."""
        for digest in list(self._pages):
            self._drop(digest)

    def move(self, page: int, is_shared: bool) -> int:
        """Move a page and its owners towards its end of the pool; returns the new page, or the same if none is better."""
        if self.num_free == 0:
            return page
        target = self._next_free(is_shared)
        if (target < page) == is_shared:
            return page
        self._make_empty(target)
        self._is_empty[target] = False
        self._is_empty[page] = True
        self.num_owners[target] = self.num_owners[page]
        self.num_owners[page] = 0
        self.is_shared[target] = is_shared
        self._copy(page, target)
        return target

    def copy(self, source: int, target: int) -> None:
        """Request the copy of a page before the next use of the cache."""
        self._copies.append((source, target))

    def take_copies(self) -> list[tuple[int, int]]:
        """Copies to make now, in this order, as (source, target)."""
        copies = self._copies
        self._copies = []
        return copies

    def pages_for(self, num_tokens: int) -> int:
        """The number of pages that hold this many tokens."""
        return -(-num_tokens // self.page_size)

    def check(self, owners: Iterable[list[int]]) -> None:
        """Assert that every page has exactly the owners that claim it, and that all other pages are empty or kept."""
        claimed = np.zeros_like(self.num_owners)
        for pages in owners:
            for page in pages:
                claimed[page] += 1
        assert (claimed == self.num_owners).all(), "a page has other owners than it counts"
        assert self.is_shared[claimed > 1].all(), "a page of several owners is not marked as shared"
        known = {page: digest for page, digest in enumerate(self._digests) if digest is not None}
        assert {digest: page for page, digest in known.items()} == self._pages, "a page is found by another digest"
        kept = {page for page in known if claimed[page] == 0}
        assert kept == {self._pages[digest] for digest in self._kept}, "a page with an owner is kept"
        expected = claimed == 0
        expected[0] = False
        assert self.num_free == int(expected.sum()), "a page leaked"
        expected[list(kept)] = False
        assert (self._is_empty == expected).all(), "a page leaked"

    def _next_free(self, is_shared: bool) -> int:
        if not self.in_ranges:
            has_empty = self.num_free > len(self._kept)
            return int(self._is_empty.argmax()) if has_empty else self._pages[next(iter(self._kept))]
        is_free = self.num_owners[1:] == 0
        return self.num_pages - 1 - int(is_free[::-1].argmax()) if is_shared else 1 + int(is_free.argmax())

    def _make_empty(self, page: int) -> None:
        """Empty a page without an owner. Kept tokens move to an empty page, or in place of the oldest kept ones."""
        if self._digests[page] is None:
            return
        if self.num_free == len(self._kept):
            self._drop(next(iter(self._kept)))
        if self._digests[page] is None:
            return
        empty = np.flatnonzero(self._is_empty)
        place = int(empty[np.abs(empty - self.num_pages // 2).argmin()])
        self._is_empty[page] = True
        self._is_empty[place] = False
        self._copy(page, place)

    def _copy(self, page: int, target: int) -> None:
        """Copy a page with the digest of its tokens."""
        digest = self._digests[page]
        self._digests[page] = None
        if digest is not None:
            self._set_digest(target, digest)
        self.copy(page, target)

    def _set_digest(self, page: int, digest: bytes) -> None:
        assert self._digests[page] is None
        self._digests[page] = digest
        self._pages[digest] = page

    def _drop(self, digest: bytes) -> None:
        page = self._pages.pop(digest)
        self._digests[page] = None
        if digest in self._kept:
            del self._kept[digest]
            self._is_empty[page] = True
