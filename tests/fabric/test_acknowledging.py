"""Which writes ask the peer for an acknowledgement, and that a write counts as completed only once it is known to be
delivered. No provider tells from outside, and TCP's completions come in order: the core is compiled here over a
scripted one."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.fabric.scripted import compile_script

CAP = 16
DECLARED = """
void script_open(int cap, int in_order, int in_all); void script_close(void); void script_queue(int count);
void script_complete(int write); void script_go_on(void); void script_cancel(void);
int script_posted(void); int script_asked(int write); int script_outstanding(void); int script_completed(void);
int script_ended(void); void script_refuse(void); int script_failed(void);
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return compile_script("scripted_sends", DECLARED, tmp_path_factory.mktemp("scripted"))


@pytest.fixture
def opened(compiled: Any) -> Iterator[Callable[..., Any]]:
    def opened(cap: int = CAP, in_order: bool = True, in_all: int = CAP) -> Any:
        compiled.script_open(cap, in_order, in_all)
        return compiled

    yield opened
    compiled.script_close()


def asking(script: Any) -> list[int]:
    return [write for write in range(script.script_posted()) if script.script_asked(write)]


def test_every_few_writes_one_asks_and_so_does_a_batchs_last(opened: Callable[..., Any]) -> None:
    script = opened()
    script.script_queue(11)
    assert asking(script) == [0, 4, 8, 10]


def test_every_write_asks_where_nothing_is_delivered_in_order(opened: Callable[..., Any]) -> None:
    script = opened(in_order=False)
    script.script_queue(11)
    assert asking(script) == list(range(11))


@pytest.mark.parametrize("cap", [1, 2, 3, 7])
def test_however_few_may_be_outstanding_one_of_them_asks(cap: int, opened: Callable[..., Any]) -> None:
    script = opened(cap)
    script.script_queue(40)
    while not script.script_ended():
        before = script.script_posted(), script.script_outstanding()
        for write in range(before[0] - before[1], before[0]):
            script.script_complete(write)
        script.script_go_on()
        assert script.script_outstanding() <= cap and (script.script_posted(), script.script_outstanding()) != before
    assert (script.script_posted(), script.script_completed()) == (40, 40)


@pytest.mark.parametrize("in_all", [1, 2, 3])
def test_one_that_shares_a_small_cap_with_all_others_always_comes_to_ask(
    in_all: int, opened: Callable[..., Any]
) -> None:
    script = opened(in_all=in_all)
    script.script_queue(40)
    given = 0
    while not script.script_ended():
        assert given < script.script_posted(), "it waits for a word that it did not ask for"
        script.script_complete(given)
        given += 1
        script.script_go_on()
    assert (script.script_posted(), script.script_completed()) == (40, 40)


def test_what_was_only_handed_over_stays_outstanding(opened: Callable[..., Any]) -> None:
    script = opened()
    script.script_queue(40)
    assert script.script_posted() == CAP
    for write in range(CAP):
        if not script.script_asked(write):
            script.script_complete(write)
    script.script_go_on()
    assert (script.script_posted(), script.script_outstanding(), script.script_completed()) == (CAP, CAP, 0)


def test_one_acknowledgement_is_that_of_all_before_it(opened: Callable[..., Any]) -> None:
    script = opened()
    script.script_queue(40)
    for write in range(CAP):
        if not script.script_asked(write):
            script.script_complete(write)
    script.script_complete(8)
    script.script_go_on()
    # The provider still has the two older ones that asked: each completion is given once.
    assert (script.script_completed(), script.script_posted()) == (7, CAP + 7)
    script.script_complete(0)
    script.script_complete(4)
    script.script_go_on()
    assert script.script_completed() == 9


def test_completions_in_any_order_are_each_counted_once(opened: Callable[..., Any]) -> None:
    script = opened()
    chance = random.Random(20261130)
    script.script_queue(200)
    given: set[int] = set()
    while not script.script_ended():
        open_ = [write for write in range(script.script_posted()) if write not in given]
        for write in chance.sample(open_, chance.randint(1, len(open_))):
            script.script_complete(write)
            given.add(write)
        script.script_go_on()
        assert script.script_outstanding() == script.script_posted() - script.script_completed()
        assert script.script_outstanding() <= CAP
    assert script.script_completed() == 200


def test_a_cancelled_batch_waits_only_for_what_the_provider_still_has(opened: Callable[..., Any]) -> None:
    script = opened()
    script.script_queue(40)
    for write in (1, 2, 3, 5):
        script.script_complete(write)
    script.script_go_on()
    assert script.script_completed() == 0
    script.script_cancel()
    assert (script.script_completed(), script.script_ended()) == (4, 0)
    for write in set(range(CAP)) - {1, 2, 3, 5}:
        script.script_complete(write)
    script.script_go_on()
    assert (script.script_completed(), script.script_ended(), script.script_outstanding()) == (CAP, 1, 0)


def test_an_endpoint_whose_peer_is_gone_does_not_wait_for_what_is_held(opened: Callable[..., Any]) -> None:
    """A word that is awaited may yet come; nothing more is heard of what is held, and the provider takes nothing."""
    script = opened()
    script.script_queue(40)
    for write in range(4):
        script.script_complete(write)
    script.script_refuse()
    assert script.script_outstanding() == CAP - 1 and not script.script_failed()
    for write in range(4, CAP):
        script.script_complete(write)
    script.script_go_on()
    assert (script.script_failed(), script.script_ended(), script.script_outstanding()) == (1, 1, 0)
