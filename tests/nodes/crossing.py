"""Prompts sent from one node of a cluster to another: nodes of any shape, and KV that either holds beforehand.

Workers take seconds to start, requests hardly any time. So one cluster has a node of each shape, and any of its prefill
nodes together with any of its decode nodes is a `Crossing`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from protocol.ledger import Ledger
from protocol.sampling import SamplingParams
from tests.nodes.pair import Cluster, OpenFabric, Shape
from tests.nodes.router_stub import Answer
from tests.oracle import Oracle

NEW = 3


@dataclass(frozen=True)
class Facts:
    """Of a model's KV. `parts`: K and V."""

    layers: int
    heads: int
    parts: int = 2


@dataclass(frozen=True)
class Held:
    """A prompt of `length` tokens, and how many of its first tokens either node has had the KV of. Of those it has kept
    whole pages."""

    length: int
    on_prefill: int
    on_decode: int

    @property
    def moved(self) -> int:
        """Tokens whose KV the decode node needs: the last one is its own to run."""
        return self.length - 1


HELD = {
    "nothing": Held(150, 0, 0),
    "decode": Held(150, 0, 100),
    "prefill": Held(150, 100, 0),
    "both": Held(150, 100, 100),
    "both, decode more": Held(150, 20, 130),
    "both, prefill more": Held(150, 140, 70),
    "prefill, whole": Held(129, 128, 0),
    "decode, whole": Held(129, 0, 128),
}


def start_nodes(model: Path, open_fabric: OpenFabric, sources: Sequence[Shape], targets: Sequence[Shape]) -> Cluster:
    cluster = Cluster(model, open_fabric, sources[0])
    for source in sources:
        cluster.add_prefill(source)
    for target in targets:
        cluster.add_decode(shape=target)
    return cluster.start(prefill=0, decode=0)


class Crossing:
    """From prefill node `source` to decode node `target`, by number. The cluster has another node of either role: what
    is held on one side only was learnt through it."""

    def __init__(self, cluster: Cluster, oracle: Oracle, facts: Facts, source: int, target: int) -> None:
        self._cluster = cluster
        self._oracle = oracle
        self._facts = facts
        self._prefill, self._decode = f"prefill-{source}", f"decode-{target}"
        self._other_prefill, self._other_decode = f"prefill-{int(not source)}", f"decode-{int(not target)}"
        self._source, self._target = (cluster.shapes[name] for name in (self._prefill, self._decode))

    def expect_all(self, prompts: Sequence[list[int]]) -> None:
        """At once, of prompts that are new to both nodes: every token right, and no write too many or too few."""
        counted = self._counted()
        asked = [self._ask(prompt, self._prefill, self._decode) for prompt in prompts]
        ledgers = [self._expect_tokens(prompt, answer) for prompt, answer in zip(prompts, asked, strict=True)]
        expected = [self.writes(len(prompt) - 1) for prompt in prompts]
        assert [ledger.writes for ledger in ledgers] == expected
        assert self._counted() - counted == sum(expected)
        self._cluster.wait_pages_returned()

    def expect_lacking(self, held: Held, prompt: list[int]) -> None:
        """Of a prompt that is new to the cluster: only what the decode node lacks crosses, by the fabric's own count,
        and only what the prefill node lacks is computed."""
        self._learn(held, prompt)
        counted, computed = self._counted(), self._computed()
        ledger = self._run(prompt, self._prefill, self._decode)
        first = _whole(held.on_decode, self._target.page_size)
        asked = first < held.moved
        writes = self.writes(held.moved, first) if asked else 0
        assert (ledger.writes, self._counted() - counted) == (writes, writes)
        assert ledger.prefill_node == (self._prefill if asked else "")
        lacking = held.moved - _whole(held.on_prefill, self._source.page_size)
        assert self._computed() - computed == (lacking if asked else 0)

    def writes(self, tokens: int, first: int = 0) -> int:
        """For the KV of tokens [first, tokens), from the shapes alone."""
        source, target, facts = self._source, self._target, self._facts
        stretches = runs(source.page_size, target.page_size, tokens, first) * facts.layers
        held_by = [heads_of(rank, target.tp, facts.heads) for rank in range(target.tp)]
        if source.page_size != target.page_size:
            return stretches * facts.parts * sum(len(heads) for heads in held_by)
        return stretches * sum(len({head * source.tp // facts.heads for head in heads}) for heads in held_by)

    def _learn(self, held: Held, prompt: list[int]) -> None:
        """One token more is asked for than is to be held: the decode node that it goes to runs that one itself."""
        if held.on_prefill:
            self._run(prompt[: held.on_prefill + 1], self._prefill, self._other_decode)
        if held.on_decode:
            self._run(prompt[: held.on_decode + 1], self._other_prefill, self._decode)

    def _run(self, prompt: list[int], prefill: str, decode: str) -> Ledger:
        """Returns once both nodes are at rest, so that their counters stand still."""
        ledger = self._expect_tokens(prompt, self._ask(prompt, prefill, decode))
        self._cluster.wait_pages_returned()
        return ledger

    def _ask(self, prompt: list[int], prefill: str, decode: str) -> Answer:
        router = self._cluster.router
        prefills = [address for address in router.prefills() if address.name == prefill]
        sampling = SamplingParams(max_new_tokens=NEW)
        return router.ask(prompt, sampling, decode=router.instance_of(decode), prefills=prefills)[1]

    def _expect_tokens(self, prompt: list[int], answer: Answer) -> Ledger:
        end = answer.result()
        assert end.failure is None and answer.tokens == self._oracle.greedy(prompt, NEW), (len(prompt), end)
        assert end.ledger.attempts == 1
        return end.ledger

    def _counted(self) -> int:
        return self._cluster.fabrics[self._decode].counters().immediates_counted

    def _computed(self) -> int:
        return sum(engine.counters.prompt_tokens for engine in self._cluster.engines[self._prefill])


def runs(source_page: int, target_page: int, tokens: int, first: int = 0) -> int:
    """Stretches of tokens that no page of either side cuts."""
    cuts = {position for position in range(first, tokens) if not position % source_page or not position % target_page}
    return len(cuts | {first})


def heads_of(rank: int, ranks: int, heads: int) -> range:
    """Of a model's heads those that a rank has: a share, or with fewer heads than ranks the one that it has copied."""
    first = rank * heads // ranks
    return range(first, max(first + 1, (rank + 1) * heads // ranks))


def _whole(tokens: int, page: int) -> int:
    """Of tokens those in complete pages."""
    return tokens // page * page
