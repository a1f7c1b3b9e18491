"""One round of a fence under fire, as a process of its own: a provider that cannot bear it takes only that with it.

python -m tests.rdma.fencing PROVIDER NODE PAGE AFTER
"""

import sys

from tests.fabric.test_fence import fence_under_fire

if __name__ == "__main__":
    provider, node, page, after = sys.argv[1:]
    fence_under_fire(int(page), int(after), provider, node)
