"""One cluster key: every control socket is CURVE-encrypted and admits only peers that hold the key.

The key file (JSON, mode 0600) has one key pair, used as server key and as the only client key of the allow-list. A
foreign key fails the ZAP check before any frame of its is read.
"""

import json
import os
import stat
from dataclasses import dataclass
from pathlib import Path

import zmq
from zmq.auth.thread import ThreadAuthenticator

ZAP_DOMAIN = "kvferry"


class ClusterKeyError(ValueError):
    """The key file is missing, malformed or readable by others; the message says what to do."""


@dataclass(frozen=True, slots=True)
class ClusterKey:
    """A CURVE key pair, each half 40 characters of Z85."""

    public: bytes
    secret: bytes

    def secure_server(self, socket: zmq.Socket[bytes]) -> None:
        """Call before bind. Needs a running `Gatekeeper` on the socket's context."""
        socket.curve_server = True
        socket.curve_publickey = self.public
        socket.curve_secretkey = self.secret
        socket.zap_domain = ZAP_DOMAIN.encode()

    def secure_client(self, socket: zmq.Socket[bytes]) -> None:
        """Call before connect."""
        socket.curve_serverkey = self.public
        socket.curve_publickey = self.public
        socket.curve_secretkey = self.secret


def new_cluster_key() -> ClusterKey:
    public, secret = zmq.curve_keypair()
    return ClusterKey(public, secret)


def write_cluster_key(path: Path) -> None:
    """Creates the file with a fresh key, mode 0600. Raises FileExistsError rather than replace a key in use."""
    key = new_cluster_key()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump({"public": key.public.decode(), "secret": key.secret.decode()}, file)


def read_cluster_key(path: Path) -> ClusterKey:
    """Raises ClusterKeyError."""
    try:
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            raise ClusterKeyError(f"{path} can be read by others: chmod 600 {path}")
        fields = json.loads(path.read_text())
        key = ClusterKey(fields["public"].encode(), fields["secret"].encode())
        if zmq.curve_public(key.secret) != key.public:
            raise ClusterKeyError(f"{path}: public and secret key do not belong together; write a new key file")
    except OSError as error:
        raise ClusterKeyError(f"cannot read the cluster key: {error}; `kvferry key FILE` writes one") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, ClusterKeyError):
            raise
        raise ClusterKeyError(f"{path} is no cluster key file (JSON with public and secret)") from error
    return key


class _AllowOne:
    def __init__(self, key: ClusterKey) -> None:
        self._key = key

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._key.public


class Gatekeeper:
    """The ZAP handler of one context: admits the cluster key and nothing else. Start it before binding sockets."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", key: ClusterKey) -> None:
        self._context = context
        self._key = key
        self._authenticator: ThreadAuthenticator | None = None

    def start(self) -> None:
        if self._authenticator is not None:
            return
        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(ZAP_DOMAIN, _AllowOne(self._key))

    def close(self) -> None:
        if self._authenticator is not None:
            self._authenticator.stop()
            self._authenticator = None
