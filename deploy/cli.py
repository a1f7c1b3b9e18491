"""`kvferry`: one command for a local cluster, its demo, this machine's fitness, each role, and files of prompts.

What a command needs is imported once it is chosen: that may take seconds, in which Ctrl-C ends it without a traceback.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from deploy.cluster_spec import SpecError
from deploy.console import say
from deploy.options import add_cluster_options, add_node_options, cluster_spec_from
from deploy.state import StateError

RUN_DIR = Path(".kvferry/run")
DEMO_DIR = Path(".kvferry/demo")

ROLES = {
    "router": ("router.__main__", "run the router: the OpenAI-compatible endpoint that nodes register with"),
    "prefill": ("prefill_node.__main__", "run one prefill node: computes prompts, writes their KV to decode nodes"),
    "decode": ("decode_node.__main__", "run one decode node: receives KV, generates the tokens"),
}
PROGRAMS = {
    **ROLES,
    "generate": ("engine.__main__", "generate from a file of prompts on this machine, without a cluster"),
}
"""Commands that parse their own options."""
INTERRUPTED = 130
"""Exit code, as a shell gives it for SIGINT."""
DESCRIPTION = """\
Serve a language model with prefill and decode on separate nodes; the KV cache crosses between them over libfabric.

Try `kvferry doctor`, then `kvferry demo`, then `kvferry up`. The roles `router`, `prefill` and `decode` are what `up`
starts for you; across machines, start them yourself (`kvferry ROLE --help`)."""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code; usage errors exit with 2 as argparse does."""
    try:
        return _run(list(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt:
        sys.stderr.write("kvferry: interrupted\n")
        return INTERRUPTED


def _run(arguments: list[str]) -> int:
    if arguments and arguments[0] in PROGRAMS:
        return run_program(arguments[0], arguments[1:])
    parsed = build_parser().parse_args(arguments)
    parsed.words = arguments
    try:
        code: int = parsed.run(parsed)
        return code
    except (SpecError, StateError) as error:
        sys.stderr.write(f"kvferry {parsed.command}: {error}\n")
        return 2


def run_program(name: str, argv: list[str]) -> int:
    """Some machines have not what others need: a router's, neither torch nor libfabric."""
    try:
        module = importlib.import_module(PROGRAMS[name][0])
    except ImportError as error:
        sys.stderr.write(f"kvferry {name}: {error}; this install lacks what it needs, see `kvferry doctor`\n")
        return 1
    code: int = module.main(argv)
    return code


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvferry", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    _add_up(commands)
    _add_down(commands)
    _add_key(commands)
    _add_demo(commands)
    _add_doctor(commands)
    for name, (_, summary) in PROGRAMS.items():
        commands.add_parser(name, help=summary, add_help=False)
    return parser


def _add_up(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "up",
        help="start a cluster on this machine and leave it running",
        description="Start a router, prefill nodes and decode nodes on this machine, wait until they are ready, print "
        "how to talk to them, and leave them running. Logs are in " + str(RUN_DIR) + ".",
    )
    add_cluster_options(parser, port=8000)
    add_node_options(parser)
    parser.add_argument("--foreground", action="store_true", help="stay attached; Ctrl-C stops the cluster")
    parser.set_defaults(run=_up)


def _up(arguments: argparse.Namespace) -> int:
    from deploy import up

    spec = cluster_spec_from(arguments)
    if arguments.foreground:
        return up.run_foreground(spec, RUN_DIR, say)
    launcher = [sys.executable, "-m", "deploy.cli", *arguments.words, "--foreground"]
    return up.run_background(launcher, RUN_DIR, say)


def _add_down(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "down",
        help="stop the cluster that `up` started",
        description="Stop the cluster that `kvferry up` started from this folder. Only processes that it recorded are "
        "signalled, each checked by its start time.",
    )
    parser.set_defaults(run=_down)


def _down(arguments: argparse.Namespace) -> int:
    from deploy import up

    return up.stop(RUN_DIR, say)


def _add_key(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "key",
        help="write a new cluster key file, for a cluster across machines",
        description="Write a new cluster key to FILE, readable by you alone. Copy it to every machine of the cluster: "
        "whoever has it may join. `up` and `demo` make their own.",
    )
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.set_defaults(run=_key)


def _key(arguments: argparse.Namespace) -> int:
    from protocol.curve import write_cluster_key

    try:
        write_cluster_key(arguments.file)
    except FileExistsError:
        advice = "use it, or move it away if no cluster uses it any more: a key is never replaced"
        sys.stderr.write(f"kvferry key: {arguments.file} is there already; {advice}\n")
        return 1
    except OSError as error:
        sys.stderr.write(f"kvferry key: {arguments.file} cannot be written: {error.strerror}\n")
        return 1
    return 0


def _add_demo(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "demo",
        help="start a cluster, ask it real questions, show where the time went, stop it, check the books",
        description="Start one prefill node, three decode nodes and a router, send chat prompts through the router "
        "(several at once, one of them long), print the answers and a table of where each request's time and bytes "
        "went, stop everything. Exit code 0 only if every answer came, every page was returned and nothing was left.",
    )
    add_cluster_options(parser, port=0)
    parser.set_defaults(run=_demo)


def _demo(arguments: argparse.Namespace) -> int:
    from deploy import demo

    return demo.main(arguments, DEMO_DIR)


def _add_doctor(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "doctor",
        help="check whether this machine can run a node, and say what to change",
        description="Check Python, cores, memory, open files, shared memory, torch, libfabric with its providers, "
        "locked memory, and which NICs and cores are nearest to each GPU. Exit code 1 if something would keep a node "
        "from running.",
    )
    parser.add_argument("--router-only", action="store_true", help="check only what a router needs")
    parser.set_defaults(run=_doctor)


def _doctor(arguments: argparse.Namespace) -> int:
    from deploy import doctor

    return doctor.main(arguments.router_only)


if __name__ == "__main__":
    sys.exit(main())
