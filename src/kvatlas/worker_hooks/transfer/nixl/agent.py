"""NIXL itself: loading it, making an agent, and what its exceptions mean.

The only module that imports nixl, loaded by the transfer process alone. NIXL's listener thread and
pickled descriptors are never used.
"""

import importlib
import logging
import os
from typing import Any

from kvatlas.schemas.errors import TransportUnavailable
from kvatlas.worker_hooks.transfer.transport import ReadStatus

BACKEND, MEMORY = "UCX", "DRAM"

#: what each exception of the driver says about a read; a test holds it to the installed driver
MEANINGS = {
    "nixlBackendError": ReadStatus.disconnected,
    "nixlRemoteDisconnectError": ReadStatus.disconnected,
    "nixlCancelledError": ReadStatus.disconnected,
    "nixlInvalidParamError": ReadStatus.refused,
    "nixlMismatchError": ReadStatus.refused,
    "nixlNotAllowedError": ReadStatus.refused,
    "nixlNotFoundError": ReadStatus.refused,
    "nixlNotSupportedError": ReadStatus.refused,
    "nixlNoTelemetryError": ReadStatus.failed,
    "nixlNotPostedError": ReadStatus.failed,
    "nixlRepostActiveError": ReadStatus.failed,
    "nixlUnknownError": ReadStatus.failed,
}


class Nixl:
    """The loaded driver. Raises TransportUnavailable when it is not installed."""

    def __init__(self) -> None:
        try:
            self._api: Any = importlib.import_module("nixl._api")
            bindings = importlib.import_module("nixl._bindings")
        except ImportError as error:
            raise TransportUnavailable(f"nixl cannot be imported: {error}") from error
        if "NIXL_LOG_LEVEL" not in os.environ:
            logging.getLogger("nixl").setLevel(logging.WARNING)  # else INFO goes to stdout
        #: every exception of the driver; they share no base
        self.errors: tuple[type[Exception], ...] = tuple(
            value
            for name, value in sorted(vars(bindings).items())
            if name.startswith("nixl") and isinstance(value, type) and issubclass(value, Exception)
        )

    def agent(self, name: str, progress_thread: bool) -> Any:
        """Return an agent over UCX. A name is never used twice: peers refuse it."""
        config = self._api.nixl_agent_config(
            enable_prog_thread=progress_thread, enable_listen_thread=False, backends=[BACKEND]
        )
        try:
            return self._api.nixl_agent(name, config)
        except RuntimeError as error:  # no plugin at all
            raise TransportUnavailable(f"NIXL agent {name}: {error}") from error
        except self.errors as error:
            raise TransportUnavailable(f"NIXL agent {name}: {describe(error)}") from error


def meaning(error: Exception) -> ReadStatus:
    """Return what an exception of the driver says about a read."""
    return MEANINGS.get(type(error).__name__, ReadStatus.failed)


def describe(error: Exception) -> str:
    """Return the driver's words, with the class, which says more."""
    return f"{type(error).__name__}: {error}"
