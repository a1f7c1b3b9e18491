"""After an attempt has failed: whether another follows, and with whom; if none does, what the router is told."""

from decode_node.job import Job
from protocol.messages import Failure, FailureCode

MAX_ATTEMPTS = 4
"""After so many no prefill node is asked a second time; each one is asked once."""
_TRY_SAME_PEER_AGAIN = frozenset({FailureCode.STALE_PEER, FailureCode.TRANSFER_FAILED})
_GIVE_UP = frozenset({FailureCode.INVALID, FailureCode.TOO_LONG, FailureCode.DEADLINE})


def may_retry(job: Job, failure: Failure) -> bool:
    """Its last peer comes back to the end of its list, where that may help."""
    if failure.code in _GIVE_UP:
        return False
    few = job.attempt - job.request.attempts < MAX_ATTEMPTS
    if few and failure.code in _TRY_SAME_PEER_AGAIN and job.peer is not None:
        job.untried.append(job.peer)
    return bool(job.untried)


def final_failure(job: Job, failure: Failure) -> Failure:
    """What the router is told when no prefill node is left to ask: if none of them goes with this node, another decode
    node may do better."""
    if failure.code in _GIVE_UP or failure.code is FailureCode.OVERLOADED:
        return failure
    code = FailureCode.INCOMPATIBLE if job.failures == {FailureCode.INCOMPATIBLE} else FailureCode.NO_PREFILL
    attempts = f"{job.attempt} attempt{'s' * (job.attempt != 1)}"
    message = f"no prefill node left after {attempts}: {failure.message}"
    return Failure(code, message[:1000])
