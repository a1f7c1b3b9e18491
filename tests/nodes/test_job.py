"""A request's own books: durations from stamps of one clock, that sum to what was waited."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode_node.job import Job
from kv_messenger.attempts import Arrival
from protocol.messages import DecodeRequest, PrefillTimes
from protocol.sampling import SamplingParams
from tests.nodes.desk import FIRST, INSTANCE

SECOND_NS = 1_000_000_000
RECEIVED = 1000 * SECOND_NS

durations = st.integers(min_value=0, max_value=3600 * SECOND_NS)


def job(queued_ns: int = 0, waited_ns: int | None = None, times: PrefillTimes | None = None) -> Job:
    """Received at RECEIVED, asked `queued_ns` later; its KV came `waited_ns` after that (None: it did not)."""
    request = DecodeRequest(
        request="A",
        public_id="",
        prompt=[5, 6, 7],
        sampling=SamplingParams(max_new_tokens=1),
        deadline_s=1.0,
        prefills=[FIRST],
    )
    made = Job(request, RECEIVED, 0.0, [], attempt=1, times=times)
    if waited_ns is not None:
        made.peer = FIRST
        made.asked_ns = RECEIVED + queued_ns
        made.arrival = Arrival(made.key(INSTANCE), 6, 600, made.asked_ns + waited_ns, "net")
    return made


def times(queue_s: float, prefill_s: float) -> PrefillTimes:
    return PrefillTimes(chunks=3, queue_s=queue_s, prefill_s=prefill_s, early_writes=4, last_chunk_writes=5)


@given(durations, durations, st.floats(0, 4000), st.floats(0, 4000))
def test_the_parts_sum_to_the_wait_from_receipt_to_the_last_write(
    queued: int, waited: int, queue_s: float, prefill_s: float
) -> None:
    ledger = job(queued, waited, times(queue_s, prefill_s)).ledger("decode-1")
    parts = (ledger.queue_s, ledger.prefill_s, ledger.exposed_transfer_s)
    assert min(parts) >= 0.0
    assert sum(parts) == pytest.approx((queued + waited) / SECOND_NS, abs=1e-6)
    assert ledger.prefill_s <= prefill_s


@pytest.mark.parametrize(
    ("waited", "queue_s", "prefill_s", "expected"),
    [
        (10.0, 2.0, 5.0, (2.0, 5.0, 3.0)),
        (10.0, 2.0, 20.0, (2.0, 8.0, 0.0)),
        (10.0, 20.0, 5.0, (10.0, 0.0, 0.0)),
        (10.0, 2.0, 8.0, (2.0, 8.0, 0.0)),
    ],
    ids=["a transfer longer than the prefill", "KV there before the prefill's end", "a longer queue", "no time left"],
)
def test_what_the_prefill_node_says_counts_as_far_as_it_was_waited_for(
    waited: float, queue_s: float, prefill_s: float, expected: tuple[float, float, float]
) -> None:
    ledger = job(SECOND_NS, int(waited * SECOND_NS), times(queue_s, prefill_s)).ledger("decode-1")
    queue, computing, exposed = expected
    assert ledger.queue_s == pytest.approx(1.0 + queue)
    assert (ledger.prefill_s, ledger.exposed_transfer_s) == pytest.approx((computing, exposed))


def test_without_the_prefill_nodes_times_the_whole_wait_counts_as_exposed() -> None:
    ledger = job(SECOND_NS, 2 * SECOND_NS).ledger("decode-1")
    assert (ledger.queue_s, ledger.prefill_s, ledger.exposed_transfer_s) == pytest.approx((1.0, 0.0, 2.0))
    assert (ledger.prefill_chunks, ledger.early_writes, ledger.last_chunk_writes) == (0, 0, 0)


def test_what_arrived_and_from_whom_is_told() -> None:
    ledger = job(0, SECOND_NS, times(0.1, 0.2)).ledger("decode-1")
    assert (ledger.decode_node, ledger.prefill_node, ledger.provider) == ("decode-1", FIRST.name, "net")
    assert (ledger.writes, ledger.bytes, ledger.attempts) == (6, 600, 1)
    assert (ledger.prefill_chunks, ledger.early_writes, ledger.last_chunk_writes) == (3, 4, 5)


def test_the_first_step_counts_from_the_arrival_and_is_zero_before_the_first_token() -> None:
    made = job(0, SECOND_NS)
    assert made.ledger("decode-1").first_step_s == 0.0
    assert made.arrival is not None
    made.first_token_ns = made.arrival.arrived_ns + SECOND_NS // 4
    assert made.ledger("decode-1").first_step_s == 0.25


def test_a_request_that_ended_without_kv_tells_its_attempts_and_no_times() -> None:
    ledger = job().ledger("decode-1")
    assert (ledger.attempts, ledger.prefill_node, ledger.provider, ledger.writes) == (1, "", "", 0)
    assert ledger.queue_s == ledger.prefill_s == ledger.exposed_transfer_s == ledger.first_step_s == 0.0


def test_a_prompt_that_ran_here_has_a_queue_and_a_prefill() -> None:
    made = job()
    made.started_ns = RECEIVED + SECOND_NS
    made.first_token_ns = RECEIVED + 3 * SECOND_NS
    ledger = made.ledger("decode-1")
    assert (ledger.queue_s, ledger.prefill_s, ledger.exposed_transfer_s) == (1.0, 2.0, 0.0)
