"""Brings a kvferry cluster up, shows that it works, and takes it down again.

`kvferry` (cli) calls either one role's own `main` or one of ours: doctor (can this machine run a node?), local (the
launcher: a cluster's processes on this machine, up and down), demo (real prompts through a real cluster, with the
books checked afterwards) and model (the demo model, converted once).

Knows processes, ports and command lines. Must not reach past any package's public face: what it learns of a running
cluster it reads from the router's HTTP endpoint, as an operator would.
"""
