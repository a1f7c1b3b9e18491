"""From a request to its text: runs it, shows what may be shown, and books exactly one outcome."""

import logging
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType

from protocol.gates import Gates
from protocol.ledger import Ledger
from protocol.logs import event
from router.choices import Choices, Progress
from router.dispatch import Dispatcher
from router.metrics import Metrics, Outcome
from router.run import Run
from router.text_output import TextOutput
from router.token_request import ChoiceDone, Ended, Idle, Restarted, Times, TokenRequest, Tokens
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
    choice: int
    text: str


@dataclass(frozen=True, slots=True)
class TextChoiceEnded:
    """One choice of several is complete, and others are not. `finish_reason`: "stop" or "length"."""

    choice: int
    finish_reason: str


@dataclass(frozen=True, slots=True)
class TextEnded:
    """The choice that ended last, and the request with it. `completion_tokens`: of all choices. `ledger` None: nobody
    asked, or the node sent none in time."""

    choice: int
    finish_reason: str
    completion_tokens: int
    ledger: Ledger | None
    times: Times


TextEvent = TextDelta | TextChoiceEnded | Restarted | Idle | TextEnded


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
        choices = self._choices(request)
        with _Booking(self._dispatcher.metrics, run):
            async with run:
                async for said in run:
                    if isinstance(said, Restarted):
                        choices = self._choices(request)
                    if isinstance(said, Restarted | Idle):
                        yield said
                        continue
                    progress = choices.take(said)
                    for told in self._told(request, run, choices, progress):
                        yield told
                    if choices.over:
                        yield await self._end(request, run, choices, progress, said)
                        return
                    await self._gates.wait_async(f"stream:tok={choices.tokens}")

    def _choices(self, request: TextRequest) -> Choices:
        stop_tokens = request.token_request.sampling.stop_token_ids
        return Choices(request.token_request.n, lambda: TextOutput(self._tokenizer, request.stops, stop_tokens))

    def _told(
        self, request: TextRequest, run: Run, choices: Choices, progress: Progress
    ) -> Iterator[TextDelta | TextChoiceEnded]:
        """A choice that ended by a stop string ends on its node, too."""
        if progress.text or progress.finish_reason:
            run.tokens_shown = request.shows_text_early
        if progress.text:
            yield TextDelta(progress.choice, progress.text)
        if progress.finish_reason and not choices.over:
            run.stop_choice(progress.choice)
            yield TextChoiceEnded(progress.choice, progress.finish_reason)

    async def _end(
        self, request: TextRequest, run: Run, choices: Choices, last: Progress, said: Tokens | ChoiceDone | Ended
    ) -> TextEnded:
        ledger = None
        if isinstance(said, Ended):
            ledger = said.ledger
        elif request.wants_ledger:
            ledger = await run.stop()
        return TextEnded(last.choice, last.finish_reason, choices.tokens, ledger, run.times)


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
