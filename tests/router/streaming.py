"""A streaming client for tests: reads events one by one and can leave at any moment."""

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import httpx

from tests.router.running_router import RunningRouter

COMPLETION: dict[str, Any] = {"model": "tiny", "prompt": "Hi", "stream": True}
DONE = "[DONE]"


class EventReader:
    """The events of one open stream. `comments` counts keep-alives passed over so far."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self.comments = 0
        self._lines = response.iter_lines()

    def next_data(self) -> str | None:
        """The data of the next event; None at the end of the stream."""
        for line in self._lines:
            if line.startswith("data: "):
                return line.removeprefix("data: ")
            self.comments += line.startswith(":")
        return None

    def next_comment(self) -> str | None:
        return next((line for line in self._lines if line.startswith(":")), None)

    def next_text(self) -> str:
        data = self.next_data()
        assert data is not None and data != DONE, data
        return str(json.loads(data)["choices"][0]["text"])

    def rest(self) -> list[str]:
        return list(iter(self.next_data, None))


@contextlib.contextmanager
def open_stream(router: RunningRouter, **fields: Any) -> Iterator[EventReader]:
    """Leaving the block closes the connection, as a client that goes away does."""
    with (
        httpx.Client(base_url=router.url, timeout=10, trust_env=False, verify=False) as http,
        http.stream("POST", "/v1/completions", json={**COMPLETION, **fields}) as response,
    ):
        yield EventReader(response)
