"""Episodes to trajectories, with their rewards: on a made-up tokenizer and replicas."""

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from configs.schema import AlgorithmConfig, Config, RolloutConfig
from rollout.agents.loop import AgentLoop, Episode, EpisodeTask, GenerateGroup, SingleTurn
from rollout.agents.worker import AgentWorker, Relay
from rollout.errors import NoTokensError, ReplicaLostError
from rollout.progress import Attempt, EpisodesOpen, PartialCompletion, prompt_checksum
from rollout.request_ids import RequestId
from rollout.rewards.base import Reward, RewardResult
from rollout.types import (
    EMPTY,
    Completion,
    GenerationRequest,
    Prompt,
    SamplingParams,
    TokenSequence,
    TrajectoryGroup,
    VersionSpan,
)
from tests.support.chat_models import base_tokenizer
from tests.support.fakes import make_completion, make_prompt, now, run_virtual, settle
from tests.support.letters import EOS, FakeReplica, FakeTokenizer
from tests.support.rewards import CountsCalls, threaded
from tests.support.rollouts import group_of
from tests.support.sequences import only

SAMPLING = SamplingParams(temperature=0.7, top_p=0.9, top_k=5, max_tokens=8, seed=3)


class BusyReplica(FakeReplica):
    """Takes a second for each call, and knows how many requests it had at a time at most."""

    busy = most = 0

    async def generate(self, requests: list[GenerationRequest]) -> list[Completion]:
        self.busy += len(requests)
        self.most = max(self.most, self.busy)
        await asyncio.sleep(1)
        self.busy -= len(requests)
        return await super().generate(requests)


async def reward_of_length(prompt: Prompt, text: str) -> RewardResult:
    return RewardResult(reward=float(len(text)))


def make_worker(
    reward: Reward = reward_of_length,
    config: Config | None = None,
    loop: AgentLoop | None = None,
    **replicas: FakeReplica,
) -> AgentWorker:
    clients = {name: replica.generate for name, replica in replicas.items()}
    return AgentWorker(
        config=config or Config(),
        tokenizer=FakeTokenizer(),
        loop=loop or SingleTurn(),
        scorer=threaded(reward),
        replicas=clients,
    )


def run_group(worker: AgentWorker, ordinal: int = 17, sampling: SamplingParams = SAMPLING, size: int = 2) -> Any:
    return run_virtual(group_of(worker.run_group(make_prompt(ordinal), "r0", sampling, size, Attempt())))


class AsksNothing:
    """Gives a reward for nothing."""

    def __init__(self, finish_reason: str = "stop"):
        self._finish_reason = finish_reason

    async def run(self, tasks: Sequence[EpisodeTask], generate: GenerateGroup) -> list[Episode]:
        result = RewardResult(reward=0.0, error="no sandbox left")
        return [Episode(sequences=(), finish_reason=self._finish_reason, cached_tokens=0, result=result) for _ in tasks]


def test_a_group_without_a_sampled_token_says_which_loop_asked_for_none() -> None:
    config = Config(rollout=RolloutConfig(agent_loop="my_loop:make"))
    worker = make_worker(config=config, loop=AsksNothing(), r0=FakeReplica())
    with pytest.raises(
        NoTokensError, match=r"^prompt 17: none of its episodes .* in my_loop:make; .* no sandbox left$"
    ):
        run_group(worker)
    aborted = make_worker(config=config, loop=AsksNothing("abort"), r0=FakeReplica())
    assert run_group(aborted).is_aborted, "it is replaced by another prompt"
    (prompt,) = run_virtual(aborted.evaluate([make_prompt(17)], "r0", SAMPLING, 2))
    assert [(sample.accuracy, sample.error) for sample in prompt.samples] == [(0.0, None)] * 2, "no failure of a reward"


# -- groups ------------------------------------------------------------------------------------------------------------


def test_a_group_is_sampled_on_one_replica_and_scored() -> None:
    replicas = {"r0": FakeReplica("ab", "c"), "r1": FakeReplica()}
    group: TrajectoryGroup = run_group(make_worker(**replicas))
    assert [len(replica.calls) for replica in replicas.values()] == [1, 0]
    assert group.prompt == make_prompt(17)
    first, second = group.trajectories
    assert (first.text, first.reward, second.text, second.reward) == ("ab", 2.0, "c", 1.0)
    assert only(first).prompt_ids.tolist() == [1, 2]
    assert only(first).response_ids.tolist() == [97, 98, EOS]
    assert only(first).rollout_logprobs.tolist() == [0, -1, -2]
    assert only(first).loss_mask.all() and len(only(first).loss_mask) == 3
    assert only(first).spans == (VersionSpan(0, 1, 4), VersionSpan(1, 3, 5))
    assert (first.replica, first.finish_reason, first.cached_tokens) == ("r0", "stop", 2)


def requests_of(ordinal: int, size: int, sampling: SamplingParams = SAMPLING) -> list[GenerationRequest]:
    replica = FakeReplica(*"abcdefgh"[:size])
    run_group(make_worker(r0=replica), ordinal, sampling, size)
    return replica.calls[0]


def test_requests_carry_the_prompt_and_the_sampling_with_the_end_of_sequence_as_a_stop() -> None:
    for request in requests_of(17, 2, replace(SAMPLING, stop_token_ids=(9,))):
        assert request.prompt_ids == (1, 2)
        assert replace(request.sampling, seed=3) == replace(SAMPLING, stop_token_ids=(9, EOS))
    assert {r.sampling.stop_token_ids for r in requests_of(17, 2, replace(SAMPLING, ignore_eos=True))} == {()}


def test_rollouts_and_evaluations_of_chats_stop_where_the_template_ends_turns_too() -> None:
    """A base model: its own end is another one."""
    tokenizer = base_tokenizer()
    eos, end = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
    for chat_template, ends in [(False, {eos}), (True, {eos, end})]:
        replica = FakeReplica("a")
        worker = make_worker(r0=replica)
        config = replace(worker.config, data=replace(worker.config.data, chat_template=chat_template))
        worker = replace(worker, config=config, tokenizer=tokenizer)
        run_group(worker, size=1)
        run_virtual(worker.evaluate([make_prompt(3)], "r0", SAMPLING, 1))
        assert [set(request.sampling.stop_token_ids) for (request,) in replica.calls] == [ends, ends]
    tokenizer.eos_token = None
    replica = FakeReplica("a")
    run_group(replace(make_worker(r0=replica), tokenizer=tokenizer), size=1)
    assert replica.calls[0][0].sampling.stop_token_ids == (), "and not (None,)"


def test_request_ids_and_seeds_are_unique_over_all_trajectories_of_a_run() -> None:
    requests = [request for ordinal in range(200) for request in requests_of(ordinal, 8)]
    assert len({request.request_id for request in requests}) == 1600
    assert len({request.sampling.seed for request in requests}) == 1600
    assert all(request.sampling.seed in range(2**31) for request in requests)


def test_a_seed_depends_on_ordinal_index_and_the_runs_seed_alone() -> None:
    whole = [request.sampling.seed for request in requests_of(5, 8)]
    requests_of(4, 8)
    assert [request.sampling.seed for request in requests_of(5, 4)] == whole[:4]
    assert set(whole).isdisjoint(r.sampling.seed for r in requests_of(5, 8, replace(SAMPLING, seed=4)))


# -- rewards: how they are called is in test_scoring.py ----------------------------------------------------------------


async def fails_for_c(prompt: Prompt, text: str) -> RewardResult:
    if text == "c":
        raise ZeroDivisionError("in the reward")
    return RewardResult(reward=1.0, metrics={"format": 0.5})


FAILURE = "own_reward of prompt 17: ZeroDivisionError: in the reward"


def test_a_reward_that_fails_marks_its_trajectory_and_no_other() -> None:
    group: TrajectoryGroup = run_group(make_worker(fails_for_c, r0=FakeReplica("ab", "c")))
    good, failed = group.trajectories
    assert (good.reward, good.reward_metrics, good.error) == (1.0, {"format": 0.5}, None)
    assert (failed.reward, failed.reward_metrics, failed.error) == (0.0, {}, FAILURE)
    assert only(failed).response_ids.tolist() == [99, EOS]
    assert group.errors == [None, FAILURE]


def test_a_response_near_its_limit_is_punished_beside_its_reward() -> None:
    """The last 4 of at most 6 tokens are the buffer: 2 tokens cost nothing, 3 a quarter, 5 three quarters."""
    config = Config(
        rollout=RolloutConfig(max_response_tokens=6),
        algorithm=AlgorithmConfig(overlong_buffer_tokens=4, overlong_penalty=2.0),
    )
    group = run_group(make_worker(config=config, r0=FakeReplica("a", "ab", "abcd")), size=3)
    assert [t.overlong_penalty for t in group.trajectories] == [0, -0.5, -1.5]
    assert [t.reward for t in group.trajectories] == [1, 2, 4]
    assert [t.shaped_reward for t in group.trajectories] == [1, 1.5, 2.5]
    plain = run_group(make_worker(r0=FakeReplica("a", "ab", "abcd")), size=3)
    assert [t.overlong_penalty for t in plain.trajectories] == [0, 0, 0]


def test_remax_has_one_greedy_trajectory_more_that_is_not_trained() -> None:
    replica = FakeReplica("ab", "c", "abcd")
    config = Config(algorithm=AlgorithmConfig(advantage="remax"))
    group: TrajectoryGroup = run_group(make_worker(config=config, r0=replica))
    assert [t.text for t in group.trajectories] == ["ab", "c"]
    assert group.greedy is not None and group.greedy.shaped_reward == 4
    (requests,) = replica.calls
    assert [str(request.request_id) for request in requests] == ["17-0", "17-1", "17-2"]
    greedy = SamplingParams(temperature=0.0, max_tokens=8, stop_token_ids=(EOS,))
    assert requests[2].sampling == greedy
    assert [request.sampling.temperature for request in requests[:2]] == [0.7, 0.7]
    assert run_group(make_worker(r0=FakeReplica("ab", "c"))).greedy is None


class OwnLoop:
    """Its environment rewards the first episode, and failed in the second."""

    async def run(self, tasks: Sequence[EpisodeTask], generate: GenerateGroup) -> list[Episode]:
        episodes = await SingleTurn().run(tasks, generate)
        results = [RewardResult(reward=7.0), RewardResult(reward=0.0, error="gone"), None]
        return [
            replace(episode, result=result, metrics={"index": float(task.index)})
            for task, episode, result in zip(tasks, episodes, results, strict=True)
        ]


def test_an_environments_reward_stands_before_the_reward_function() -> None:
    group = run_group(make_worker(loop=OwnLoop(), r0=FakeReplica("ab", "c", "def")), size=3)
    assert [(t.reward, t.error) for t in group.trajectories] == [(7, None), (0, "gone"), (3, None)]
    assert [t.agent_metrics for t in group.trajectories] == [{"index": 0}, {"index": 1}, {"index": 2}]


# -- episodes one by one -----------------------------------------------------------------------------------------------


class OneByOne:
    """Episode i takes i + 1 seconds, the last one a minute. Episode `raises` raises instead."""

    def __init__(self, raises: int | None = None):
        self._raises = raises
        self.cancelled: list[int] = []

    async def run_episode(self, task: EpisodeTask, generate: GenerateGroup) -> Episode:
        try:
            await asyncio.sleep(60 if task.index == 3 else task.index + 1)
        except asyncio.CancelledError:
            self.cancelled.append(task.index)
            raise
        if task.index == self._raises:
            raise RuntimeError("no such tool") from KeyError("tool")
        (episode,) = await SingleTurn().run([task], generate)
        return episode


async def test_an_episode_is_told_of_and_scored_when_it_ends_and_not_when_the_slowest_does() -> None:
    scored: list[tuple[float, str]] = []

    async def reward(prompt: Prompt, text: str) -> float:
        scored.append((now(), text))
        await asyncio.sleep(5)
        return 1.0

    worker = make_worker(reward, loop=OneByOne(), r0=FakeReplica("a"))
    messages = [(now(), each) async for each in worker.run_group(make_prompt(17), "r0", SAMPLING, 4, Attempt())]
    *told, (_, group) = [(at, each.count if isinstance(each, EpisodesOpen) else each) for at, each in messages]
    assert isinstance(group, TrajectoryGroup) and told == [(1, 3), (2, 2), (3, 1), (60, 0)]
    assert scored == [(1, "a"), (2, "a"), (3, "a"), (60, "a")]
    assert [trajectory.reward for trajectory in group.trajectories] == [1.0] * 4


class SlowReplica(FakeReplica):
    async def generate(self, requests: list[GenerationRequest]) -> list[Completion]:
        await asyncio.sleep(3)
        return await super().generate(requests)


class WithTool:
    """Two requests side by side, of 3 and 4 seconds, then a tool of half an hour; episode 0 has none."""

    async def run_episode(self, task: EpisodeTask, generate: GenerateGroup) -> Episode:
        async def ask(turn: int, after_s: float) -> Episode:
            await asyncio.sleep(after_s)
            (episode,) = await SingleTurn().run(
                [replace(task, request_id=replace(task.request_id, turn=turn))], generate
            )
            return episode

        episode, _ = await asyncio.gather(ask(0, 0.0), ask(1, 1.0))
        await asyncio.sleep(1800 * task.index)
        return episode


async def test_the_time_of_tools_is_that_without_a_request() -> None:
    worker = make_worker(loop=WithTool(), r0=SlowReplica("a"))
    *_, group = [message async for message in worker.run_group(make_prompt(17), "r0", SAMPLING, 2, Attempt())]
    assert isinstance(group, TrajectoryGroup)
    assert [(one.generate_s, one.tool_s) for one in group.trajectories] == [(4, 0), (1804, 1800)]


def test_an_episode_that_raises_ends_the_others_with_its_error() -> None:
    loop = OneByOne(raises=1)
    with pytest.raises(RuntimeError, match="no such tool") as caught:
        run_group(make_worker(loop=loop, r0=FakeReplica("a")), size=4)
    assert isinstance(caught.value.__cause__, KeyError)
    assert sorted(loop.cancelled) == [2, 3]


async def test_a_loop_that_runs_groups_ends_their_episodes_together() -> None:
    async def slow_reward(prompt: Prompt, text: str) -> float:
        await asyncio.sleep(5)
        return 1.0

    worker = make_worker(slow_reward, r0=FakeReplica("a", "b"))
    messages = worker.run_group(make_prompt(17), "r0", SAMPLING, 2, Attempt())
    first, group = [message async for message in messages]
    assert first == EpisodesOpen(0) and isinstance(group, TrajectoryGroup)


# -- evaluation --------------------------------------------------------------------------------------------------------


async def reward_of_letters(prompt: Prompt, text: str) -> RewardResult:
    return RewardResult(reward=-1.0, accuracy=float(len(text)), answer=prompt.ground_truth + text[:1])


def test_an_evaluation_answers_in_the_order_of_its_prompts_and_samples() -> None:
    replica = FakeReplica("a", "abcd")
    prompts = [make_prompt(ordinal) for ordinal in (5, 3, 4)]
    sampling = SamplingParams(temperature=0.6, max_tokens=8)
    part = run_virtual(make_worker(reward_of_letters, r0=replica).evaluate(prompts, "r0", sampling, 2))
    assert [prompt.ordinal for prompt in part] == [5, 3, 4]
    for prompt in part:
        scores = [(sample.accuracy, sample.answer, sample.num_tokens) for sample in prompt.samples]
        assert scores == [(1, f"{prompt.ordinal}a", 2), (4, f"{prompt.ordinal}a", 5)]
    assert {(sample.versions, sample.error) for some in part for sample in some.samples} == {(frozenset({4, 5}), None)}
    ids = [[str(request.request_id) for request in call] for call in replica.calls]
    assert ids == [["eval-5-0", "eval-5-1"], ["eval-3-0", "eval-3-1"], ["eval-4-0", "eval-4-1"]]
    sampled = {request.sampling for call in replica.calls for request in call}
    assert sampled == {replace(sampling, stop_token_ids=(EOS,))}


@pytest.mark.parametrize("per_seat", [2, 4])
async def test_an_evaluation_sends_no_more_at_a_time_than_the_training_would(per_seat: int) -> None:
    """A trajectory that trains on the same replica would wait behind the evaluation. Rewards need no room there."""
    replica = BusyReplica("a", "b")

    async def slow_reward(prompt: Prompt, text: str) -> RewardResult:
        await asyncio.sleep(20)
        return RewardResult(reward=1.0)

    config = Config(rollout=RolloutConfig(max_num_seqs=4, episodes_per_seat=per_seat))
    prompts = [make_prompt(ordinal) for ordinal in range(50)]
    assert len(await make_worker(slow_reward, config, r0=replica).evaluate(prompts, "r0", SAMPLING, 2)) == 50
    assert replica.most == 4 * per_seat + 2
    assert now() == pytest.approx(20 + -(-2 * 50 // replica.most))


def test_prompts_of_an_evaluation_share_the_threads_of_its_rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout.rewards.places.MAX_THREADS", 2)
    reward = CountsCalls()
    prompts = [make_prompt(ordinal) for ordinal in range(6)]
    asyncio.run(make_worker(reward, r0=FakeReplica("a")).evaluate(prompts, "r0", SAMPLING, 1))
    assert reward.most == 2


def test_another_attempt_at_an_evaluation_has_other_names_and_the_same_seeds() -> None:
    """Ray does not end what a lost worker had running, so the replica may still have the requests of the first."""
    replica, sampling = FakeReplica("ab", "c"), SamplingParams(max_tokens=8, seed=1)
    worker = make_worker(r0=replica)
    for attempt in (3, 4):
        run_virtual(worker.evaluate([make_prompt(5)], "r0", sampling, 2, attempt=attempt))
    first, second = replica.calls
    assert [str(request.request_id) for request in (*first, *second)] == [
        "eval-5.3-0",
        "eval-5.3-1",
        "eval-5.4-0",
        "eval-5.4-1",
    ]
    assert [request.sampling for request in first] == [request.sampling for request in second]
    assert first[0].sampling.seed != first[1].sampling.seed


def test_an_evaluation_goes_through_the_agent_loop_and_counts_what_fails_as_0() -> None:
    part = run_virtual(
        make_worker(loop=OwnLoop(), r0=FakeReplica("ab", "c", "def")).evaluate([make_prompt(0)], "r0", SAMPLING, 3)
    )
    [prompt] = part
    assert [(sample.accuracy, sample.error) for sample in prompt.samples] == [(7, None), (0, "gone"), (3, None)]
    assert {sample.answer for sample in prompt.samples} == {None}


def test_a_reward_that_failed_is_neither_right_nor_a_vote() -> None:
    async def reward(prompt: Prompt, text: str) -> RewardResult:
        return RewardResult(reward=0.0, accuracy=1.0, answer=text, error="gone")

    part = run_virtual(make_worker(reward, r0=FakeReplica("abc")).evaluate([make_prompt(5)], "r0", SAMPLING, 1))
    [sample] = part[0].samples
    assert (sample.accuracy, sample.answer, sample.error) == (0.0, None, "own_reward of prompt 5: gone")


class Delegates:
    """Asks, lets a sub-agent ask, and has the last word."""

    async def run(self, tasks: Sequence[EpisodeTask], generate: GenerateGroup) -> list[Episode]:
        episodes: list[Episode] = []
        for task in tasks:
            of_sub = replace(task, request_id=replace(task.request_id, turn=1))
            main, sub = await SingleTurn().run([task, of_sub], generate)
            sequences = (*main.sequences, *sub.sequences)
            episodes.append(Episode(sequences=sequences, finish_reason="stop", cached_tokens=0, newest=0))
        return episodes


def test_the_text_ends_with_what_the_policy_said_last() -> None:
    group = run_group(make_worker(loop=Delegates(), r0=FakeReplica("main", "sub")), size=1)
    assert group.trajectories[0].text == "sub\nmain"


# -- requests whose replica is lost ------------------------------------------------------------------------------------

NAME = RequestId(7, episode=2, turn=1)
REQUEST = GenerationRequest(request_id=NAME, prompt_ids=(1,), sampling=SamplingParams())


class DyingReplica:
    def __init__(self) -> None:
        self.events: list[str] = []
        self.dies = asyncio.Event()

    async def __call__(self, requests: list[GenerationRequest]) -> list[Completion]:
        self.events += [f"begin {request.request_id}" for request in requests]
        await self.dies.wait()
        raise ReplicaLostError("it died")

    async def abort(self, request_ids: Collection[RequestId]) -> bool:
        self.events += [f"abort {request_id}" for request_id in request_ids]
        return True


async def no_replica(requests: list[GenerationRequest]) -> list[Completion]:
    return [EMPTY] * len(requests)


async def test_requests_end_on_the_replica_of_the_present_attempt_and_nowhere_while_there_is_none() -> None:
    first, second = DyingReplica(), DyingReplica()
    relay = Relay(first, Attempt())
    asking = asyncio.create_task(relay([REQUEST]))
    await settle()
    assert await relay.abort([NAME])
    first.dies.set()
    await settle()
    assert not await relay.abort([NAME]), "it waits for a replica"
    relay.move(second, Attempt(number=1))
    await settle()
    assert await relay.abort([NAME])
    assert first.events == ["begin 7-2-1", "abort 7-2-1"] and second.events == ["begin 7.1-2-1", "abort 7.1-2-1"]
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking


async def test_an_answer_that_an_episode_has_is_not_the_one_to_another_request_of_its_prompt() -> None:
    """The second of three requests of one prompt, as best of n makes them, is under way when the replica dies. The
    third is made after the move."""
    requests = [replace(REQUEST, request_id=replace(NAME, turn=turn)) for turn in range(3)]
    dying, asked = DyingReplica(), list[int]()

    async def alive(requests: list[GenerationRequest]) -> list[Completion]:
        asked.extend(request.request_id.turn for request in requests)
        return [EMPTY] * len(requests)

    async def alive_for_the_first(requests: list[GenerationRequest]) -> list[Completion]:
        return await (dying if requests[0].request_id.turn else alive)(requests)

    relay = Relay(alive_for_the_first, Attempt())
    await relay(requests[:1])
    asking = asyncio.create_task(relay(requests[1:2]))
    dying.dies.set()
    await settle()
    checksum, completion = prompt_checksum(REQUEST.prompt_ids), make_completion([5], [3], "stop")
    first = PartialCompletion(prompt_checksum=checksum, completion=completion)
    relay.move(alive, Attempt(number=1, partials={(2, 0): first}))
    await asking
    assert await relay(requests[2:]) == [EMPTY] and asked == [0, 1, 2]
    assert await relay(requests[:1]) == [completion], "the same one hears it again"


async def test_what_cannot_end_requests_is_cancelled() -> None:
    assert not await Relay(no_replica, Attempt()).abort([NAME])


# -- what a reward reads -----------------------------------------------------------------------------------------------


class Tells(Delegates):
    """A loop in which a tool answers the policy's first turn with `said`, and another sequence holds more of it."""

    said = "the tests say: #### 42"

    async def run(self, tasks: Sequence[EpisodeTask], generate: GenerateGroup) -> list[Episode]:
        return [self._between(episode) for episode in await super().run(tasks, generate)]

    def _between(self, episode: Episode) -> Episode:
        main, sub = episode.sequences
        heard = Completion.unsampled(np.array([*map(ord, self.said)], np.int32))
        parts = [heard, completion_of(sub), heard, completion_of(main), heard]
        mask = np.repeat([False, True, False, True, False], [part.num_tokens for part in parts])
        sequence = TokenSequence.of(main.prompt_ids, Completion.concatenate(parts), mask)
        return replace(episode, sequences=(sequence,), newest=-1)


def completion_of(sequence: TokenSequence) -> Completion:
    return Completion(
        token_ids=sequence.response_ids,
        logprobs=sequence.rollout_logprobs,
        spans=sequence.spans,
        finish_reason="stop",
    )


async def echo(prompt: Prompt, text: str) -> RewardResult:
    return RewardResult(reward=0.0, answer=text)


def test_a_reward_reads_what_the_policy_said_turn_by_turn_and_no_tool() -> None:
    """People read all of it."""
    replica = FakeReplica("I do not know.", "Let me look.")
    [evaluated] = run_virtual(make_worker(echo, loop=Tells(), r0=replica).evaluate([make_prompt(5)], "r0", SAMPLING, 1))
    [sample] = evaluated.samples
    assert sample.answer == "Let me look.\nI do not know."
    assert sample.response == f"{Tells.said}Let me look.{Tells.said}I do not know.{Tells.said}"


def test_what_a_loop_leaves_out_of_the_loss_is_still_what_the_policy_said() -> None:
    class Masks(SingleTurn):
        async def run(self, tasks: Sequence[EpisodeTask], generate: GenerateGroup) -> list[Episode]:
            (episode,) = await super().run(tasks, generate)
            (sequence,) = episode.sequences
            mask = np.arange(len(sequence.loss_mask)) >= 2
            return [replace(episode, sequences=(replace(sequence, loss_mask=mask),))]

    group = run_group(make_worker(loop=Masks(), r0=FakeReplica("abc")), size=1)
    assert group.trajectories[0].reward == 3
