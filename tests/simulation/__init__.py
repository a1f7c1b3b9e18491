"""The whole protocol in one process and in virtual time: the real state machines of both kinds of nodes, with the
network, the clock, the threads and every fault in the hands of one seed.

    script     what a seed draws: nodes, requests, faults, how the network behaves
    schedule   virtual time; processes that run, stand still or are gone
    network    writes: posted, on their way, landed, completed, each at a time of its own; `flights`: such a write,
               `fabric`: a node's end of it, `counted`: what its engine must have counted by then
    channel    control messages over connections that break
    books      pages whose words say what they hold; `contexts` likewise
    engines    the two engines over them, without a model
    nodes      what both kinds of nodes have; `prefill` and `decode` put them together as the real nodes are
    router     clients, and the choice of nodes by the router's own membership and policy
    world      all of it together: plays a script, then heals everything and looks at the books

What must hold is checked where it could break: a write when it lands, a page when it comes free, KV when it is first
read, an outcome when it is told; and everything once more at the end. `python -m tests.simulation` runs many seeds.
"""
