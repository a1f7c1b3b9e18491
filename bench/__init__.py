"""Benchmarks: what is measured, beside a peer or a limit that runs in the same minute on the same machine.

Uses only the public faces of the packages it measures.
"""
