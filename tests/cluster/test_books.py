"""A hundred requests, a third of them cancelled at random moments: afterwards everything is as it was before."""

import os
import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event

from tests.cluster.exchange import text_of
from tests.cluster.harness import ProcessCluster
from tests.cluster.oracle import Oracle
from tests.cluster.waiting import eventually

REQUESTS = 100
AT_ONCE = 8
PROMPTS = [f"{i} prompt of its own length" + " and more of it" * (i * 3) for i in range(8)]
MAX_TOKENS = 32
IDLE_S = 5.0
"""Long enough to count ticks of 10 ms."""
HELD = ("pages_free", "pages_quarantined", "transfers", "transfer_slots_free", "peers", "requests", "prefill_links")
FABRIC_HELD = ("outstanding", "armed", "expectations", "endpoints", "regions")
STEADY_S = 20.0
POOL = min(32, (os.cpu_count() or 1) + 4)
"""Threads of a ThreadPoolExecutor, by its documentation."""
Resources = dict[str, dict[str, float]]
OUTCOME = 'router_requests_ended_total{outcome="%s"}'


@dataclass(frozen=True)
class Plan:
    """What one client does. `leaves_after`: so many events (0: at once), or never."""

    prompt: str
    max_tokens: int
    stream: bool
    leaves_after: int | None


def random_plan(rng: random.Random, leaves: bool) -> Plan:
    stream = rng.random() < 0.5
    moment = rng.randrange(10) if stream else 0
    return Plan(rng.choice(PROMPTS), rng.randint(1, MAX_TOKENS), stream, moment if leaves else None)


def carry_out(cluster: ProcessCluster, oracle: Oracle, plan: Plan) -> None:
    with cluster.ask(plan.prompt, plan.max_tokens, plan.stream) as asked:
        if plan.leaves_after is None:
            said = text_of(list(asked.events())) if plan.stream else asked.text()
            assert said == oracle.completion(plan.prompt, plan.max_tokens).text
        elif plan.leaves_after > 0:
            for _ in zip(range(plan.leaves_after), asked.events(), strict=False):
                continue


def fill_thread_pool(cluster: ProcessCluster) -> None:
    """The router encodes prompts on asyncio's pool of threads, which grows on demand and stays. Requests that stand at
    a gate keep one each, and the gate's client has one."""
    router = cluster.router.id.pid
    full = cluster.router_threads_at_start + POOL + 1
    with cluster.held("stream:tok=1", "router"), ExitStack() as asked:
        for _ in range(POOL + 1):
            asked.enter_context(cluster.ask("Hi", 2))
        eventually(lambda: _of_process(router)["threads"] >= full, "the router's thread pool is full")


def carry_out_all(cluster: ProcessCluster, oracle: Oracle, plans: list[Plan]) -> None:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for done in [pool.submit(carry_out, cluster, oracle, plan) for plan in plans]:
            done.result()
    cluster.wait_at_rest()


def resources(cluster: ProcessCluster) -> Resources:
    """Of every process: descriptors, threads, and what a node holds."""
    return {name: _of_process(pid) | _of_node(cluster, name) for name, pid in cluster.pids().items()}


def _of_process(pid: int) -> dict[str, float]:
    return {"fds": len(os.listdir(f"/proc/{pid}/fd")), "threads": len(os.listdir(f"/proc/{pid}/task"))}


def _of_node(cluster: ProcessCluster, name: str) -> dict[str, float]:
    metrics = cluster.metrics(name)
    held = {gauge: metrics[gauge] for gauge in HELD if gauge in metrics}
    return held | {gauge: metrics[f"fabric_{gauge}"] for gauge in FABRIC_HELD if name != "router"}


def steady(cluster: ProcessCluster, until: Resources | None = None) -> Resources:
    """Once they do not change from one look to the next; the last look, if they never become what is waited for."""
    seen = [resources(cluster)]

    def look() -> bool:
        seen.append(resources(cluster))
        return seen[-1] == (until or seen[-2])

    with suppress(AssertionError):
        eventually(look, "resources are steady", STEADY_S)
    return seen[-1]


def test_afterwards_every_page_slot_socket_thread_and_region_is_back(
    cluster: ProcessCluster, oracle: Oracle, seed: int
) -> None:
    """Must-hold 6, P11, P46. The warm-up opens the connections and threads that stay."""
    rng = random.Random(seed)
    for prompt in PROMPTS:
        oracle.completion(prompt, MAX_TOKENS)
    fill_thread_pool(cluster)
    carry_out_all(cluster, oracle, [random_plan(rng, leaves=False) for _ in range(24)])
    before, books = steady(cluster), cluster.metrics("router")
    leavers = set(rng.sample(range(REQUESTS), REQUESTS // 3))
    carry_out_all(cluster, oracle, [random_plan(rng, leaves=i in leavers) for i in range(REQUESTS)])
    assert steady(cluster, until=before) == before
    now = cluster.metrics("router")
    ended = {name: now.get(OUTCOME % name, 0) - books.get(OUTCOME % name, 0) for name in ("ok", "cancelled")}
    assert sum(ended.values()) == now["router_requests_started_total"] - books["router_requests_started_total"]
    assert ended["ok"] >= REQUESTS - len(leavers) and ended["cancelled"] > 0
    assert not any(now.get(OUTCOME % name) for name in ("failed", "cut"))


def test_an_idle_cluster_uses_almost_no_processor(cluster: ProcessCluster) -> None:
    """Must-hold 6: heartbeats and nothing else; counted in ticks, per process."""
    pids = cluster.pids()
    before = {name: cpu_ticks(pid) for name, pid in pids.items()}
    Event().wait(IDLE_S)
    used = {name: cpu_ticks(pid) - before[name] for name, pid in pids.items()}
    limit = 0.03 * IDLE_S * os.sysconf("SC_CLK_TCK")
    assert max(used.values()) <= limit, used


def cpu_ticks(pid: int) -> int:
    """utime + stime of the whole process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])
