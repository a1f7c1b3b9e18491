"""A decode node: owns a request from the router's DecodeRequest to its last token.

Life of a request: `server` receives it -> `admission` queues it until pages for the whole prompt can be reserved ->
the messenger fetches the prompt's KV from the first prefill node of the ranking that accepts -> KV arrived: the engine
resumes with the prompt's last token, samples, and every step's tokens go back to the router. A failed attempt's pages
are quarantined until no peer can write into them; the request is tried again, with other pages, on the next node.

Must not know: the OpenAI dialect, text, or the other nodes beyond the addresses it was given.
"""
