"""`kvferry up` and `kvferry down`: a cluster that outlives the command which started it.

In the background, `up` starts a launcher (itself with --foreground, in a session of its own) and shows its progress
until the cluster is ready. The launcher owns all other processes: they die with it, so `down` has one process to stop.
"""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from deploy.cluster_api import ClusterApi
from deploy.cluster_spec import PROGRAMS, ClusterSpec, Programs
from deploy.local import NODES_STOP_S, ROUTER_STOP_S, ClusterFailed, LocalCluster
from deploy.process import POLL_S, ProcessId, start_time
from deploy.state import ClusterState, read_state, remove_state, write_state

LAUNCHER_STOP_S = ROUTER_STOP_S + NODES_STOP_S + 5.0
LOG = "launcher.log"
WATCH_S = 0.5

USAGE = """
Ask it something:

  curl -N {endpoint}/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{{"model": "{model}", "stream": true, "temperature": 0,
         "messages": [{{"role": "user", "content": "Why is the sky blue?"}}]}}'

or with the openai client:

  from openai import OpenAI
  client = OpenAI(base_url="{endpoint}/v1", api_key="unused")
  messages = [{{"role": "user", "content": "Why is the sky blue?"}}]
  answer = client.chat.completions.create(model="{model}", messages=messages, temperature=0)
  print(answer.choices[0].message.content)

Nodes: {endpoint}/v1/cluster   logs: {logs}   stop: kvferry down, or make down
"""

Say = Callable[[str], None]


def running(run_dir: Path) -> ClusterState | None:
    """The cluster that lives in `run_dir`. The record of one whose launcher is gone counts as none."""
    state = read_state(run_dir)
    return state if state is not None and state.launcher.alive else None


def run_foreground(spec: ClusterSpec, run_dir: Path, say: Say, programs: Programs = PROGRAMS) -> int:
    """Start the cluster and supervise it until SIGINT or SIGTERM (0) or until it cannot serve any more (1).

    Main thread only: SIGTERM becomes KeyboardInterrupt for the rest of the process.
    """
    if (other := running(run_dir)) is not None:
        say(f"a cluster is running already: {other.endpoint or 'still starting'}; stop it with `kvferry down`")
        return 1
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    _remove_old_logs(run_dir)
    cluster = LocalCluster(spec, run_dir, say, programs)
    try:
        _record(cluster, ready=False)
        cluster.start()
        say(usage(cluster.endpoint, run_dir))
        _record(cluster, ready=True)  # last: whoever reads it finds all of the above in the log
        return _watch(cluster, say)
    except ClusterFailed as error:
        say(str(error))
        return 1
    except KeyboardInterrupt:
        say(f"{_now()} stopping")
        return 0
    finally:
        cluster.stop()
        remove_state(run_dir)
        say(f"{_now()} stopped")


def _remove_old_logs(run_dir: Path) -> None:
    """Of the processes of earlier clusters, which may have been more. The launcher's is being written."""
    for log in run_dir.glob("*.log"):
        if log.name != LOG:
            log.unlink()


def _now() -> str:
    """As the processes' logs have it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def usage(endpoint: str, run_dir: Path) -> str:
    """The exact lines that talk to a running cluster."""
    with ClusterApi(endpoint) as api:
        return USAGE.format(endpoint=endpoint, model=api.model(), logs=run_dir)


def _record(cluster: LocalCluster, ready: bool) -> None:
    started = start_time(os.getpid())
    assert started is not None
    members = {child.name: child.id for child in cluster.children}
    endpoint = cluster.endpoint if ready else ""
    write_state(
        cluster.run_dir, ClusterState(ProcessId(os.getpid(), started), members, endpoint, str(cluster.spec.model))
    )


def _watch(cluster: LocalCluster, say: Say) -> int:
    """Report each process that dies. The cluster goes on without a node, but not without its router."""
    reported: set[str] = set()
    while True:
        for child in cluster.dead():
            if child.name in reported:
                continue
            reported.add(child.name)
            say(f"{_now()} {child.end}")
        if "router" in reported:
            return 1
        time.sleep(WATCH_S)


def run_background(launcher: list[str], run_dir: Path, say: Say) -> int:
    """Start `launcher` (a command that ends in `run_foreground`), relay what it says, and leave it once it is ready."""
    if (other := running(run_dir)) is not None:
        say(f"a cluster is running already: {other.endpoint or 'still starting'}; stop it with `kvferry down`")
        return 1
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    remove_state(run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    log = run_dir / LOG
    pid = _detach(launcher, log)
    try:
        return _relay(pid, log, run_dir, say)
    except KeyboardInterrupt:
        os.kill(pid, signal.SIGTERM)  # not reaped yet, so the pid is still its own
        os.waitpid(pid, 0)
        say("stopped")
        return 1


def _detach(command: list[str], log: Path) -> int:
    """Start a process that is meant to stay when we go: in a session of its own, both outputs to `log`."""
    with log.open("wb") as output:
        actions = [
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_DUP2, output.fileno(), 1),
            (os.POSIX_SPAWN_DUP2, output.fileno(), 2),
        ]
        return os.posix_spawn(command[0], command, os.environ, file_actions=actions, setsid=True)


def _relay(pid: int, log: Path, run_dir: Path, say: Say) -> int:
    """Show what the launcher says until it is ready (0) or has given up (1)."""
    # No deadline of its own: every step of the launcher has one, and it exits when one passes.
    shown = 0
    while True:
        ended = os.waitpid(pid, os.WNOHANG)[0] == pid
        state = running(run_dir)
        text = log.read_text()
        if text[shown:].strip():
            say(text[shown:].rstrip("\n"))
            shown = len(text)
        if ended or (state is not None and state.ready):
            return 1 if ended else 0
        time.sleep(POLL_S)


def stop(run_dir: Path, say: Say) -> int:
    """Stop the cluster of `run_dir`; 0 also where none runs. Never signals a process that `up` did not start."""
    state = read_state(run_dir)
    if state is None:
        say(f"no cluster was started from this folder: nothing is recorded in {run_dir.absolute()}")
        return 0
    state.launcher.send(signal.SIGTERM)
    if not state.launcher.wait(LAUNCHER_STOP_S):
        say("the launcher does not stop by itself: killing it, and with it all nodes")
        state.launcher.send(signal.SIGKILL)
        state.launcher.wait(LAUNCHER_STOP_S)
    for member in state.members.values():
        member.send(signal.SIGKILL)  # in case the launcher was killed: usually they are gone
    remove_state(run_dir)
    say("stopped")
    return 0
