"""The router: the cluster's OpenAI-shaped front door.

Life of a request: `openai` reads and checks the body -> `tokenizer` renders the chat template and encodes -> `dispatch`
waits for a place in `queueing`, asks `policy` for the best decode node and the ranking of prefill nodes, and sends one
DecodeRequest over `node_channel` -> the node's tokens come back through `node_events` -> `generation` turns them into
text (`detokenizer`, `stop_strings`) -> `serving` answers with JSON or server-sent events. A client that leaves becomes
an Abort; a node that is lost becomes one retry elsewhere while nothing was shown, else one error.

Must not know: torch, pages, libfabric, how KV moves. Nodes dial the router; the router dials nobody.
"""
