"""Evaluation beside the training: who is pinned, at which version, what goes on meanwhile, and what a death costs."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from configs.schema import WeightSyncConfig
from rollout.errors import ReplicaLostError, TooFewReplicasError
from rollout.evaluation.pinned import MixedVersionsError, PinnedEvaluator
from rollout.fleet.control import FleetControl
from rollout.fleet.fleet import ReplicaFleet
from rollout.types import EvaluatedPrompt, EvaluatedSample, Prompt, SamplingParams
from tests.support.evaluations import make_evaluator
from tests.support.fakes import now, settle
from tests.support.updates import DEADLINES, WHOLE, FakeSource, FakeTarget
from weight_sync.checkpoint_manager import CheckpointManager


@dataclass
class Scene:
    """Replicas whose updates take no time, a trainer, and an evaluation of `seconds` whose tokens are of the version
    that its replica has at its start and of the one at its end."""

    num_replicas: int = 2
    num_pinned: int = 1
    min_replicas: int = 1
    seconds: float = 10.0
    deaths: dict[str, float] = field(default_factory=dict)
    """Replica -> when it dies under the evaluation."""
    max_replacements: int = 0

    def __post_init__(self) -> None:
        self.events: list[str] = []
        self.messages: list[str] = []
        self.source = FakeSource("trainer", self.events)
        names = "abcd"[: self.num_replicas]
        self.targets = {name: FakeTarget(name, self.events) for name in names}
        self.fleet = ReplicaFleet(
            list(self.targets.values()),  # pyright: ignore[reportArgumentType]
            8,
            self.min_replicas,
            lambda event: self.messages.append(event.text),
            max_replacements=self.max_replacements,
        )
        self.router = self.fleet.router
        self.manager = CheckpointManager(self.source, self.fleet, WeightSyncConfig(**DEADLINES))
        evaluator = make_evaluator(self, 4, self.router, on_lost=self.fleet.lose, timeout_s=100)  # pyright: ignore[reportArgumentType]
        self.evaluator = PinnedEvaluator(
            evaluator=evaluator,
            fleet=self.fleet,
            updating=self.manager.updating,
            catch_up=self.manager.catch_up,
            num_replicas=self.num_pinned,
            report=self.messages.append,
        )
        self.asked: list[tuple[str, float]] = []

    async def evaluate(
        self, prompts: Sequence[Prompt], replica: str, sampling: SamplingParams, num_samples: int, attempt: int
    ) -> list[EvaluatedPrompt]:
        self.asked.append((replica, now()))
        target = self.targets[replica]
        first, dies = target.state.global_steps, self.deaths.get(replica)
        await asyncio.sleep(self.seconds / 2 if dies is None else dies)
        if dies is not None:
            raise ReplicaLostError(f"{replica} died while it generated")
        await asyncio.sleep(self.seconds / 2)
        versions = frozenset({first, target.state.global_steps})
        sample = EvaluatedSample(accuracy=1.0, answer="", num_tokens=1, versions=versions)
        return [EvaluatedPrompt(ordinal=prompt.ordinal, data_source="", samples=(sample,)) for prompt in prompts]

    def versions(self) -> dict[str, int]:
        return {name: target.state.global_steps for name, target in self.targets.items()}

    async def update(self, version: int) -> None:
        self.source.global_steps = version
        await self.manager.update_weights(version)

    async def replace(self) -> None:
        """Start the replica that the fleet wants next, in no time, and bring it to the trainer's weights."""
        name = self.fleet.wanted.get_nowait()
        self.targets[name] = FakeTarget(name, self.events)
        self.fleet.register(self.targets[name])  # pyright: ignore[reportArgumentType]
        await self.manager.catch_up([name])

    def of(self, name: str) -> list[str]:
        """Its updates."""
        calls = (f"{name}.stage", f"{name}.commit")
        return [event.removeprefix(f"{name}.") for event in self.events if event.startswith(calls)]


async def test_a_pinned_replica_keeps_its_version_while_updates_go_on_and_then_catches_up() -> None:
    scene = Scene()
    await scene.update(1)
    evaluating = asyncio.create_task(scene.evaluator.evaluate())
    await settle()
    assert scene.router.healthy == ["a"] and [target.name for target in scene.fleet.targets] == ["a"]
    assert [status.name for status in await FleetControl(scene.fleet).statuses()] == ["a", "b"], (
        "control still reaches it"
    )
    scene.events.clear()
    await scene.update(2)
    await scene.update(3)
    assert scene.versions() == {"a": 3, "b": 1} and scene.of("b") == []
    assert not evaluating.done()
    evaluation = await evaluating
    assert (evaluation.pinned, evaluation.versions) == (True, (1,))
    assert scene.asked == [("b", 0.0)]
    assert scene.of("a") == WHOLE * 2 and scene.of("b") == WHOLE
    assert scene.versions() == {"a": 3, "b": 3} and scene.router.healthy == ["a", "b"]
    assert scene.messages == ["b is out of service: it evaluates", "b is back in service"]


async def test_a_single_replica_is_shared_and_updated_under_the_evaluation_which_says_so() -> None:
    scene = Scene(num_replicas=1)
    await scene.update(1)
    evaluating = asyncio.create_task(scene.evaluator.evaluate())
    await settle()
    assert scene.router.healthy == ["a"]
    await scene.update(2)
    evaluation = await evaluating
    assert (evaluation.pinned, evaluation.versions) == (False, (1, 2))
    assert len(scene.source.orders) == 2, "nobody has to catch up"


@pytest.mark.parametrize(
    ("num_replicas", "num_pinned", "expected"), [(4, 2, "cd"), (4, 9, "bcd"), (2, 9, "b"), (3, 0, ""), (1, 1, "")]
)
async def test_as_many_are_pinned_as_the_key_says_and_one_is_always_left(
    num_replicas: int, num_pinned: int, expected: str
) -> None:
    scene = Scene(num_replicas=num_replicas, num_pinned=num_pinned)
    await scene.update(1)
    evaluation = await scene.evaluator.evaluate()
    assert evaluation.pinned == bool(expected)
    assert "".join(name for name, _ in scene.asked) == (expected or "abcd"[:num_replicas])
    assert scene.router.healthy == list("abcd"[:num_replicas])


async def test_an_update_under_way_is_over_before_a_replica_is_pinned() -> None:
    scene = Scene()
    scene.targets["b"].seconds["stage"] = 3
    await scene.update(1)
    updating = asyncio.create_task(scene.update(2))
    await settle()
    assert (await scene.evaluator.evaluate()).versions == (2,)
    assert scene.asked == [("b", 6.0)] and updating.done()


async def test_a_pinned_replica_that_dies_is_one_more_evaluation_on_what_is_left() -> None:
    scene = Scene(num_replicas=3, deaths={"c": 4.0})
    await scene.update(1)
    evaluating = asyncio.create_task(scene.evaluator.evaluate())
    await settle()
    await scene.update(2)
    evaluation = await evaluating
    assert (evaluation.pinned, evaluation.versions) == (True, (2,)), "of the version that is held then"
    assert scene.asked == [("c", 0.0), ("b", 4.0)]
    assert scene.router.healthy == ["a", "b"] and "c.kill" in scene.events
    assert "evaluating again, on what is left: every replica that evaluated was lost" in scene.messages


async def test_another_pinned_one_takes_the_share_of_the_dead_one_at_the_same_version() -> None:
    scene = Scene(num_replicas=4, num_pinned=2, deaths={"d": 4.0})
    await scene.update(1)
    evaluating = asyncio.create_task(scene.evaluator.evaluate())
    await settle()
    await scene.update(2)
    assert (await evaluating).versions == (1,)
    assert scene.asked == [("c", 0.0), ("d", 0.0), ("c", 4.0)]
    assert scene.versions()["c"] == 2 and scene.router.healthy == ["a", "b", "c"]


@pytest.mark.parametrize("dies_under_it", [True, False])
async def test_the_replacement_of_a_single_replica_is_waited_for(dies_under_it: bool) -> None:
    scene = Scene(num_replicas=1, max_replacements=1, deaths={"a": 4.0})
    await scene.update(1)
    if not dies_under_it:
        await scene.fleet.lose("a", OSError("died"))
    evaluating = asyncio.create_task(scene.evaluator.evaluate())
    await asyncio.sleep(20)
    assert scene.router.healthy == [] and not evaluating.done()
    await scene.replace()
    assert (await evaluating).versions == (1,)
    assert scene.asked == [("a", 0.0)] * dies_under_it + [("replica-1", 20.0)]
    assert not any("evaluating again" in message for message in scene.messages)


@pytest.mark.parametrize(("min_replicas", "is_enough"), [(1, True), (2, False)])
async def test_who_is_pinned_counts_among_those_that_are_left(min_replicas: int, is_enough: bool) -> None:
    """The other one dies: the pinned one trains on, when it has evaluated. Updates have nowhere to go until then."""
    scene = Scene(min_replicas=min_replicas)
    await scene.update(1)
    evaluating = asyncio.create_task(scene.evaluator.evaluate())
    await settle()
    if not is_enough:
        with pytest.raises(TooFewReplicasError, match=r"^1 replicas are left .*min_replicas=2"):
            await scene.fleet.lose("a", OSError("died"))
        evaluating.cancel()
        return
    await scene.fleet.lose("a", OSError("died"))
    await scene.update(2)
    assert scene.versions()["b"] == 1
    assert (await evaluating).versions == (1,)
    assert scene.versions()["b"] == 2 and scene.router.healthy == ["b"]
    assert [receivers for receivers, _ in scene.source.orders] == [{"a": 1, "b": 1}, {"b": 1}]


async def test_tokens_of_two_versions_from_a_pinned_replica_are_an_error() -> None:
    scene = Scene()
    await scene.update(1)
    evaluating = asyncio.create_task(scene.evaluator.evaluate())
    await settle()
    scene.fleet.unpin(["b"])
    await scene.update(2)
    with pytest.raises(MixedVersionsError, match=r"b were pinned and answered with versions \(1, 2\)"):
        await evaluating
