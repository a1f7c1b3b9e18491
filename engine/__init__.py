"""Continuous batching on one node: requests go in, token ids and KV pages come out.

Life of a request. `Engine.add` checks it and queues it (PENDING). Each `Engine.step` lets the scheduler choose, within
budgets, how many tokens of whom run: a slice of a prompt (PREFILLING) or one last token (DECODING); pages are taken
from the pool as its KV grows. The batch becomes a `ForwardBatch`; the model runner runs it, writes KV into the pool's
pages and samples where a request's tokens ended. Tokens are appended, ended requests give their pages back, and the
step's `StepOutput` says what happened. Full pages of equal prefixes are shared. When the pool is full, the newest
stalled requests make room: their KV waits in host memory, or is computed anew (a soft reset).

Two variations serve disaggregation, and the engine does not know what for. A `prefill_only` request holds pages for
its whole prompt from admission, never samples, and keeps its pages until `release`. A reserved request holds pages
that someone else fills (WAITING_FOR_REMOTE_KV) until `resume`, or `quarantine` when what lands there is in doubt.

Must not know: peers, addresses, roles, text. The scheduler must not know torch, CUDA or the wall clock.
"""
