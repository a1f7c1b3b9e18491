"""Moves bytes between registered memories of two processes, and counts what arrived.

Life of a write: `register` names memory to the network -> the receiver opens one *landing endpoint* per
peer instance and `expect`s a count for an immediate -> the sender connects a *sending endpoint* to it and
posts paged writes, now or when a word in memory reaches a threshold -> each side learns the outcome as an
event from `progress`. Closing a landing endpoint is the fence: nothing that peer sent can land afterwards.

Must not know: that the bytes are KV pages, what a layer or a request is, or who asked.
"""
