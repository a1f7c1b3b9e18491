"""The OpenAI dialect: bodies in, replies and errors out, all in OpenAI's shapes.

`errors` is the one place that knows HTTP codes; `json_body` and `fields` read untrusted input; `sampling_fields`,
`generation_fields`, `chat` and `completions` turn it into records; `replies` and `sse` write the answers. Knows nothing
of nodes.
"""
