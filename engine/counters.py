"""What an engine has done so far. Every number only grows."""

from dataclasses import dataclass


@dataclass
class EngineCounters:
    """`tokens`: generated; `prompt_tokens`: computed, those computed anew after a reset included. `stalls`: times that
    an active request got no blocks. `resets`: soft resets, of requests whose KV was dropped; `offloads`: of those
    whose KV went to host memory, `restores`: came back. `forks`: children that began with their parent's KV.

    The nanoseconds say where the engine's thread spent its steps; `forward_ns` is waiting for the device, and
    `device_ns` what the device itself took.
    """

    batches: int = 0
    failed_batches: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    stalls: int = 0
    resets: int = 0
    offloads: int = 0
    restores: int = 0
    forks: int = 0
    schedule_ns: int = 0
    launch_ns: int = 0
    forward_ns: int = 0
    update_ns: int = 0
    device_ns: int = 0
