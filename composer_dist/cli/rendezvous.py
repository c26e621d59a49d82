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


class Interruption:
    """Holds an exception back while torch's agent starts the ranks: it would not end those it has started."""

    def __init__(self) -> None:
        self._starting = False
        self._held: Exception | None = None

    def interrupt(self, error: Exception) -> None:
        """Raise `error`, from a signal's handler; while the ranks are started, as soon as that is done."""
        if not self._starting:
            raise error
        self._held = error

    def begin(self) -> None:
        """The agent starts the ranks next."""
        self._starting = True

    def end(self) -> None:
        """The agent has started all ranks."""
        self._starting = False
        if self._held is not None:
            raise self._held


class LocalRendezvous(RendezvousHandler):
    """A single agent, which hosts the store."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._run = parameters.run_id
        self._interruption: Interruption = parameters.config["interruption"]
        self._store = host_store()

    def get_backend(self) -> str:
        """The backend's name."""
        return NAME

    @property
    def use_agent_store(self) -> bool:
        """The ranks use this process's store too."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """The store; there is nobody to wait for. The agent calls it before it starts the ranks."""
        self._interruption.begin()
        place = RendezvousStoreInfo(HOST, self._store.port)
        return RendezvousInfo(PrefixStore(self._run, self._store), 0, 1, place)

    def is_closed(self) -> bool:
        """Never."""
        return False

    def set_closed(self) -> None:
        """Nothing: no other agent waits."""

    def num_nodes_waiting(self) -> int:
        """No other host can join. The agent asks as long as the ranks run."""
        self._interruption.end()
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
