"""Moves one request's KV pages from a prefill node's pools into a decode node's, layer by layer, rank to rank.

Life of a transfer: the two sides have greeted each other and know each other's layout -> the decode side arms an
immediate for the writes that it expects (`receiver`) and sends a ticket -> the prefill side accepts it (`sender`),
gives the prompt to an engine once its decode node may take so much of it (`credits`), and for every prefill chunk that
the engine announces arms that chunk's page writes, layer by layer, on the engine's progress word -> the fabric posts
each layer as the forward passes it -> the decode side has counted every write and hands the request to its engine; the
prefill side has seen its own writes complete and frees its pages. Behind the last chunk goes the prompt's context
(`context`), where the decode side wants one: a few writes more of the same count.

`plan` is the arithmetic (`sharding`: which ranks meet; `runs`: which tokens go in one write), `sender_transfer` and
`receiver_transfer` are the two state machines, `sessions`, `peers` and `fencing` hold what is known of the other side,
`lost_rails` asks it what became of writes on a rail that failed, `pump` is the one thread that touches the fabric.

Must not know: the scheduler, models, torch, text. Addresses, strides and counts suffice.
"""
