"""Everything that crosses a process border: the records, their wire form, and the sockets that carry them.

A record is a frozen struct in `sampling`, `layout`, `ticket` or `messages`; `codec` turns it into one MessagePack
frame and back, against fixed types and size limits; `curve` and `channel` hold the authenticated ZeroMQ sockets.
`gates` are the tests' named pause points and `status_http` the pages a node shows (`/health`, `/metrics`, ...).

Must not know: torch (the router runs on a CPU box), how pages are scheduled, what libfabric is.
"""

PROTOCOL_VERSION = 8
"""Raised with every change of a record. The router refuses nodes of another version; it is part of the digest by which
prefill and decode nodes know that they fit."""
