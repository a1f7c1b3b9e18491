"""The command-line options by which any node joins a cluster, and the record they become."""

import argparse
import secrets
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit


@dataclass(frozen=True, slots=True)
class Membership:
    """`router`: the address nodes dial. `host`: the interface that this node's own sockets bind to. Ports 0 take any.
    `same_host`: pages go through shared memory between nodes of one host. `instance`: random per process; a restart on
    the same address is a new peer. `max_queue`: requests that may wait; more are refused. `drain_s`: grace for what
    runs at SIGTERM. `nics`: that carry pages, by name or address; empty: those near the devices. `cores`: CPUs of the
    messenger's thread; None: those near."""

    router: str
    cluster_key: Path
    name: str
    host: str
    provider: str | None
    same_host: bool
    status_port: int
    test_gates: str | None
    instance: str
    max_queue: int
    drain_s: float
    nics: tuple[str, ...] = ()
    cores: frozenset[int] | None = None


def port_number(text: str) -> int:
    """For argparse."""
    number = int(text)
    if not 0 <= number < 1 << 16:
        raise argparse.ArgumentTypeError(f"{number} is no port: 0 to 65535, 0 takes any free one")
    return number


def _router_address(text: str) -> str:
    where = urlsplit(text)
    try:
        complete = where.scheme == "tcp" and bool(where.hostname) and where.port is not None
    except ValueError:
        complete = False
    if not complete:
        raise argparse.ArgumentTypeError(f"{text!r} is no router address: write tcp://HOST:PORT")
    return text


def _own_address(text: str) -> str:
    """Peers are told it: one that means every interface of whoever reads it is none."""
    try:
        everywhere = text == "*" or ip_address(text.strip("[]")).is_unspecified
    except ValueError:
        everywhere = False
    if everywhere:
        raise argparse.ArgumentTypeError(f"{text} is no address that peers reach: give that of one interface")
    return text


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} must be at least 1")
    return number


def _names(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if not all(names):
        raise argparse.ArgumentTypeError(f"{text!r} is no list: write mlx5_0,mlx5_1")
    return names


def _cpus(text: str) -> frozenset[int]:
    """As the kernel writes them."""
    cpus: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        known = first.isdecimal() and (last.isdecimal() or not dash)
        if not known or int(last or first) < int(first):
            raise argparse.ArgumentTypeError(f"{text!r} is no list of CPUs: write 0-3,8")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def _seconds(text: str) -> float:
    number = float(text)
    if not 0 <= number < 1e6:
        raise argparse.ArgumentTypeError(f"{text} is no number of seconds")
    return number


def add_membership_options(parser: argparse.ArgumentParser, default_name: str) -> None:
    group = parser.add_argument_group("joining a cluster")
    group.add_argument(
        "--router",
        required=True,
        type=_router_address,
        metavar="ADDRESS",
        help="the router's address for nodes, e.g. tcp://127.0.0.1:8001",
    )
    group.add_argument(
        "--cluster-key",
        required=True,
        type=Path,
        metavar="FILE",
        help="the key file that a whole cluster shares",
    )
    group.add_argument("--name", default=default_name, help="name in logs and tables (default: %(default)s)")
    group.add_argument(
        "--host",
        type=_own_address,
        default="127.0.0.1",
        metavar="ADDRESS",
        help="of the interface for its sockets and data plane; peers are told it (default: %(default)s)",
    )
    _add_data_plane_options(group)
    group.add_argument(
        "--status-port",
        type=port_number,
        default=0,
        help="port of the status pages: /health, ... (default: any)",
    )
    group.add_argument(
        "--max-queue",
        type=_positive,
        default=256,
        help="requests that may wait, for each engine (default: %(default)s)",
    )
    group.add_argument(
        "--drain",
        type=_seconds,
        default=30.0,
        metavar="S",
        help="grace at SIGTERM (default: %(default)s)",
    )
    group.add_argument("--test-gates", metavar="SOCKET", help=argparse.SUPPRESS)


def _add_data_plane_options(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--provider",
        help="libfabric provider: net, tcp;ofi_rxm, efa, verbs;ofi_rxm, ... (default: the best there is)",
    )
    group.add_argument(
        "--nics",
        type=_names,
        default=(),
        metavar="LIST",
        help="NICs that carry KV side by side, by name or address, e.g. mlx5_0,mlx5_1 (default: those nearest to the "
        "devices where the provider drives NICs, else the one with --host; see doctor)",
    )
    group.add_argument(
        "--cores",
        type=_cpus,
        metavar="LIST",
        help="CPUs of the KV messenger's thread, e.g. 0-3,8 (default: those near the devices on large machines)",
    )
    group.add_argument(
        "--no-same-host",
        action="store_true",
        help="move KV over the provider also between nodes of this host, not through shared memory",
    )


def membership_from(arguments: argparse.Namespace) -> Membership:
    return Membership(
        router=arguments.router,
        cluster_key=arguments.cluster_key,
        name=arguments.name,
        host=arguments.host,
        provider=arguments.provider,
        same_host=not arguments.no_same_host,
        status_port=arguments.status_port,
        test_gates=arguments.test_gates,
        instance=secrets.token_hex(16),
        max_queue=arguments.max_queue,
        drain_s=arguments.drain,
        nics=arguments.nics,
        cores=arguments.cores,
    )
