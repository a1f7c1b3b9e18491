"""The fabric's own conformance suite, over a NIC: the `fabric` and `link` of this folder's conftest."""

from tests.fabric.test_expectations import *  # noqa: F403
from tests.fabric.test_triggered import (  # noqa: F401
    test_a_threshold_that_was_reached_before_fires_at_once,
    test_a_word_that_jumps_fires_everything_that_it_passed,
    test_an_armed_batch_that_is_cancelled_is_never_posted,
    test_more_events_than_one_call_returns_are_all_reported,
    test_nothing_is_posted_below_the_threshold,
    test_several_words_are_watched_apart,
    test_thresholds_fire_by_value_whatever_the_order_of_arming,
)
from tests.fabric.test_writes import *  # noqa: F403
