"""Which group a rollout is leased next: what came back before new ones, on the version that began it, unless that is too old."""

from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace
from support.hub_scene import Scene

from headrace.comm.messages import GroupId, LeaseRequest, RowRef, RowsStreamed
from headrace.relay.hub.lease_choice import Choice, LeaseChooser
from headrace.relay.journal import events as ev
from headrace.relay.journal.replay import replay


class Rules(Scene):
    """The rules of leasing beside a hub whose groups came back from a rollout that died."""

    def __init__(self, folder: Path, **settings: float | str) -> None:
        super().__init__(folder, **settings)  # pyright: ignore[reportArgumentType]
        self.rules = LeaseChooser(self.hub.state, self.hub.leases.admission, self.hub.partials)

    def come_back(self, *begun: bool) -> list[GroupId]:
        """Groups of version 0 whose rollout died, with first tokens of those that are `begun`."""
        groups = [lease.group for lease in self.lease(num_groups=len(begun)).leases]
        for group, has_tokens in zip(groups, begun, strict=True):
            if has_tokens:
                first_tokens = RowRef(group.row(0), 1, ["relay-0#1"], version=0, num_tokens=3, is_partial=True)
                self.say("rollout-0", RowsStreamed([first_tokens]))
        self.hub.on_process_death("rollout-0", "dead")
        return groups

    def train(self, num_steps: int) -> None:
        for step in range(num_steps):
            self.train_step(step)

    def train_step(self, step: int) -> None:
        self.hub.context.commit(ev.Trained(step=step))
        self.hub.context.commit(ev.Published(version=step + 1, digest="", relay="relay-0"))

    def choose(self, own: int, version: int | None, *, may_be_new: bool = True) -> Choice | None:
        """The choice for a rollout that has the weights of version `own`. It changes nothing."""
        first_tokens = dict(self.hub.partials.rows)
        choice = self.rules.choose(LeaseRequest(1, own, 9, can_continue=True), version, may_be_new=may_be_new)
        assert self.hub.partials.rows == first_tokens and replay(self.path) == self.hub.state
        return choice


@pytest.fixture
def make(tmp_path: Path):
    scenes: list[Rules] = []

    def rules(**settings: float | str) -> Rules:
        scenes.append(Rules(tmp_path, **settings))
        return scenes[-1]

    yield rules
    for each in scenes:
        each.close()


MakeRules = Callable[..., Rules]


def test_a_new_group_is_chosen_where_the_grant_may_have_one_and_the_queue_has_room(make: MakeRules):
    rules = make(lead=1)
    assert rules.choose(0, 0) == Choice(0, None, {})
    assert rules.choose(0, 0, may_be_new=False) is None
    rules.lease()
    assert rules.choose(0, 0) is None


def test_what_came_back_goes_before_new_groups_and_needs_no_room(make: MakeRules):
    rules = make(lead=1)
    (group,) = rules.come_back(False)
    choice = rules.choose(0, 0, may_be_new=False)
    assert choice == Choice(0, rules.hub.state.groups[group], {})


def test_a_begun_group_is_for_a_rollout_of_its_version_or_one_that_may_go_back(make: MakeRules):
    rules = make()
    not_begun, begun = rules.come_back(False, True)
    busy, idle, of_its_version = (rules.choose(own, version) for own, version in ((1, 1), (1, None), (0, 0)))
    assert busy is not None and (busy.version, busy.group) == (1, rules.hub.state.groups[not_begun])
    assert idle is not None and (idle.version, idle.group) == (0, rules.hub.state.groups[begun])
    assert idle.partials.keys() == {0} and not idle.starts_again
    assert of_its_version is not None and of_its_version.group == rules.hub.state.groups[not_begun]


def test_on_an_older_version_only_groups_that_it_began_are_chosen(make: MakeRules):
    rules = make(lead=9)
    (begun,) = rules.come_back(True)
    choice = rules.choose(1, 0)
    assert choice is not None and choice.group == rules.hub.state.groups[begun]
    assert rules.choose(2, 1) is None, "there is room for a new group, but not on another version than the rollout's"


@pytest.mark.parametrize("version", [None, 2])
def test_a_group_whose_first_tokens_are_too_old_starts_again(make: MakeRules, version: int | None):
    rules = make(per_step=1, max_staleness=1, lead=4)
    (begun,) = rules.come_back(True)
    rules.train(2)
    assert rules.choose(2, version) == Choice(2, rules.hub.state.groups[begun], {}, starts_again=True)


def test_a_group_that_is_too_old_for_any_version_waits(make: MakeRules):
    rules = make(per_step=1, max_staleness=1, lead=4)
    rules.come_back(True)
    rules.train(3)
    assert rules.choose(1, 1) is None, "version 1 is too old for step 3"


def test_first_tokens_of_two_versions_continue_on_the_second_and_are_as_old_as_the_first(make: MakeRules):
    rules = make(per_step=1, max_staleness=1, lead=4)
    (begun,) = rules.come_back(True)
    group, partials = rules.hub.state.groups[begun], rules.hub.partials.rows
    row = partials[begun.row(0)] = replace(partials[begun.row(0)], newest=1)
    rules.train(1)
    assert rules.choose(2, None) == Choice(1, group, {0: row})
    rules.train_step(1)
    assert rules.choose(2, None) == Choice(2, group, {}, starts_again=True)
