"""msrun that lets workers say why they end.

msrun looks at its workers once a second. When one has failed it kills all others in the same moment, although they may
just be about to tell which rank was lost and in which action. `PatientManager` gives them a few seconds to end by
themselves. Run as a program, this file takes msrun's own arguments.
"""

from __future__ import annotations

import time

from mindspore.parallel.cluster.process_entity import _ProcessManager
from mindspore.parallel.cluster.run import get_args

PRIVATE_INTERFACES: tuple[str, ...] = (
    "mindspore.parallel.cluster.process_entity._ProcessManager.cgn_processes",
    "mindspore.parallel.cluster.process_entity._ProcessManager.kill_all_processes",
    "mindspore.parallel.cluster.process_entity._ProcessManager.kill_worker_processes",
    "mindspore.parallel.cluster.run.get_args",
)

SECONDS_TO_END = 5.0


class PatientManager(_ProcessManager):
    """msrun's process manager, but what is left of a failed job has `SECONDS_TO_END` before it is killed."""

    def kill_all_processes(self) -> None:
        """Kill at once: msrun was interrupted, no worker knows of it."""
        super().kill_worker_processes()
        super().kill_all_processes()  # finds no worker left to wait for

    def kill_worker_processes(self) -> None:
        """Wait for the workers to end, and kill those that do not."""
        deadline = time.monotonic() + SECONDS_TO_END
        while time.monotonic() < deadline and any(process.poll() is None for process in self.cgn_processes):
            time.sleep(0.05)
        super().kill_worker_processes()


if __name__ == "__main__":
    PatientManager(get_args()).run()
