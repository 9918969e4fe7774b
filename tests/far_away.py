"""Simulators behind a SimulatorHost that a launcher has started on another address of this machine."""

import functools

from embodyrl.envs.manager.host import SimulatorHost
from embodyrl.envs.manager.remote import RemoteManager
from embodyrl.placement.local import LocalLauncher
from embodyrl.placement.plan import WorkerSpec

HOST = "127.0.0.3"


class Far(RemoteManager):
    """Its host's process ends with it."""

    def __init__(self, launcher, worker, address, **options):
        self.launcher, self.worker = launcher, worker
        super().__init__(address, **options)

    def close(self):
        super().close()
        self.launcher.close()


def launch(config, *, patience_s=60.0, **manager):
    """A host's launcher and worker, and its address."""
    launcher = LocalLauncher(plugins=manager.get("plugins", ()), plugin_path=manager.get("plugin_path"))
    [worker] = launcher.start(
        [WorkerSpec(role="simulators", rank=0)],
        functools.partial(SimulatorHost, patience_s=patience_s, **manager),
        [(config, HOST)],
        timeout=240,
    )
    [address] = launcher.gather([worker.request("address")], timeout=240)
    return launcher, worker, address


def far(config, **manager):
    """As EnvManager, on another machine."""
    return Far(*launch(config, **manager))
