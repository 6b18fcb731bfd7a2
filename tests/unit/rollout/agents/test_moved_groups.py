"""Groups that go on elsewhere, or with another agent worker, as a run wires them: real replicas, simulated engines."""

import asyncio
from dataclasses import replace

import pytest

from rollout.agents.loop import Episode, EpisodeTask, GenerateGroup
from rollout.engines.simulated import SimulatedSequence
from rollout.snapshot import capture
from rollout.types import Completion, GenerationRequest, TokenSequence
from tests.support.fakes import ClockedEngine, now
from tests.support.routes import input_rows, some_routes
from tests.support.scenes import GROUP_SIZE, Scene
from tests.support.sequences import only


async def test_what_a_lost_agent_worker_had_running_gives_its_seats_to_the_next_attempt() -> None:
    scene = Scene(num_replicas=1)
    (engine,) = scene.engines
    scene.lost_at = 3.5
    running = await scene.start()
    await asyncio.sleep(3.4)
    assert (engine.running, engine.admission.waiting) == (["0-0", "0-1"], ["0-2", "0-3"])
    await asyncio.sleep(0.2)
    assert (engine.running, engine.admission.waiting) == (["0.1-0", "0.1-1"], ["0.1-2", "0.1-3"])
    group = await scene.group()
    assert [len(only(trajectory).response_ids) for trajectory in group.trajectories] == [10] * GROUP_SIZE
    assert {trajectory.finish_reason for trajectory in group.trajectories} == {"stop"}
    assert engine.usage.tokens <= 10 * GROUP_SIZE + 2, "but for the step that was under way"
    await running


async def test_a_checkpoint_does_not_take_what_was_abandoned_for_what_a_client_aborted() -> None:
    """The group waits for an update to end, and meanwhile the replica tells how its requests ended."""
    scene = Scene(num_replicas=1)
    scene.lost_at = 3.5
    running = await scene.start()
    await scene.manager.updating.acquire()
    await asyncio.sleep(4)
    assert scene.engines[0].running == []
    await scene.fleet.collect_progress()
    (kept,) = capture(scene.rollouter).under_way
    partials = {key: some.completion for key, some in kept.partials.items()}
    assert {key: some.num_tokens for key, some in partials.items()} == {(0, 0): 3, (1, 0): 3}
    assert {some.finish_reason for some in partials.values()} == {""}
    running.cancel()


class UsesATool:
    """Two turns of five tokens each, and between them a tool whose effect must not come twice."""

    def __init__(self) -> None:
        self.used_by: list[int] = []

    async def run_episode(self, task: EpisodeTask, generate: GenerateGroup) -> Episode:
        sampling = replace(task.sampling, max_tokens=5)
        request = GenerationRequest(request_id=task.request_id, prompt_ids=task.prompt.token_ids, sampling=sampling)
        (first,) = await generate([request])
        self.used_by.append(task.index)
        prompt_ids = (*request.prompt_ids, *first.token_ids.tolist())
        (second,) = await generate(
            [replace(request, request_id=replace(task.request_id, turn=1), prompt_ids=prompt_ids)]
        )
        whole = TokenSequence.of(task.prompt.token_ids, Completion.concatenate([first, second]))
        return Episode(sequences=(whole,), finish_reason="length", cached_tokens=0)


@pytest.mark.parametrize("replayable", [True, False])
async def test_an_episode_does_not_notice_that_its_replica_was_lost(replayable: bool) -> None:
    """The first replica dies at 7.5 s: two episodes are in their second turn, the two others wait for their first."""
    loop = UsesATool()
    scene = Scene(num_replicas=2, loop=loop, replayable=replayable)
    running = await scene.start()
    await asyncio.sleep(7.5)
    assert loop.used_by == [0, 1]
    await scene.fleet.collect_progress()  # as the monitor does
    scene.engines[0].kill()
    next_group = GROUP_SIZE  # which has room, and waits for a slot
    assert scene.in_flight == next_group + 4
    await asyncio.sleep(7)
    assert scene.in_flight == next_group + 2, "the first two have ended on the other replica"
    group = await scene.group()
    assert sorted(loop.used_by) == [0, 1, 2, 3]
    assert [trajectory.num_tokens for trajectory in group.trajectories] == [10] * GROUP_SIZE
    assert {trajectory.replica for trajectory in group.trajectories} == {"replica-1"}
    assert scene.engines[1].usage.tokens == 4 * 10 - 2 * 5 - 2 * 2, "no token was sampled twice"
    await running
    assert scene.in_flight == 0


class RoutedEngine(ClockedEngine):
    """Sends each input to the experts with the number of its place, and 20 more in the second engine."""

    def __init__(self, index: int):
        super().__init__(max_num_seqs=2)
        self._first = 20 * index
        self._sequences: list[tuple[SimulatedSequence, GenerationRequest]] = []

    def _start(self, request: GenerationRequest) -> SimulatedSequence:
        self._sequences.append((super()._start(request), request))
        return self._sequences[-1][0]

    def _sampled(self, sequence: SimulatedSequence, finish_reason: str) -> Completion:
        completion = super()._sampled(sequence, finish_reason)
        (request,) = (request for each, request in self._sequences if each is sequence)
        places = range(request.num_routed, len(request.prompt_ids) + completion.num_tokens - 1)
        return replace(completion, routes=some_routes([self._first + place for place in places]))


async def test_routes_of_a_moved_group_are_those_of_the_first_attempt_and_its_prompt_has_them_once() -> None:
    """The first replica dies when two episodes wait for their second turn, and two have two tokens of their first."""
    scene = Scene(num_replicas=2, loop=UsesATool(), make_engine=RoutedEngine)
    running = await scene.start()
    await asyncio.sleep(7.5)
    await scene.fleet.collect_progress()
    scene.engines[0].kill()
    group = await scene.group()
    between_turns, in_first = [*range(6), *range(26, 31)], [*range(3), *range(23, 31)]
    assert input_rows(group) == [between_turns, between_turns, in_first, in_first]
    sequences = [only(trajectory) for trajectory in group.trajectories]
    assert [sequence.num_prompt_routes for sequence in sequences] == [2] * GROUP_SIZE
    assert len({id(sequence.prompt_routes) for sequence in sequences}) == 1
    await running


async def test_episodes_that_cannot_be_replayed_begin_anew_after_their_agent_worker_was_lost() -> None:
    scene = Scene(num_replicas=1, replayable=False)
    scene.lost_at = 3.5
    running = await scene.start()
    group = await scene.group()
    assert [trajectory.num_tokens for trajectory in group.trajectories] == [10] * GROUP_SIZE
    assert scene.engines[0].usage.tokens == 4 * 10 + 2 * 3, "nothing was heard again"
    await running


async def test_episodes_that_cannot_be_replayed_and_were_lost_while_they_waited_begin_anew() -> None:
    """Their first answers, of the replica that died, are not heard again."""
    loop = UsesATool()
    scene = Scene(num_replicas=2, loop=loop, replayable=False)
    running = await scene.start()
    await scene.fleet.collect_progress()
    await asyncio.sleep(7.5)
    await scene.manager.updating.acquire()  # the next attempt waits for the update to end
    await scene.fleet.collect_progress()
    scene.engines[0].kill()
    await asyncio.sleep(1)
    scene.lost_at = now()
    scene.manager.updating.release()
    group = await scene.group()
    assert sorted(loop.used_by) == [0, 0, 1, 1, 2, 3]
    assert [trajectory.num_tokens for trajectory in group.trajectories] == [10] * GROUP_SIZE
    assert scene.engines[1].usage.tokens == 4 * 10
    await running


async def test_episodes_wait_for_another_replica_as_long_as_an_attempt_may_take() -> None:
    loop = UsesATool()
    scene = Scene(num_replicas=2, loop=loop)
    running = await scene.start()
    await scene.fleet.collect_progress()  # from now on its answers are kept until they are asked for
    await asyncio.sleep(7.5)
    await scene.manager.updating.acquire()
    await scene.fleet.collect_progress()
    scene.engines[0].kill()
    await asyncio.sleep(scene.worker.config.rollout.group_timeout_s + 1)
    scene.manager.updating.release()
    await scene.group()
    assert sorted(loop.used_by) == [0, 0, 1, 1, 2, 3], "those of the first began again, and heard what they had"
    assert scene.engines[1].usage.tokens == 4 * 10 - 2 * 5 - 2 * 2
    await running


async def test_versions_ascend_when_a_replica_dies_that_caught_up_between_two_updates() -> None:
    scene = Scene(num_replicas=2)
    running = await scene.start()
    await asyncio.sleep(1.5)
    scene.workers.global_steps = 2
    await scene.fleet.eject("replica-0", RuntimeError("it evaluates"))
    await scene.manager.catch_up(["replica-0"])
    await asyncio.sleep(4)
    await scene.fleet.collect_progress()  # as the monitor does
    scene.engines[0].kill()
    versions = [only(trajectory).token_versions().tolist() for trajectory in (await scene.group()).trajectories]
    assert versions == [sorted(some) for some in versions]
    assert {tuple(sorted(set(some))) for some in versions} == {(0, 2), (2,)}
    await running


async def test_versions_ascend_when_a_replica_dies_that_has_an_update_before_the_others() -> None:
    scene = Scene(num_replicas=2)
    running = await scene.start()
    first, second = scene.engines
    await asyncio.sleep(1.5)
    assert first.running and not second.running
    second.seconds["stage"] = 20
    scene.workers.global_steps = 1
    updating = asyncio.create_task(scene.manager.update_weights(1))
    await asyncio.sleep(4)
    assert scene.replicas[0].global_steps == 1 and scene.replicas[1].global_steps == 0
    await scene.fleet.collect_progress()  # as the monitor does
    first.kill()
    group = await scene.group()
    await updating
    versions = [only(trajectory).token_versions().tolist() for trajectory in group.trajectories]
    assert versions == [sorted(some) for some in versions] and versions[0][:2] == [0, 0] and versions[0][-1] == 1
    await running
