"""From a request to its text: runs it, shows what may be shown, and books exactly one outcome."""

import logging
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from types import TracebackType

from protocol.gates import Gates
from protocol.logs import event
from protocol.messages import FinishReason, Ledger
from router.dispatch import Dispatcher
from router.metrics import Metrics, Outcome
from router.run import Run
from router.text_output import TextOutput
from router.token_request import Ended, Idle, Restarted, Times, TokenRequest, Tokens
from router.tokenizer import Tokenizer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TextRequest:
    """`shows_text_early`: the client sees text as it comes, so the first piece ends all hope of a second attempt."""

    token_request: TokenRequest
    stops: Sequence[str]
    shows_text_early: bool
    wants_ledger: bool


@dataclass(frozen=True, slots=True)
class TextDelta:
    text: str


@dataclass(frozen=True, slots=True)
class TextEnded:
    """`finish_reason`: "stop" or "length". `ledger` None: nobody asked, or the node sent none in time."""

    finish_reason: str
    completion_tokens: int
    ledger: Ledger | None
    times: Times


TextEvent = TextDelta | Restarted | Idle | TextEnded


class TextGenerator:
    """`idle_s`: silence after which Idle is said. `gates`: the tests' pause points."""

    def __init__(self, dispatcher: Dispatcher, tokenizer: Tokenizer, idle_s: float, gates: Gates) -> None:
        self._dispatcher = dispatcher
        self._tokenizer = tokenizer
        self._idle_s = idle_s
        self._gates = gates

    def check_room(self) -> None:
        """Raises RequestFailed where a request would be refused because so many wait: ask before any work for it."""
        self._dispatcher.queue.check_room()

    async def generate(self, request: TextRequest) -> AsyncGenerator[TextEvent, None]:
        """Ends with TextEnded, or raises RequestFailed. Closing it earlier aborts the request."""
        run = Run(self._dispatcher, request.token_request, self._idle_s)
        output = self._output(request)
        with _Booking(self._dispatcher.metrics, run):
            async with run:
                async for said in run:
                    if isinstance(said, Restarted):
                        output = self._output(request)
                    if isinstance(said, Restarted | Idle):
                        yield said
                        continue
                    text = output.feed(said.ids) if isinstance(said, Tokens) else output.finish()
                    if text:
                        run.tokens_shown = request.shows_text_early
                        yield TextDelta(text)
                    if isinstance(said, Ended) or output.stopped:
                        yield await self._end(request, run, output, said)
                        return
                    await self._gates.wait_async(f"stream:tok={output.tokens}")

    def _output(self, request: TextRequest) -> TextOutput:
        return TextOutput(self._tokenizer, request.stops, request.token_request.sampling.stop_token_ids)

    async def _end(self, request: TextRequest, run: Run, output: TextOutput, said: Tokens | Ended) -> TextEnded:
        if isinstance(said, Ended):
            reason = "length" if said.reason is FinishReason.LENGTH and not output.stopped else "stop"
            return TextEnded(reason, output.tokens, said.ledger, run.times)
        ledger = await run.stop() if request.wants_ledger else None
        return TextEnded("stop", output.tokens, ledger, run.times)


class _Booking:
    """The books of one request, around its whole run."""

    def __init__(self, metrics: Metrics, run: Run) -> None:
        self._metrics = metrics
        self._run = run

    def __enter__(self) -> None:
        self._metrics.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        outcome = self._outcome(kind)
        self._metrics.end(outcome)
        request, times = self._run.request, self._run.times
        ttft = times.first_token - times.received if times.first_token else None
        if ttft is not None:
            self._metrics.ttft.observe(ttft)
        reason = str(error) if outcome in (Outcome.FAILED, Outcome.CUT) else None
        event(
            log,
            "request ended",
            request=request.key,
            public_id=request.public_id,
            outcome=outcome.value,
            reason=reason,
            prompt_tokens=len(request.prompt),
            ttft_s=ttft,
            total_s=self._run.now() - times.received,
        )

    def _outcome(self, kind: type[BaseException] | None) -> Outcome:
        if kind is None:
            return Outcome.OK
        if issubclass(kind, Exception):
            return Outcome.CUT if self._run.tokens_shown else Outcome.FAILED
        return Outcome.CANCELLED
