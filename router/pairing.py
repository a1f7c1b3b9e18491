"""Which prefill node goes with which decode node, and why another does not. Pure: statuses in, words out.

Nodes say the digest of what must be equal, and of what it covers only the model's name and the dtype by themselves: the
reason is as exact as that allows.
"""

from protocol.context import refuse_context
from protocol.messages import NodeStatus


def refuse_nodes(prefill: NodeStatus, decode: NodeStatus) -> str | None:
    """Why `prefill` can never feed `decode`, or None if it can."""
    if prefill.compatibility == decode.compatibility:
        return refuse_context(prefill.context, decode.context)
    if prefill.model != decode.model:
        return f"the prefill node serves {prefill.model}, the decode node {decode.model}"
    if prefill.dtype != decode.dtype:
        dtypes = f"the prefill node runs in {prefill.dtype}, the decode node in {decode.dtype}"
        return f"{dtypes}: start both with one --dtype"
    return "the files of their models differ"
