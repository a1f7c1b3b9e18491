"""Posted receives, where the provider consumes one per immediate: none is lost when one cannot be posted at once.

No provider of a machine without a NIC is like that, so the core is compiled here over a scripted one.
"""

import errno
from collections.abc import Iterator
from typing import Any

import pytest

from tests.fabric.scripted import compile_script

ALL = 512
DECLARED = """
void script_open(void); void script_close(void); void script_provider(int room, int refusal);
void script_arrive(int immediates); void script_drain(void);
int script_posted(void); int script_failed(void); int script_seen(void);
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return compile_script("scripted_receives", DECLARED, tmp_path_factory.mktemp("scripted"))


@pytest.fixture
def script(compiled: Any) -> Iterator[Any]:
    compiled.script_open()
    yield compiled
    compiled.script_close()


def test_every_consumed_receive_is_posted_again(script: Any) -> None:
    script.script_drain()
    assert script.script_posted() == ALL
    script.script_arrive(3 * ALL)
    for _ in range(4):
        script.script_drain()
    assert (script.script_seen(), script.script_posted(), script.script_failed()) == (3 * ALL, ALL, 0)


def test_what_a_full_provider_does_not_take_is_posted_once_it_does(script: Any) -> None:
    script.script_provider(100, -errno.EAGAIN)
    script.script_drain()
    assert script.script_posted() == 100
    script.script_arrive(60)
    script.script_provider(10, -errno.EAGAIN)
    script.script_drain()
    assert (script.script_seen(), script.script_posted()) == (60, 40)
    script.script_provider(0, 0)
    script.script_drain()
    assert (script.script_posted(), script.script_failed()) == (ALL, 0)


def test_a_provider_that_refuses_for_good_fails_the_landing_once(script: Any) -> None:
    script.script_drain()
    script.script_arrive(5)
    script.script_provider(0, -errno.ENOMEM)
    script.script_drain()
    script.script_drain()
    assert (script.script_seen(), script.script_failed()) == (5, errno.ENOMEM)
    assert script.script_posted() == ALL - 5
