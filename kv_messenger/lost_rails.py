"""What the prefill side does about a rail that failed with writes on their way: it asks the decode node, which fences
its own rail, what became of them, and meanwhile the session goes on with its other rails.

    RailInDoubt --RailLost--> (the decode node) --RailFenced--> settled
         `--RAIL_DEADLINE_S--> the session is given up, as where nobody could be asked
"""

import logging
from collections.abc import Callable

from fabric.api import EndpointFailed, RailInDoubt, TransferEngine
from kv_messenger.last_words import SendToPeer
from kv_messenger.sessions import Session, Sessions
from protocol.logs import event as log_event
from protocol.messages import RailFenced, RailLost, WritesInDoubt

RAIL_DEADLINE_S = 2.0
"""How long a decode node may take to fence a rail. Sooner than its heartbeat is missed: a transfer waits for it."""

log = logging.getLogger(__name__)


class LostRails:
    """`instance`: ours. On the pump's thread."""

    def __init__(
        self,
        instance: str,
        fabric: TransferEngine,
        sessions: Sessions,
        send: SendToPeer,
        clock: Callable[[], float],
    ) -> None:
        self._instance = instance
        self._fabric = fabric
        self._sessions = sessions
        self._send = send
        self._clock = clock

    def on_endpoint_failed(self, failed: EndpointFailed) -> None:
        """Its session is lost; the next one does without the rail whose failure that was, if it was one's."""
        session = self._sessions.of_endpoint(failed.endpoint)
        if session is not None and failed.rail is not None:
            log_event(
                log, "rail failed", logging.WARNING, peer=session.name, rail=failed.rail, reason=str(failed.error)
            )
            self._sessions.avoid(session, failed.rail)

    def on_doubt(self, doubt: RailInDoubt) -> None:
        """What was cancelled since then is not asked about; with nothing left there is nothing to ask."""
        session = self._sessions.of_endpoint(doubt.endpoint)
        if session is None:
            return
        log_event(
            log,
            "rail lost",
            logging.WARNING,
            peer=session.name,
            rail=doubt.rail,
            transfers_in_doubt=len(doubt.completed),
            reason=str(doubt.error),
        )
        self._sessions.avoid(session, doubt.rail)
        if not doubt.completed:
            return
        session.doubts[doubt.rail] = self._clock() + RAIL_DEADLINE_S
        lost = RailLost(
            instance=self._instance,
            landing=session.landing,
            rail=doubt.rail,
            remotes=list(doubt.remotes),
            doubts=[WritesInDoubt(immediate=i, completed=count) for i, count in doubt.completed.items()],
        )
        self._send(session.instance, lost)

    def on_fenced(self, fenced: RailFenced) -> None:
        """Once for each question: another session's, or a second answer, is late news."""
        session = self._sessions.get(fenced.instance)
        if session is None or session.landing != fenced.landing or fenced.rail not in session.doubts:
            return
        del session.doubts[fenced.rail]
        log_event(log, "rail settled", peer=session.name, rail=fenced.rail, transfers_to_repeat=len(fenced.again))
        self._fabric.settle_rail(session.endpoint, fenced.rail, fenced.again)

    def overdue(self, now: float) -> list[Session]:
        """Those whose decode node did not answer in time."""
        return [session for session in self._sessions.all() if any(now >= due for due in session.doubts.values())]
