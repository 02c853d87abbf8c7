"""The places of recurrent states: their owners, and the prefixes whose states are kept. No tensors.

Place 0 is the state before the first token. It has no owner and is never written. A running sequence has two places: its state behind an
even number of tokens and that behind an odd one. A step reads one and writes the other, so it may run again, and a step
behind the end of a response leaves the state before it as it was. A place whose owner gives it back is empty, or it is *kept* under the digest of
the tokens that its state has read, until the place is needed, the oldest first.
"""

from collections.abc import Iterable


class StatePool:
    """Places 1 to `num_places`, each of one owner, kept or empty. Without places, for a policy without states, all owners have place 0."""

    def __init__(self, num_places: int = 0) -> None:
        self.num_places = num_places
        self._empty = list(range(num_places, 0, -1))
        self._kept: dict[bytes, int] = {}
        """Places by digest, the oldest first."""
        self._copies: list[tuple[int, int]] = []

    @property
    def num_free(self) -> int:
        """Places without an owner, the kept ones included."""
        return len(self._empty) + len(self._kept)

    def has_room(self, count: int) -> bool:
        """Whether so many places can be taken."""
        return not self.num_places or self.num_free >= count

    def take(self, source: int | None = 0) -> int:
        """A place with a copy of another one's state, by default that before the first token; with None it will be written before it is read."""
        if not self.num_places:
            return 0
        place = self._empty.pop() if self._empty else self._kept.pop(next(iter(self._kept)))
        if source is not None:
            self.copy(source, place)
        return place

    def give_back(self, places: Iterable[int]) -> None:
        """Empty these places; those without a state, which are 0, are passed over."""
        self._empty += [place for place in places if place]

    def keep(self, place: int, digest: bytes) -> None:
        """Give back a place, whose state is kept if no other one has read the same tokens."""
        if digest in self._kept:
            self._empty.append(place)
        else:
            self._kept[digest] = place

    def holds(self, digest: bytes) -> bool:
        """Whether a state is kept under this digest."""
        return digest in self._kept

    def find(self, digest: bytes) -> int | None:
        """The place that is kept under a digest, which is the newest then. Copy it before another one is taken, which may be this one."""
        place = self._kept.pop(digest, None)
        if place is not None:
            self._kept[digest] = place
        return place

    def forget(self) -> None:
        """Empty the kept places."""
        self._empty += self._kept.values()
        self._kept.clear()

    def copy(self, source: int, target: int) -> None:
        """Request the copy of a state before the next use of the states."""
        self._copies.append((source, target))

    def take_copies(self) -> list[tuple[int, int]]:
        """Copies to make now, in this order, as (source, target)."""
        copies = self._copies
        self._copies = []
        return copies

    def check(self, owned: Iterable[int]) -> None:
        """Assert that every place has one owner, or is kept or empty."""
        places = [place for place in owned if place]
        found = sorted([*places, *self._kept.values(), *self._empty])
        assert found == list(range(1, self.num_places + 1)), "a place of a state leaked, or has two owners"
