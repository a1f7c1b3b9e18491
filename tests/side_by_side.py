"""How tests are dealt out to processes side by side (`pytest -n 2`): by files, and by folders whose tests share what is
dear to start."""

from xdist.scheduler import LoadFileScheduling

WHOLE = ("tests/cluster/",)


class ByFile(LoadFileScheduling):  # type: ignore[misc] # xdist has no types
    def _split_scope(self, nodeid: str) -> str:
        return part_of(nodeid)


def part_of(nodeid: str) -> str:
    """The name of what a test is dealt out with."""
    return next((folder for folder in WHOLE if nodeid.startswith(folder)), nodeid.partition("::")[0])
