"""The runner of a device with queues and graphs, on a device of the CPU's own: the same answers, however it runs."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.contexts import split
from engine.device_progress import DeviceProgressWord
from engine.device_runner import DeviceRunner, DeviceSizes, Graphs
from engine.forward_batch import ForwardBatch
from engine.models.loading import LoadedModel
from engine.padding import PaddedBatch, Padding
from engine.runner import SampledToken
from protocol.context import NO_CONTEXT, ContextLayout, ContextPart
from protocol.sampling import SamplingParams
from tests.engine.fake_cuda import FakeDriver
from tests.engine.fake_device import ImmediateStreams, StaticAttention, StaticPlanner, record
from tests.engine.runners import GREEDY, Bench, RunSequence, batch, texts
from tests.engine.tiny_models import greedy, prompt_of
from tests.oracle import Oracle
from tests.tiny_model import VOCAB, save_weights

NEW = 6
CPU = torch.device("cpu")
"""Graphs or not, one pair or two."""
WAYS = [(False, 1), (True, 1), (True, 2)]


class DeviceBench(Bench):
    def attention(self, loaded: LoadedModel) -> StaticAttention:
        return StaticAttention(self.cache, torch.float32)

    def runner(
        self,
        graphs: bool,
        pairs: int,
        padding: Padding | None = None,
        resources: ExitStack | None = None,
        context: ContextLayout = NO_CONTEXT,
    ) -> DeviceRunner:
        shapes = padding or self.padding()
        return DeviceRunner(
            self.model,
            [StaticPlanner(self.backend) for _ in range(pairs)],
            ImmediateStreams(),
            DeviceSizes(CPU, torch.float32, VOCAB, shapes.max_tokens, shapes.max_requests),
            Graphs(shapes, record) if graphs else None,
            resources=resources,
            context=context,
        )

    def padding(self) -> Padding:
        return Padding(self.geometry, max_tokens=64, max_requests=6, cache_tokens=10_000, q_interval=16)


Run = Callable[["DeviceBench", DeviceRunner, list[list[int]], SamplingParams], list[list[int]]]


@pytest.fixture
def bench(tiny_llama: Path) -> DeviceBench:
    return DeviceBench(tiny_llama)


def take(sequences: Sequence[RunSequence], runner_result: Sequence[SampledToken | str]) -> None:
    for sequence, token in zip(sequences, runner_result, strict=True):
        sequence.take(token)


def waiting(
    bench: DeviceBench, runner: DeviceRunner, prompts: list[list[int]], params: SamplingParams
) -> list[list[int]]:
    sequences = [bench.sequence(f"w{i}", prompt, params) for i, prompt in enumerate(prompts)]
    for _ in range(NEW):
        take(sequences, runner.launch(batch(*(s.row() for s in sequences))).result().tokens)
    return [s.generated for s in sequences]


def overlapped(
    bench: DeviceBench, runner: DeviceRunner, prompts: list[list[int]], params: SamplingParams
) -> list[list[int]]:
    sequences = [bench.sequence(f"o{i}", prompt, params) for i, prompt in enumerate(prompts)]
    pending = runner.launch(batch(*(s.row() for s in sequences)))
    for _ in range(NEW - 1):
        following = runner.launch(batch(*(s.carried_row(i) for i, s in enumerate(sequences))))
        take(sequences, pending.result().tokens)
        pending = following
    take(sequences, pending.result().tokens)
    return [s.generated for s in sequences]


@pytest.mark.parametrize(("graphs", "pairs"), WAYS)
@pytest.mark.parametrize("run", [waiting, overlapped])
def test_every_way_gives_the_oracles_tokens(
    bench: DeviceBench, tiny_llama: Path, graphs: bool, pairs: int, run: Run
) -> None:
    prompts = [prompt_of(5), prompt_of(13), prompt_of(1)]
    tokens = run(bench, bench.runner(graphs, pairs), prompts, GREEDY)
    assert tokens == [greedy(tiny_llama, prompt, NEW) for prompt in prompts]


def test_decodes_replay_what_the_first_of_each_pair_captured(bench: DeviceBench) -> None:
    runner = bench.runner(graphs=True, pairs=2)
    overlapped(bench, runner, [prompt_of(5), prompt_of(13)], GREEDY)
    assert [(cache.captures, cache.replays) for cache in runner.graph_caches] == [(2, 1), (1, 2)]
    overlapped(bench, runner, [prompt_of(7), prompt_of(11)], GREEDY)
    assert [cache.captures for cache in runner.graph_caches] == [2, 1], "the same shapes again: nothing is recorded"


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(max_new_tokens=NEW, temperature=0.8, top_k=20)])
def test_draws_are_the_same_with_and_without_overlap(bench: DeviceBench, params: SamplingParams) -> None:
    prompts = [prompt_of(5), prompt_of(9)]
    expected = waiting(bench, bench.runner(graphs=False, pairs=1), prompts, params)
    assert overlapped(bench, bench.runner(graphs=True, pairs=2), prompts, params) == expected


def test_penalties_see_the_carried_token(bench: DeviceBench) -> None:
    params = SamplingParams(max_new_tokens=NEW, temperature=0.7, repetition_penalty=1.8, frequency_penalty=1.5)
    prompts = [prompt_of(5), prompt_of(9)]
    expected = waiting(bench, bench.runner(graphs=False, pairs=1), prompts, params)
    assert overlapped(bench, bench.runner(graphs=True, pairs=2), prompts, params) == expected


def test_a_broken_request_voids_its_own_next_token_alone(bench: DeviceBench, tiny_llama: Path) -> None:
    runner = bench.runner(graphs=True, pairs=2)
    broken, fine = bench.sequence("broken", prompt_of(8)), bench.sequence("fine", prompt_of(7))
    broken.past = 4
    first = runner.launch(batch(broken.row(), fine.row()))
    second = runner.launch(batch(fine.carried_row(1), broken.carried_row(0)))
    token, void = second.result().tokens
    assert token == SampledToken(greedy(tiny_llama, prompt_of(7), 2)[1])
    assert isinstance(void, str)
    assert "the token before it is missing" in void
    assert len(texts(first.result())) == 1


def test_a_forward_that_could_not_be_launched_voids_what_follows_from_it(bench: DeviceBench, tiny_llama: Path) -> None:
    runner = bench.runner(graphs=True, pairs=2)
    a, b = bench.sequence("a", prompt_of(6)), bench.sequence("b", prompt_of(9))
    first = runner.launch(batch(replace(a.row(), tables=[[]])))
    second = runner.launch(batch(a.carried_row(0), b.row()))
    with pytest.raises(IndexError):
        first.result()
    assert [type(token) for token in second.result().tokens] == [str, SampledToken]


def test_batches_that_want_nothing_run_without_the_head(bench: DeviceBench) -> None:
    runner = bench.runner(graphs=True, pairs=1)
    sequence = bench.sequence("a", prompt_of(12))
    assert runner.launch(batch(sequence.row(4))).result().tokens == []
    assert runner.launch(batch(sequence.row(1))).result().tokens == []
    assert len(runner.launch(batch(sequence.row())).result().tokens) == 1


def test_inputs_go_in_before_the_forward_and_results_come_out_behind_it(bench: DeviceBench) -> None:
    streams = ImmediateStreams()
    sizes = DeviceSizes(CPU, torch.float32, VOCAB, 64, 6)
    runner = DeviceRunner(bench.model, [StaticPlanner(bench.backend)], streams, sizes)
    runner.launch(batch(bench.sequence("a", prompt_of(12)).row())).result()
    assert streams.used == ["upload", "compute", "download"]
    runner.close()


@pytest.mark.parametrize(("graphs", "pairs"), WAYS)
@pytest.mark.parametrize("run", [waiting, overlapped])
def test_a_devices_word_grows_by_one_for_each_layer_of_each_forward(
    tiny_llama: Path, graphs: bool, pairs: int, run: Run
) -> None:
    """Captured ones too, and with another one in flight; closing the runner gives the word back."""
    driver, resources = FakeDriver(), ExitStack()
    word = resources.enter_context(DeviceProgressWord(driver))
    word.map(0)
    bench = DeviceBench(tiny_llama, progress=word)
    runner = bench.runner(graphs, pairs, resources=resources)
    run(bench, runner, [prompt_of(5), prompt_of(13)], GREEDY)
    layers = sum(len(group.layers) for group in bench.geometry.groups)
    assert word.value == NEW * layers
    runner.close()
    assert driver.api.nothing_left


class WithoutLongest(Padding):
    """The key that was a bug: padded totals alone."""

    def pad(self, batch: ForwardBatch) -> PaddedBatch:
        padded = super().pad(batch)
        return PaddedBatch(padded.batch, padded.key._replace(longest_keys=()))


def last_slices(directory: Path, shapes: type[Padding]) -> dict[int, SampledToken | str]:
    """The first token of a prompt of 900 tokens, then of one of 5000, each beside a short one: equal padded totals."""
    bench = DeviceBench(directory, sequences=4, max_length=5056)
    padding = shapes(bench.geometry, max_tokens=1024, max_requests=4, cache_tokens=100_000)
    runner = bench.runner(graphs=True, pairs=1, padding=padding)
    tokens = {}
    for length in (900, 5000):
        long, short = bench.sequence(f"long{length}", prompt_of(length)), bench.sequence("short", prompt_of(60))
        while length - long.past > 20:
            runner.launch(batch(long.row(min(1000, length - long.past - 20)))).result()
        runner.launch(batch(short.row(40))).result()
        tokens[length], _ = runner.launch(batch(long.row(), short.row())).result().tokens
    return tokens


def test_b05_a_graph_captured_for_short_sequences_is_not_replayed_for_long_ones(tmp_path: Path) -> None:
    """And that is seen: without the longest keys in the graph's key, the answer is wrong."""
    directory = save_weights(tmp_path / "long", max_position_embeddings=8192, num_hidden_layers=1)
    right = {length: SampledToken(greedy(directory, prompt_of(length), 1)[0]) for length in (900, 5000)}
    assert last_slices(directory, Padding) == right
    stale = last_slices(directory, WithoutLongest)
    assert stale[900] == right[900]
    assert stale[5000] != right[5000]


@pytest.mark.parametrize(("graphs", "pairs"), WAYS)
def test_contexts_come_with_the_tokens(tiny_llama: Path, bench: DeviceBench, graphs: bool, pairs: int) -> None:
    """Of one row in the middle of its chunk, beside one that wants none."""
    layout = ContextLayout((ContextPart("hidden", 64 * 4), ContextPart("logits", VOCAB * 4)))
    runner, prompts = bench.runner(graphs, pairs, context=layout), [prompt_of(9, seed=1), prompt_of(5, seed=2)]
    first, second = (bench.sequence(name, prompt) for name, prompt in zip("AB", prompts, strict=True))
    result = runner.launch(batch(replace(first.row(), context=7), second.row())).result()
    (values,) = result.contexts
    for kept, expected in zip(split(layout, values), Oracle(tiny_llama).context(prompts[0]), strict=True):
        torch.testing.assert_close(kept, expected, atol=1e-4, rtol=1e-4)
    take([first, second], result.tokens)
    assert [s.generated for s in (first, second)] == [greedy(tiny_llama, prompt, 1) for prompt in prompts]
    assert runner.launch(batch(first.row(), second.row())).result().contexts == ()
    runner.close()
