"""Attention over paged KV. A backend plans once per forward and then serves every layer from that plan.

Must not know: requests, schedulers, which model asks.
"""
