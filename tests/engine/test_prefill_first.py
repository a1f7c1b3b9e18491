"""The other scheduler: prompts under way before decodes. P05, B10 and the margin of section 16."""

from tests.engine.traces import Harness


def test_p05_the_rest_of_a_prompt_comes_before_a_decode() -> None:
    h = Harness(tokens=8, scheduler_type="prefill_first")
    h.add("A", 4, 6)
    assert h.step() == "A4@0"
    h.add("B", 20, 3)
    assert h.run() == "A1@4 B7@0 / B8@7 / B5@15 A1@5 / A1@6 B1@20 / A1@7 B1@21 / A1@8"
    assert list(h.gathered.ended) == ["B", "A"]
    h.assert_at_rest()


def test_b10_a_long_prompt_makes_a_decode_start_over_once() -> None:
    h = Harness(num_blocks=8, tokens=4, scheduler_type="prefill_first")
    h.add("A", 4, 24)
    h.add("B", 20, 4)
    h.steps(10)
    assert list(h.gathered.ended) == ["B"]
    h.run()
    assert (h.engine.counters.resets, h.gathered.steps) == (1, 31)
    h.assert_at_rest()


def test_below_the_margin_a_held_prompt_does_not_keep_the_decodes_from_running() -> None:
    h = Harness(num_blocks=20, tokens=64, margin=0.25, scheduler_type="prefill_first")
    for name in "ABCD":
        h.add(name, 19, 2)
    h.add("E", 4, 1)
    assert h.step() == "A19@0 B19@0 C19@0 D7@0"
    assert h.step() == "D12@7 A1@19 B1@19 C1@19", "the first candidate runs whatever it is"
