"""A hundred requests, a third of them cancelled at random moments: afterwards everything is as it was before."""

import os
import random
from contextlib import ExitStack, suppress
from pathlib import Path
from threading import Event, Semaphore

import psutil
import pytest

from tests.cluster.churn import Churn, plans
from tests.cluster.harness import ProcessCluster
from tests.cluster.oracle import Oracle
from tests.cluster.waiting import DEADLINE_S, eventually

REQUESTS = 100
KILLS = 5
BETWEEN_KILLS = 50
TWINS = ("prefill-0", "prefill-1")
DECODES = ("decode-0", "decode-1")
IDLE_S = 5.0
"""Long enough to count ticks of 10 ms."""
HELD = ("pages_free", "pages_quarantined", "transfers", "transfer_slots_free", "peers", "requests", "prefill_links")
FABRIC_HELD = ("outstanding", "armed", "expectations", "endpoints", "regions")
STEADY_S = 20.0
POOL = min(32, (os.cpu_count() or 1) + 4)
"""Threads of a ThreadPoolExecutor, by its documentation."""
Resources = dict[str, dict[str, float]]
OUTCOME = 'router_requests_ended_total{outcome="%s"}'


def fill_thread_pool(cluster: ProcessCluster) -> None:
    """The router encodes prompts on asyncio's pool of threads, which grows on demand and stays. Requests that stand at
    a gate keep one each, and the gate's client has one."""
    router = cluster.router.id.pid
    full = cluster.router_threads_at_start + POOL + 1
    with cluster.held("stream:tok=1", "router"), ExitStack() as asked:
        for _ in range(POOL + 1):
            asked.enter_context(cluster.ask("Hi", 2))
        eventually(lambda: _of_process(router)["threads"] >= full, "the router's thread pool is full")


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


def expect_books(before: dict[str, float], now: dict[str, float], requests: int, leavers: int) -> None:
    """I5, I7: of those who stayed each got its answer, and every request that was begun has ended."""
    ended = {name: now.get(OUTCOME % name, 0) - before.get(OUTCOME % name, 0) for name in ("ok", "cancelled")}
    assert sum(ended.values()) == now["router_requests_started_total"] - before["router_requests_started_total"]
    assert ended["ok"] >= requests - leavers and ended["cancelled"] > 0
    for name in ("failed", "cut"):
        assert now.get(OUTCOME % name, 0) == before.get(OUTCOME % name, 0), name


def test_afterwards_every_page_slot_socket_thread_and_region_is_back(
    cluster: ProcessCluster, oracle: Oracle, seed: int
) -> None:
    """P11, P46. The warm-up opens the connections and threads that stay."""
    rng, churn = random.Random(seed), Churn(cluster, oracle)
    fill_thread_pool(cluster)
    churn.carry_out(plans(rng, 24, 0))
    before, books = steady(cluster), cluster.metrics("router")
    churn.carry_out(plans(rng, REQUESTS, REQUESTS // 3))
    assert steady(cluster, until=before) == before
    expect_books(books, cluster.metrics("router"), REQUESTS, REQUESTS // 3)


def connect_all(cluster: ProcessCluster, churn: Churn, rng: random.Random) -> None:
    """Until every decode node knows every prefill node."""

    def connected() -> bool:
        churn.carry_out(plans(rng, 16, 0))
        return all(cluster.metrics(name)["peers"] == len(TWINS) for name in DECODES)

    eventually(connected, "everybody knows everybody", 2 * DEADLINE_S)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_three_hundred_requests_and_kills_of_the_prefill_nodes_leave_nothing(
    cluster: ProcessCluster, oracle: Oracle, seed: int
) -> None:
    """A third is cancelled at random gates and moments; a prefill node is killed five times, now this one, now that,
    and comes back. It costs nobody an answer, and everything is back at its starting number."""
    done = Semaphore(0)
    rng, churn = random.Random(seed), Churn(cluster, oracle, done.release)
    cluster.add("prefill", "prefill-1")
    cluster.wait_ready(*TWINS)
    fill_thread_pool(cluster)
    connect_all(cluster, churn, rng)
    before, books = steady(cluster), cluster.metrics("router")
    while done.acquire(blocking=False):
        continue

    def kill_and_restart() -> None:
        for kill in range(KILLS):
            for _ in range(BETWEEN_KILLS):
                assert done.acquire(timeout=2 * DEADLINE_S)
            victim = TWINS[kill % 2]
            cluster.nodes[victim].process.kill()
            cluster.restart(victim)
            cluster.wait_ready(victim)

    churn.carry_out(plans(rng, 3 * REQUESTS, REQUESTS), meanwhile=kill_and_restart)
    expect_books(books, cluster.metrics("router"), 3 * REQUESTS, REQUESTS)
    connect_all(cluster, churn, rng)
    assert steady(cluster, until=before) == before


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_thousand_short_requests_leave_nothing_and_the_processes_no_larger(
    cluster: ProcessCluster, oracle: Oracle, seed: int
) -> None:
    """P11: 30 % of them are cancelled at random gates and moments. The warm-up is as long as it takes to fill what is
    kept on purpose."""
    rng, churn = random.Random(seed), Churn(cluster, oracle)
    fill_thread_pool(cluster)
    churn.carry_out(plans(rng, 500, 150))
    before, books = steady(cluster), cluster.metrics("router")
    resident = resident_bytes(cluster)
    churn.carry_out(plans(rng, 20 * REQUESTS, 6 * REQUESTS))
    assert steady(cluster, until=before) == before
    expect_books(books, cluster.metrics("router"), 20 * REQUESTS, 6 * REQUESTS)
    grown = {name: now / resident[name] for name, now in resident_bytes(cluster).items()}
    assert max(grown.values()) < 1.05, grown


def resident_bytes(cluster: ProcessCluster) -> dict[str, int]:
    """Of every process."""
    return {name: psutil.Process(pid).memory_info().rss for name, pid in cluster.pids().items()}


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
