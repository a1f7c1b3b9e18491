"""One process per device beyond the first.

The main process decides everything; a worker (`python -m engine.workers`, see `rank`) holds one rank's shard of the
model and runs what it is sent over a socketpair (`messages`, `channel`). The pages of all ranks are one piece of shared
memory (`memory`), so that the main process can copy, poison and register each rank's blocks.

Life of a group of workers (`group`, `process`):
1. started: each reads the model and keeps its shard; so does the main process meanwhile
2. serve: the main process has chosen the cache's size, makes the memory and sends it round; the ranks find each other
3. forwards, in order, by `runner`: all ranks run the same batch, rank 0 alone chooses tokens
4. stop; or one of them dies, and then all of them end, as the ranks of a model are of no use without one another

Must not know: requests, schedulers, peers.
"""
