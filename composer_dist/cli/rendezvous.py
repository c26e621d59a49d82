"""How torch's elastic agent gets the store of ranks that are all on this machine.

torch's own ways listen on all interfaces, and one keeps pickles in the store, which would run code of whoever
reaches its port (torch 2.13).
"""

from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # public, but not in its __all__
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from composer_dist.distributed.ranks.loopback import HOST, host_store

NAME = "composer-dist"
"""Of the backend, for `LaunchConfig`."""


class LocalRendezvous(RendezvousHandler):
    """A single agent, which hosts the store."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._run = parameters.run_id
        self._store = host_store()

    def get_backend(self) -> str:
        """The backend's name."""
        return NAME

    @property
    def use_agent_store(self) -> bool:
        """The ranks use this process's store too."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """The store; there is nobody to wait for."""
        place = RendezvousStoreInfo(HOST, self._store.port)
        return RendezvousInfo(PrefixStore(self._run, self._store), 0, 1, place)

    def is_closed(self) -> bool:
        """Never."""
        return False

    def set_closed(self) -> None:
        """Nothing: no other agent waits."""

    def num_nodes_waiting(self) -> int:
        """No other host can join."""
        return 0

    def get_run_id(self) -> str:
        """The run's own name."""
        return self._run

    def shutdown(self) -> bool:
        """Nothing is left open."""
        return True


def register() -> None:
    """Make the backend known to torch."""
    rendezvous_handler_registry.register(NAME, LocalRendezvous)
