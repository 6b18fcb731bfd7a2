"""The sandboxes of an agent worker: some are kept started, and no more run than may."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakKeyDictionary

from configs.runtime.deadline import within
from configs.sandbox import SandboxConfig
from rollout.agents.loop import at_end
from rollout.agents.pool import Warmed
from rollout.environments.sandbox.launching import make_launcher
from rollout.environments.sandbox.sandbox import Sandbox

logger = logging.getLogger(__name__)


class Sandboxes:
    """Lends sandboxes, each to one episode or reward at a time. All methods are called on one event loop.

    Example:
        async with sandboxes().lent() as sandbox:
            outcome = await sandbox.exec(["python3", "-c", "print(2 + 2)"])
    """

    def __init__(self, config: SandboxConfig):
        self.config = config
        self._launcher = make_launcher(config)
        self._free = asyncio.Semaphore(config.max_running)
        self._warm: Warmed[Sandbox] = Warmed(
            self._start,
            end=Sandbox.stop,
            renew=Sandbox.renew if config.reuse else None,
            works=lambda sandbox: not sandbox.is_lost,
            size=config.warm,
            timeout_s=config.start_timeout_s,
        )
        self._lent: dict[int, Sandbox] = {}
        """The sandboxes that are in use, by `id`."""
        self._ending: set[asyncio.Task[None]] = set()

    async def take(self, image: str | None = None) -> Sandbox:
        """Return a sandbox for the caller alone, of sandbox.image or of another image, of which none are kept.

        Raises:
            TimeoutError: None became free, or started, in time. It names the key.
            SandboxUnavailableError: None can be started.
        """
        config = self.config
        what = f"waiting for one of sandbox.max_running={config.max_running} sandboxes"
        async with within(config.wait_timeout_s, "sandbox.wait_timeout_s", what):
            await self._free.acquire()
        try:
            is_usual = image is None or image == config.image
            sandbox = await (self._warm.take() if is_usual else Sandbox.start(config, image, self._launcher))
        except BaseException:
            self._free.release()
            raise
        self._lent[id(sandbox)] = sandbox
        return sandbox

    def give_back(self, sandbox: Sandbox) -> None:
        """Give back what `take` returned, once. It is ended or renewed meanwhile. Raises ValueError for another."""
        if self._lent.pop(id(sandbox), None) is None:
            raise ValueError("the sandbox is not lent: it was given back before, or is of another pool")
        if sandbox.image == self.config.image:
            self._warm.give_back(sandbox, is_broken=sandbox.is_lost)
        else:
            task = asyncio.create_task(self._stopped(sandbox))
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)
        self._free.release()

    @asynccontextmanager
    async def lent(self) -> AsyncIterator[Sandbox]:
        """Lend a sandbox to the block. Raises as `take` does."""
        sandbox = await self.take()
        try:
            yield sandbox
        finally:
            self.give_back(sandbox)

    async def close(self) -> None:
        """End all, also those that are in use: the run is over."""
        stops = [self._stopped(sandbox) for sandbox in self._lent.values()]
        await asyncio.gather(self._warm.close(), *stops, *self._ending)

    async def _start(self) -> Sandbox:
        return await Sandbox.start(self.config, launcher=self._launcher)

    async def _stopped(self, sandbox: Sandbox) -> None:
        try:
            await sandbox.stop()
        except Exception as error:  # nobody waits for it
            logger.warning("a sandbox did not end, and may be left behind", exc_info=error)


# -- those of this process ---------------------------------------------------------------------------------------------

_config = SandboxConfig()
_by_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, Sandboxes] = WeakKeyDictionary()


def provide(config: SandboxConfig) -> None:
    """Set the config of the sandboxes of this process. Agent loops and rewards are functions of a user, and so have no
    other way to it."""
    global _config  # noqa: PLW0603
    _config = config


def sandbox_config() -> SandboxConfig:
    """Return the config that this process was given."""
    return _config


def sandboxes() -> Sandboxes:
    """Return the sandboxes of this event loop. They begin when they are first asked for, and end with the run."""
    loop = asyncio.get_running_loop()
    made = _by_loop.get(loop)
    if made is None:
        made = _by_loop[loop] = Sandboxes(_config)

        async def close() -> None:
            await _by_loop.pop(loop).close()

        at_end(close)
    return made
