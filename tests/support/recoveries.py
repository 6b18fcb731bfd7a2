"""RecoveringWorkers around a fake group whose weights are the list of what they were trained on."""

import asyncio
import functools
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from configs.schema import Config
from tests.support.checkpoints import write_state
from trainer.batch import StepResult
from trainer.checkpoint.store import Checkpoint, CheckpointStore
from trainer.metrics import Last
from trainer.worker.recovery import RecoveringWorkers


@dataclass
class Group:
    """The n-th call that is named in `deaths` finds a dead worker; in `errors`, raises without any death."""

    deaths: list[str] = field(default_factory=list)
    errors: dict[str, Exception] = field(default_factory=dict)
    events: list[str] = field(default_factory=list)
    weights: list[str] = field(default_factory=list)
    spares_after: list[int] = field(default_factory=list)
    """The number of events before each call that asks for spare processes."""
    lost: str | None = None
    start_s: dict[str, float] = field(default_factory=dict)
    gate: asyncio.Event | None = None
    """The event that starting again waits for, if there is one."""
    errors_end_with_start: bool = False
    errors_pass: bool = False
    """Whether each error is raised once only."""

    def _happen(self, event: str) -> None:
        self.events.append(event)
        if event in self.errors:
            raise self.errors.pop(event) if self.errors_pass else self.errors[event]
        if event in self.deaths:
            self.deaths.remove(event)
            self.lost = "train worker 1 died"
        if self.lost is not None:
            raise ConnectionError("whatever the survivors say")

    async def setup(self, model_path: str) -> int:
        return 0

    def kill(self) -> None: ...

    def keep_spares(self) -> None:
        self.spares_after.append(len(self.events))

    async def score(self, batch: Any) -> Any:
        self._happen(f"score {batch}")
        return {"values": list(self.weights)}

    async def train_step(self, batch: Any, global_steps: int) -> Any:
        await asyncio.sleep(0)
        self.weights = [*self.weights, batch]  # even if it dies in it
        self._happen(f"train {global_steps}")
        return StepResult({"trained": Last(float(len(self.weights)))})

    async def publish(self, order: Any) -> Any:
        self._happen(f"publish {order.global_steps}")
        return {"global_steps": order.global_steps, "weights": list(self.weights)}

    async def send(self, manifest: Any) -> int:
        self._happen("send")
        return 0

    async def stage_checkpoint(self, folder: Path) -> None:
        self._happen("stage")
        write_state(folder, {"weights": " ".join(self.weights).encode()})

    async def finish_checkpoint(self) -> None:
        self._happen("finish")

    async def model_files(self) -> dict[str, bytes]:
        return {}

    async def load_checkpoint(self, checkpoint: Path) -> None:
        self._happen(f"load {checkpoint.parent.name}")
        self.weights = (checkpoint / "weights").read_text().split()

    async def copy_state(self) -> list[Any]:
        self._happen("copy")
        return list(self.weights)

    async def load_copies(self, copies: list[Any]) -> None:
        self.weights = list(copies)  # on some ranks, even if others cannot
        self._happen("load copies")

    async def find_lost(self) -> str | None:
        return self.lost

    async def start_again(self) -> None:
        if self.gate is not None:
            await self.gate.wait()
        self.lost, self.weights = None, []
        self.errors = {} if self.errors_end_with_start else self.errors
        self._happen("start")


@dataclass
class Scene:
    folder: Path
    group: Group = field(default_factory=Group)
    config: Config = field(default_factory=Config)
    reports: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.store = CheckpointStore(self.folder)
        self.workers = RecoveringWorkers(
            group=self.group, store=self.store, config=self.config, report=self.reports.append
        )

    async def train(self, *steps: int) -> list[float]:
        batches: Any = {step: f"b{step}" for step in steps}
        results = [await self.workers.train_step(batch, step) for step, batch in batches.items()]
        return [result.metrics["trained"].value for result in results]

    async def score(self, batch: Any) -> Any:
        return await self.workers.score(batch)

    async def save(self, step: int) -> Checkpoint:
        aside = self.store.begin(step)
        await self.workers.stage_checkpoint(aside / "train")
        checkpoint = self.store.publish(aside, step, self.store.seal(aside, step, {}))
        self.workers.forget_before(step)
        return checkpoint


def within_deadline(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Make a coroutine a test on the real clock that ends within ten seconds."""

    @functools.wraps(test)
    def run(**parameters: Any) -> None:
        asyncio.run(asyncio.wait_for(test(**parameters), 10))

    return run
