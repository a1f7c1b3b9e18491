"""The engines that `python -m bench engine` compares, and the transfer libraries of `python -m bench transfer`, each in
a process of its own. Below are the engines; the others are simpler (orders.py).

The benchmark starts `python -m bench.peers.NAME SETTINGS` in the peer's environment and gives it one order at a time, a
line of JSON each, over its standard input (lines.py); between orders a peer waits and computes nothing. What the loads
are, and when the clock runs, is the same code for all (stepping.py). Modules that run inside a peer import nothing but
the standard library and what they measure.
"""
