"""Moves one request's KV pages from a prefill node's pool into a decode node's, layer by layer.

Life of a transfer: the decode side arms an immediate for the writes that it expects (`receiver`) and sends a ticket ->
the prefill side accepts it (`sender`), and for every prefill chunk that the engine announces arms that chunk's page
writes, layer by layer, on the engine's progress word -> the fabric posts each layer as the forward passes it -> the
decode side has counted every write and hands the request to its engine; the prefill side has seen its own writes
complete and frees its pages. `plan` is the arithmetic, `sender_transfer` and `receiver_transfer` are the two state
machines, `pump` is the one thread that touches the fabric.

Must not know: the scheduler, models, torch, text. Addresses, strides and counts suffice.
"""
