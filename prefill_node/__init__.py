"""A prefill node: computes prompts and writes their KV into decode nodes' pages.

Life of a request: a decode node's PrefillRequest reaches `server` -> the messenger's sender accepts the ticket -> the
engine takes source pages for the whole prompt and runs it in chunks; before each forward the sender arms that chunk's
writes layer by layer -> all writes completed: the source pages are freed and the decode node is told the times.

It never samples: the prompt's last token is not among the tokens it gets.

Must not know: routers' dialects, text, sampling, or who the client is.
"""
