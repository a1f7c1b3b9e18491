"""Benchmarks of a running cluster, of single engines and of transfers alone: workloads, clients and reports.

Sees what any client or operator sees: the router's endpoint, and the public faces of the packages it measures.
"""
