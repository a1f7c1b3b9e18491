"""`kvferry demo`: the whole system on real input, and then its books.

Start a cluster -> ask all questions at once through the router -> print answers and the table -> wait until every page
is back -> stop -> check that nothing is left. Any problem is printed and makes the exit code 1.
"""

import argparse
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from deploy.asking import Answer, ask_all
from deploy.books import answer_problems, page_problems
from deploy.cluster_api import ClusterApi
from deploy.cluster_spec import PROGRAMS, ClusterSpec, Programs
from deploy.console import say
from deploy.leftovers import footprint, leftovers, shm_entries
from deploy.local import ClusterFailed, LocalCluster
from deploy.prompts import DEMO_QUESTIONS, Question
from deploy.report import tables, transcript

MAX_BATCH_TOKENS = 256
"""Small, so that the long prompt is prefilled in several chunks."""
PAGES_BACK_S = 15.0
"""Several heartbeats: the books are read from what the nodes report."""
POLL_S = 0.2
INTERRUPTED = 130
"""Exit code, as a shell gives it for SIGINT. SIGTERM counts as the same."""


def main(arguments: argparse.Namespace, run_dir: Path) -> int:
    """Of the options that `deploy.options.add_cluster_options` defines. Raises SpecError."""
    spec = ClusterSpec(
        model=arguments.model,
        prefill=arguments.prefill,
        decode=arguments.decode,
        port=arguments.port,
        provider=arguments.provider,
        same_host=not arguments.no_same_host,
        start_timeout_s=arguments.start_timeout,
        max_batch_tokens=MAX_BATCH_TOKENS,
    )
    spec.check()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    return run(spec, run_dir, DEMO_QUESTIONS, say)


def run(
    spec: ClusterSpec,
    run_dir: Path,
    questions: Sequence[Question],
    say: Callable[[str], None],
    programs: Programs = PROGRAMS,
) -> int:
    """0 if every answer came, every page was returned and nothing was left behind; else 1, with the problems said, or
    INTERRUPTED after Ctrl-C."""
    shm_before = shm_entries()
    cluster = LocalCluster(spec, run_dir, say, programs)
    try:
        cluster.start()
        problems = _ask(cluster, questions, say)
        problems += _pages(cluster)
        seen = footprint((child.id.pid for child in cluster.children), shm_before)
        say("stopping the cluster")
        problems += [f"{name} had to be killed" for name in cluster.stop()]
        problems += leftovers(seen)
    except ClusterFailed as error:
        problems = [str(error)]
    except KeyboardInterrupt:
        say("\ninterrupted: stopping the cluster")
        return INTERRUPTED
    finally:
        cluster.stop()
    return _verdict(problems, say)


def _ask(cluster: LocalCluster, questions: Sequence[Question], say: Callable[[str], None]) -> list[str]:
    with ClusterApi(cluster.endpoint) as api:
        model = api.model()
    say(f"\nasking {model} {len(questions)} questions at once\n")
    answers = ask_all(cluster.endpoint, model, questions)
    for answer in answers:
        say(transcript(answer) + "\n")
    say(tables(answers) + "\n")
    return answer_problems(answers) + _chunk_problems(answers)


def _chunk_problems(answers: Sequence[Answer]) -> list[str]:
    """The demo is meant to show a prompt that crosses while it is computed, so one must have had several chunks."""
    chunks = [answer.ledger.prefill_chunks for answer in answers if answer.ledger is not None]
    return [] if any(count >= 3 for count in chunks) else ["no prompt was prefilled in three chunks or more"]


def _pages(cluster: LocalCluster) -> list[str]:
    """Wait until all nodes report all pages free; returns what is still amiss at the deadline."""
    expected = [name for _, name in cluster.spec.nodes]
    deadline = time.monotonic() + PAGES_BACK_S
    with ClusterApi(cluster.endpoint) as api:
        while (problems := page_problems(api.nodes(), expected)) and time.monotonic() < deadline:
            time.sleep(POLL_S)
    return problems


def _verdict(problems: Sequence[str], say: Callable[[str], None]) -> int:
    if problems:
        say("\n".join(["FAILED", *(f"  {problem}" for problem in problems)]))
        return 1
    say("every answer came, every page was returned, nothing was left behind")
    return 0
