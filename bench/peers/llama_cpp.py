"""llama.cpp's server, inside a process of its own (xllamacpp), on the 4-bit weights; KV in its default, float16."""

import queue
import threading
from typing import Any

import xllamacpp

from bench.peers.lines import Prompt, Settings, serve
from bench.peers.stepping import Progress, SteppedPeer

WAIT_S = 1.0
ANY_SLOT = -1


class LlamaCpp:
    """A slot for each request of the largest batch. A prompt goes to the free slot that has most of it already."""

    def __init__(self, settings: Settings) -> None:
        params = xllamacpp.CommonParams()
        params.model.path = settings.gguf
        params.n_parallel = settings.max_requests
        params.n_ctx = settings.max_requests * settings.max_context
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = settings.threads
        params.fit_params = False
        params.cache_ram_mib = 0
        self._server = xllamacpp.Server(params)
        self._told: queue.SimpleQueue[Progress | str] = queue.SimpleQueue()
        self._held: dict[int, Prompt] = {slot: [] for slot in range(settings.max_requests)}
        self._slots: dict[str, int] = {}
        self._goals: dict[str, int] = {}

    def submit(self, request: str, prompt: Prompt, new: int) -> None:
        slot = self._slots[request] = self._choose(prompt)
        self._goals[request] = new
        order = {"prompt": prompt, "n_predict": new, "id_slot": slot, "temperature": 0.0}
        order |= {"stream": True, "ignore_eos": True, "cache_prompt": True, "timings_per_token": True}
        threading.Thread(target=self._generate, args=(request, order), daemon=True).start()

    def progress(self) -> list[Progress]:
        try:
            told = [self._told.get(timeout=WAIT_S)]
        except queue.Empty:
            return []
        while not self._told.empty():
            told.append(self._told.get())
        return [self._heard(word) for word in told]

    def close(self) -> None:
        del self._server

    def _choose(self, prompt: Prompt) -> int:
        """-1: none is free, the server is to decide."""
        free = [slot for slot in self._held if slot not in self._slots.values()]
        if not free:
            return ANY_SLOT
        slot = max(free, key=lambda slot: (_common(self._held[slot], prompt), not self._held[slot]))
        self._held[slot] = prompt
        return slot

    def _heard(self, word: Progress | str) -> Progress:
        if isinstance(word, str):
            raise RuntimeError(f"llama.cpp: {word}")
        if word.tokens >= self._goals[word.request]:
            del self._goals[word.request], self._slots[word.request]
        return word

    def _generate(self, request: str, order: dict[str, Any]) -> None:
        """Its own thread: the call returns when the request has ended."""
        told = 0

        def hear(chunk: dict[str, Any]) -> None:
            nonlocal told
            # Text is held back until its characters are whole, so tokens are counted by the server's own figure.
            count = chunk.get("timings", {}).get("predicted_n", 0)
            if told < count < order["n_predict"]:
                told = count
                self._told.put(Progress(request, count))
            elif "error" in chunk:
                self._told.put(str(chunk["error"]))

        try:
            self._server.handle_completions(order, hear)
        except RuntimeError as error:
            self._told.put(str(error))
        self._told.put(Progress(request, order["n_predict"]))


def _common(one: Prompt, other: Prompt) -> int:
    """Length of the beginning that they share."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


if __name__ == "__main__":
    serve(lambda settings: SteppedPeer(LlamaCpp(settings)))
