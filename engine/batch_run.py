"""Generates for every line of a batch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from engine.batch_file import LineId, output_line, read_line, refused_line
from engine.batch_results import OrderedLines
from engine.errors import InvalidRequest, LoopStopped, RequestRefused
from engine.generation_output import GenerationOutput
from engine.live_requests import sequence_ids
from engine.manager import ContinuousBatchingManager
from engine.model_tokenizer import ModelTokenizer
from engine.request import RequestStatus

REFRESH_S = 0.5
"""Between two looks at whether to stop, and two reports of progress, at most."""


@dataclass
class Totals:
    """`lines`: done, well or not. `failed`: sequences without a whole result, and lines that could not be read."""

    lines: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    tokens: int = 0


class Place(NamedTuple):
    """Where the result of a sequence belongs. `id`: as the line spells it."""

    line: int
    slot: int
    id: LineId


class BatchRun:
    """Used once. `defaults`: sampling parameters of lines that have none. `window`: lines under way at once, enough to
    keep the engine's batches full. `interrupted`: asked every now and then; once true, no line is begun or waited for.
    """

    def __init__(
        self,
        manager: ContinuousBatchingManager,
        tokenizer: ModelTokenizer,
        output: OrderedLines,
        defaults: Mapping[str, Any],
        window: int,
        interrupted: Callable[[], bool],
    ) -> None:
        self.totals = Totals()
        self._manager = manager
        self._tokenizer = tokenizer
        self._output = output
        self._defaults = defaults
        self._window = window
        self._interrupted = interrupted
        self._places: dict[str, Place] = {}
        """Of each sequence that is under way."""
        self._used_ids: set[str] = set()
        self._slots = 0

    def run(self, lines: Sequence[bytes], on_progress: Callable[[Totals], None]) -> None:
        """Empty lines are skipped. Every other one has its results or its error in the output, those excepted that an
        interruption cut off."""
        for number, line in enumerate(lines, 1):
            if line.strip():
                self._collect(on_progress, at_most=self._window - 1)
                self._begin(number, line)
        self._collect(on_progress, at_most=0)
        while output := self._manager.get_result(timeout_s=0):
            self._finish(output)
        self._output.write_early()
        on_progress(self.totals)

    def _collect(self, on_progress: Callable[[Totals], None], at_most: int) -> None:
        """Until no more are under way."""
        while len(self._places) > at_most and not self._interrupted():
            output = self._manager.get_result(timeout_s=REFRESH_S)
            if output is not None:
                self._finish(output)
            on_progress(self.totals)

    def _begin(self, number: int, line: bytes) -> None:
        if self._interrupted():
            return
        try:
            self._submit(number, line)
        except (RequestRefused, LoopStopped) as error:
            self.totals.lines += 1
            self.totals.failed += 1
            self._output.put(self._slots, refused_line(number, line, str(error)))
            self._slots += 1

    def _submit(self, number: int, line: bytes) -> None:
        given, wanted = read_line(number, line, self._defaults, self._tokenizer)
        own = str(given)
        names = sequence_ids(wanted.as_request(own))
        for name in names:
            if name in self._used_ids:
                further = "" if name == own else f", of a further sequence of {own!r},"
                raise InvalidRequest(f"the id {name!r}{further} belongs to an earlier line")
        self._manager.submit(wanted)
        self._used_ids.update(names)
        for name in names:
            self._places[name] = Place(number, self._slots, given if name == own else name)
            self._slots += 1

    def _finish(self, output: GenerationOutput) -> None:
        number, slot, given = self._places.pop(output.request_id)
        self._output.put(slot, output_line(number, given, output, self._tokenizer))
        self.totals.tokens += len(output.generated_ids)
        self.totals.failed += output.status is not RequestStatus.FINISHED
        if not any(place.line == number for place in self._places.values()):
            self.totals.lines += 1
            self.totals.prompt_tokens += len(output.prompt_ids)
