"""Admission with a scripted messenger and a small engine without a model: everything by hand, on one thread."""

import time
from collections.abc import Sequence
from typing import Any

from decode_node.admission import Admission
from kv_messenger.attempts import Arrival, Fetch
from protocol.gates import Gates
from protocol.messages import (
    ChoiceEnded,
    DecodeRequest,
    Failure,
    FailureCode,
    FinishReason,
    Message,
    PrefillAddress,
    RequestEnded,
    TokenDelta,
)
from protocol.sampling import SamplingParams
from protocol.ticket import TransferKey
from tests.engine.traces import TOKEN, Emit, Harness

FIRST, SECOND = (PrefillAddress(f"instance-{i}", f"prefill-{i}", f"tcp://127.0.0.1:{5000 + i}") for i in (1, 2))
INSTANCE = "decode-instance"
PAGE = 4


class ScriptedSource:
    """Takes note of what admission asks; the test plays the network."""

    def __init__(self) -> None:
        self.fetches: list[Fetch] = []
        self.aborts: list[tuple[TransferKey, Failure | None]] = []

    def fetch(self, fetch: Fetch) -> None:
        self.fetches.append(fetch)

    def abort(self, key: TransferKey, failure: Failure | None) -> None:
        self.aborts.append((key, failure))


class Desk:
    """`blocks`: of PAGE tokens each. Every answer goes to `replies`."""

    def __init__(
        self,
        blocks: int = 64,
        *,
        local: bool = False,
        max_queue: int = 64,
        gates: Gates | None = None,
        sharing: bool = False,
        emit: Emit = lambda _id, _position: TOKEN,
        ends: tuple[int, ...] = (),
    ) -> None:
        self.harness = Harness(num_blocks=blocks, sharing=sharing, emit=emit, eos=ends)
        self.engine = self.harness.engine
        self.source = ScriptedSource()
        self.replies: list[Message] = []
        self.admission = Admission(
            self.engine,
            self.source,
            self.replies.append,
            gates or Gates(),
            instance=INSTANCE,
            name="decode-1",
            local_prefill=local,
            max_queue=max_queue,
        )

    # ---- the router ----

    def ask(
        self,
        name: str,
        tokens: int = 9,
        *,
        new: int = 3,
        n: int = 1,
        attempts: int = 0,
        prefills: Sequence[PrefillAddress] = (FIRST,),
        deadline_s: float = 60.0,
        **sampling: Any,
    ) -> None:
        self.admission.accept(
            DecodeRequest(
                request=name,
                public_id=f"public {name}",
                prompt=list(range(2, 2 + tokens)),
                sampling=SamplingParams(max_new_tokens=new, **sampling),
                deadline_s=deadline_s,
                prefills=list(prefills),
                n=n,
                attempts=attempts,
            )
        )

    def ends(self, name: str) -> list[RequestEnded]:
        return [reply for reply in self.replies if isinstance(reply, RequestEnded) and reply.request == name]

    def end(self, name: str) -> RequestEnded:
        (end,) = self.ends(name)
        return end

    def code(self, name: str) -> FailureCode:
        failure = self.end(name).failure
        assert failure is not None
        return failure.code

    def tokens(self, name: str, choice: int = 0) -> list[int]:
        deltas = [reply for reply in self.replies if isinstance(reply, TokenDelta)]
        return [t for delta in deltas if (delta.request, delta.choice) == (name, choice) for t in delta.tokens]

    def choices_ended(self, name: str) -> dict[int, FinishReason]:
        """Before the request itself."""
        ends = [reply for reply in self.replies if isinstance(reply, ChoiceEnded) and reply.request == name]
        assert len({end.choice for end in ends}) == len(ends), "a choice ended twice"
        return {end.choice: end.reason for end in ends}

    # ---- the messenger ----

    @property
    def asked(self) -> list[str]:
        """What was fetched so far, in order, as `request#attempt`."""
        return [str(fetch.key) for fetch in self.source.fetches]

    def fetch(self, name: str) -> Fetch:
        """The last one of this request."""
        return [fetch for fetch in self.source.fetches if fetch.key.request == name][-1]

    def arrive(self, name: str) -> None:
        self.admission.kv_arrived(Arrival(self.fetch(name).key, 4, 4096, time.monotonic_ns(), "net"))

    def fail(self, name: str, code: FailureCode = FailureCode.TRANSFER_FAILED) -> None:
        self.admission.kv_failed(self.fetch(name).key, Failure(code, f"it is {code.value}"))

    def safe(self, name: str, attempt: int | None = None) -> None:
        key = self.fetch(name).key
        self.admission.pages_safe(TransferKey(name, attempt or key.attempt, INSTANCE))

    # ---- the engine ----

    def run(self) -> None:
        """Until a step would do nothing."""
        while self.engine.has_work:
            self.step()

    def step(self) -> None:
        self.admission.on_step(self.engine.step())
        self.engine.check()

    def owned(self, name: str, attempt: int = 1) -> set[tuple[int, str]]:
        """(block, state) of every block that this attempt has."""
        return {
            (entry["block"], entry["state"])
            for entry in self.engine.ledger()
            if (entry["owner"], entry["generation"]) == (name, attempt)
        }

    def assert_at_rest(self) -> None:
        self.run()
        assert (self.admission.jobs, self.admission.waiting) == (0, 0)
        self.harness.assert_at_rest()
