"""The safety margin: P11 to P14."""

from tests.engine.traces import Harness


def test_p11_exactly_at_the_margin_prompts_may_start() -> None:
    h = Harness(num_blocks=20, margin=0.25)
    h.add("A", 60, 3)
    h.step()
    h.add("B", 8, 2)
    assert h.step() == "A1@60 B8@0"
    h.run()
    h.assert_at_rest()


def test_p12_below_the_margin_prompts_wait() -> None:
    h = Harness(num_blocks=20, margin=0.25)
    h.add("A", 61, 3)
    assert h.step() == "A61@0"
    h.add("B", 8, 2)
    assert h.run() == "A1@61 / A1@62 / B8@0 / B1@8"
    h.assert_at_rest()


def test_p13_a_prompt_under_way_is_held_too() -> None:
    h = Harness(num_blocks=20, margin=0.25)
    for name in "ABCD":
        h.add(name, 20, 4)
    assert h.steps(4) == ("A20@0 B20@0 C20@0 D4@0 / A1@20 B1@20 C1@20 / A1@21 B1@21 C1@21 / A1@22 B1@22 C1@22")
    assert h.run() == "D16@4 / D1@20 / D1@21 / D1@22"
    h.assert_at_rest()


def test_p14_the_margin_never_idles_the_engine() -> None:
    h = Harness(num_blocks=20, tokens=80, margin=1.0)
    h.add("A", 8, 3)
    h.add("B", 8, 3)
    assert h.step() == "A8@0 B8@0"
    h.add("C", 8, 2)
    assert h.run() == "A1@8 B1@8 / A1@9 B1@9 / C8@0 / C1@8"
    h.assert_at_rest()


def test_reservations_obey_the_margin_unless_nothing_else_is_there() -> None:
    h = Harness(num_blocks=20, margin=0.25)
    assert h.can_reserve(80)
    h.reserve("A", 64, 4)
    assert not h.can_reserve(4)
    h.engine.abort("A")
    assert h.can_reserve(4), "what lies in quarantine does not run"
