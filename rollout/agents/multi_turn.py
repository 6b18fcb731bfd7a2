"""Episodes of several turns: the policy writes, the environment answers, until it is done or the response is full."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property
from itertools import takewhile
from typing import Any

import numpy as np

from rollout.actors.resident import Resident
from rollout.agents.chat_turns import ChatTurns
from rollout.agents.environment import Environment, Observation, Step, Turn
from rollout.agents.loop import Close, Episode, EpisodeTask, GenerateGroup, close_all
from rollout.agents.threads import OneThread, called
from rollout.agents.tool_processes import ToolProcesses, is_plain, processes_here
from rollout.chat.messages import Message, ToolSpec
from rollout.chat.text_decoder import text_decoder
from rollout.chat.text_encoder import LONG_TEXT, text_encoder
from rollout.events.kinds import ToolEnded, ToolStarted
from rollout.rewards.base import RewardResult
from rollout.rewards.outcome import checked_metrics, described, finite_number
from rollout.types import (
    EMPTY,
    BoolArray,
    Completion,
    GenerationRequest,
    IntArray,
    Prompt,
    TokenSequence,
    TurnReward,
)

logger = logging.getLogger(__name__)
OWN_METRICS = ("turns", "cut_observations", "failed_closes")


@dataclass(eq=False)
class MultiTurn:
    """An `EpisodeLoop` with one call of `generate` per turn: a slow environment holds up its own episode only.

    An environment that raises, takes too long, or begins with more than fits leaves its episode without a reward, which
    counts under rollout.max_failed_rewards like a reward that failed.

    Example:
        def agent_loop(tokenizer):  # rollout.agent_loop=my_package.my_module:agent_loop
            return MultiTurn(MyEnvironment, tokenizer, max_turns=4)
    """

    make_environment: Callable[[Prompt], Environment]
    """Called on the event loop, before the first turn: what blocks belongs into the environment's `reset`."""
    tokenizer: Any
    _: KW_ONLY
    max_turns: int
    """The most turns of the policy. An episode that needs more ends with "length"."""
    step_timeout_s: float = 60.0
    """The deadline of each reset, step and close of the environment. Its author, who knows how long one takes, passes
    it."""
    max_turn_tokens: int | None = None
    """The most tokens of each turn; None is what is left of the response. An episode whose turn is cut off ends with
    "length"."""
    max_observation_tokens: int | None = None
    """The most tokens of each observation: a longer text is cut off at its end, and counted in agent/cut_observations.
    Messages are cut before they are rendered, together to so many tokens."""
    stop: tuple[str, ...] = ()
    """Texts that end a turn, besides those of rollout.stop."""
    chat: ChatTurns | None = None
    """The chat template, for environments that answer in messages, or ask a `Turn` for tool calls and reasoning."""
    closes: tuple[Close, ...] = ()
    """Called when the run ends: the `close` of what the environments share, such as a pool of sandboxes."""

    def __post_init__(self) -> None:
        for name in ("max_turns", "max_turn_tokens", "max_observation_tokens"):
            value, may_be_none = getattr(self, name), name != "max_turns"
            if not (value is None and may_be_none) and not (isinstance(value, int) and value >= 1):
                raise ValueError(f"{name}={value}: must be a whole number, at least 1")
        if not (isinstance(self.step_timeout_s, int | float) and self.step_timeout_s > 0):
            raise ValueError(f"step_timeout_s={self.step_timeout_s}: must be a number above 0")
        self._encode = text_encoder(self.tokenizer)
        self._decode = text_decoder(self.tokenizer)

    @property
    def prompt_tools(self) -> Sequence[ToolSpec]:
        return () if self.chat is None else self.chat.tools

    async def close(self) -> None:
        """Close what the environments share. Raises an ExceptionGroup of what goes wrong."""
        await close_all(self.closes)

    async def run_episode(self, task: EpisodeTask, generate: GenerateGroup) -> Episode:
        episode = _Episode(task)
        try:
            await self._open(episode)
            while not episode.finish_reason:
                (completion,) = await generate([episode.request(self.max_turn_tokens, self.stop)])
                await self._take_turn(episode, completion)
        finally:
            await self._close(episode)
        return episode.finished()

    async def _open(self, episode: "_Episode") -> None:
        if self.chat is not None and not episode.task.sampling.ignore_eos:
            episode.end_token_ids = self.chat.end_token_ids
        try:
            environment = episode.environment = self.make_environment(episode.task.prompt)
            episode.processes = processes_here()
            if episode.processes is not None and is_plain(environment):
                episode.process = await episode.processes.place(environment)
            reset = getattr(environment, "reset", None)
            first = "" if reset is None else await self._in_time(episode, "reset", reset)
            episode.prompt_ids, observation = await self._in_thread(self._opened, episode, first)
            recorded = episode.recorded_observation()
            observation = observation if recorded is None else recorded
            if episode.room <= len(observation):
                raise ValueError(
                    f"the environment begins with {len(observation)} tokens, which leaves the policy none of "
                    f"rollout.max_response_tokens={episode.room}"
                )
            episode.add_observation(observation)
        except Exception as error:
            self._fail(episode, error)

    async def _take_turn(self, episode: "_Episode", completion: Completion) -> None:
        episode.add(completion, is_policy=True)
        episode.num_turns += 1
        if completion.finish_reason != "stop":  # the environment must not answer half a turn
            episode.finish_reason = completion.finish_reason
            return
        try:
            assert episode.environment is not None
            recorded = episode.recorded_observation()
            episode.turn = await self._in_thread(self._turn, completion, recorded)
            step = await self._in_time(episode, "step", episode.environment.step, episode.turn)
            if not isinstance(step, Step):
                raise TypeError(f"a step of the environment returned {step!r:.100}, and not a Step")
            episode.measure(step)
            reward = None if step.reward is None else finite_number("the reward of a step", step.reward)
            observation = recorded
            if observation is None:
                is_long = isinstance(step.observation, str) and len(step.observation) > LONG_TEXT
                observation = await self._in_thread(self._token_ids, episode, step.observation, is_long=is_long)
        except Exception as error:
            self._fail(episode, error)
            return
        if reward is not None:
            number = len(episode.turn_rewards)
            episode.turn_rewards.append(TurnReward(episode.response.num_tokens, reward, number))
        if step.done:
            episode.finish_reason = "stop"
        elif episode.num_turns == self.max_turns or episode.room <= len(observation):  # the policy could not answer
            episode.finish_reason = "length"
        else:
            episode.add_observation(observation)

    async def _close(self, episode: "_Episode") -> None:
        try:
            if episode.process is None or episode.process.is_alive:
                await self._close_environment(episode)
        finally:
            if episode.processes is not None and episode.process is not None:
                episode.processes.leave(episode.process)

    async def _close_environment(self, episode: "_Episode") -> None:
        close = getattr(episode.environment, "close", None)
        if close is None:
            return
        try:
            await self._in_time(episode, "close", close)
        except Exception as error:  # the episode is complete, and its reward holds
            logger.warning("an environment of prompt %d did not close", episode.task.prompt.ordinal, exc_info=error)
            episode.metrics["failed_closes"] = 1.0

    async def _in_time(self, episode: "_Episode", name: str, method: Callable[..., Any], *arguments: Any) -> Any:
        """Call a method of the environment within its deadline, and record the call as an event."""
        emit, of = episode.task.emit, episode.task.event_fields | {"turn": episode.num_turns, "call": name}
        emit(ToolStarted(**of))
        error: BaseException | None = None
        try:
            what = f"a {name} of the environment"
            if episode.process is not None:
                return await episode.process.call(name, arguments, what, self.step_timeout_s, "step_timeout_s")
            return await called(method, self.step_timeout_s, "step_timeout_s", what, *arguments)
        except BaseException as failure:
            error = failure
            raise
        finally:
            emit(ToolEnded(**of, error=error and repr(error)))

    def _fail(self, episode: "_Episode", error: Exception) -> None:
        logger.warning("the environment of prompt %d failed", episode.task.prompt.ordinal, exc_info=error)
        episode.finish_reason, episode.error = "stop", described(error)

    # -- tokens --------------------------------------------------------------------------------------------------------

    @cached_property
    def _thread(self) -> OneThread:
        return OneThread("tokenizer")

    async def _in_thread(self, function: Callable[..., Any], *arguments: Any, is_long: bool = False) -> Any:
        """Call a function that uses the tokenizer, in a thread unless the text is short and plain, which is quick."""
        if self.chat is None and not is_long:
            return function(*arguments)
        return await self._thread(function, *arguments)

    def _turn(self, completion: Completion, recorded: IntArray | None) -> Turn:
        message = None if self.chat is None else self.chat.parse(completion.token_ids.tolist())
        heard = None if recorded is None else self._decode(recorded)
        return Turn.of(self._decode(completion.token_ids), completion.token_ids, message, heard)

    def _opened(self, episode: "_Episode", first: Observation) -> tuple[tuple[int, ...], IntArray]:
        """Return the prompt, and what follows it before the first turn. Messages come before the generation prompt,
        which then is no part of the prompt."""
        prompt_ids = episode.prompt_ids
        if isinstance(first, str) or not (messages := self._messages(episode, first)):
            return prompt_ids, self._token_ids(episode, first)
        token_ids = self._chat.extend(prompt_ids, messages)
        pairs = zip(prompt_ids, token_ids, strict=False)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        return prompt_ids[:same], np.array(token_ids[same:], np.int32)

    def _token_ids(self, episode: "_Episode", observation: Observation) -> IntArray:
        if isinstance(observation, str):
            token_ids = self._cut(episode, self._encode(observation), self.max_observation_tokens)
        else:
            token_ids = self._bridged(episode, self._messages(episode, observation))
        return np.array(token_ids, np.int32)

    def _bridged(self, episode: "_Episode", messages: Sequence[Message]) -> Sequence[int]:
        if not messages:
            return []
        assert episode.turn is not None
        token_ids = self._chat.bridge(episode.token_ids, episode.turn, messages)
        if token_ids is None:
            raise ValueError("the chat template cannot continue the episode with the environment's messages")
        return token_ids

    @property
    def _chat(self) -> ChatTurns:
        if self.chat is None:
            raise ValueError("the environment answers in messages, which needs MultiTurn(chat=...)")
        return self.chat

    def _messages(self, episode: "_Episode", messages: Sequence[Message]) -> list[Message]:
        """Return the messages of an observation, cut to max_observation_tokens."""
        if not isinstance(messages, Sequence) or not all(isinstance(message, Message) for message in messages):
            raise TypeError(f"an observation is a text or a sequence of Message, and not {messages!r:.100}")
        left, short = self.max_observation_tokens, list[Message]()
        for message in messages:
            encoded = self._encode(message.content)
            kept = self._cut(episode, encoded, left)
            left = None if left is None else left - len(kept)
            whole = len(kept) == len(encoded)
            text = message.content if whole else self._decode(kept)
            short.append(replace(message, content=text))
        return short

    def _cut(self, episode: "_Episode", token_ids: list[int], limit: int | None) -> list[int]:
        if limit is None or len(token_ids) <= limit:
            return token_ids
        episode.metrics["cut_observations"] += 1
        return token_ids[:limit]


@dataclass
class _Episode:
    """An episode under way."""

    task: EpisodeTask
    prompt_ids: tuple[int, ...] = field(init=False)
    """The prompt of the task, without its generation prompt where the first observation comes before that."""
    end_token_ids: Sequence[int] = ()
    """The tokens that end a turn, besides the task's."""
    environment: Environment | None = None
    """The environment, or in a process a copy of what it was at its beginning."""
    processes: ToolProcesses | None = None
    """The processes of the agent worker; None where plain environments run in threads."""
    process: Resident | None = None
    """The process in which the environment is; None for one in the agent worker."""
    finish_reason: str = ""
    """"" while it is open."""
    num_turns: int = 0
    """The turns of the policy."""
    turn: Turn | None = None
    """The last of them."""
    turn_rewards: list[TurnReward] = field(default_factory=list)
    error: str | None = None
    response: Completion = EMPTY
    """All turns and observations."""
    num_observed: int = 0
    """Tokens of the last observation."""
    masks: list[BoolArray] = field(default_factory=list)
    cached_tokens: int = 0
    metrics: dict[str, float] = field(default_factory=lambda: dict.fromkeys(OWN_METRICS, 0.0))

    def __post_init__(self) -> None:
        self.prompt_ids = tuple(self.task.prompt.token_ids)

    @property
    def room(self) -> int:
        """Return how many tokens the response may still have."""
        return self.task.sampling.max_tokens - self.response.num_tokens

    @property
    def token_ids(self) -> tuple[int, ...]:
        return (*self.prompt_ids, *self.response.token_ids.tolist())

    def request(self, max_turn_tokens: int | None, stop: tuple[str, ...]) -> GenerationRequest:
        sampling = self.task.sampling
        return GenerationRequest(
            request_id=replace(self.task.request_id, turn=self.num_turns),
            prompt_ids=self.token_ids,
            num_observed=self.num_observed,
            num_routed=0 if self.response.routes is None else len(self.token_ids) - self.num_observed - 1,
            sampling=replace(
                sampling.reseeded(self.num_turns),
                max_tokens=self.room if max_turn_tokens is None else min(self.room, max_turn_tokens),
                stop=(*sampling.stop, *stop),
                stop_token_ids=tuple(dict.fromkeys((*sampling.stop_token_ids, *self.end_token_ids))),
            ),
        )

    def add(self, completion: Completion, *, is_policy: bool) -> None:
        self.response = Completion.concatenate([self.response, completion])
        self.masks.append(np.full(completion.num_tokens, is_policy))
        self.cached_tokens += completion.cached_tokens

    def recorded_observation(self) -> IntArray | None:
        """Return the observation that an earlier attempt at the episode received before the next turn, if that attempt
        went like this one until here."""
        return self.task.recorded_observation(self.num_turns, self.token_ids) if self.task.recorded else None

    def add_observation(self, token_ids: IntArray) -> None:
        self.num_observed = len(token_ids)
        self.add(Completion.unsampled(token_ids), is_policy=False)

    def measure(self, step: Step) -> None:
        """Add the metrics of a step. Raises ValueError for a name that is taken, and what `checked_metrics` raises."""
        last, counts = checked_metrics(step.metrics), checked_metrics(step.counts)
        taken = [name for name in (*last, *counts) if name in OWN_METRICS or (name in last and name in counts)]
        if taken:
            raise ValueError(f"metric {taken[0]!r}: is MultiTurn's own, or in both `metrics` and `counts`; rename it")
        self.metrics |= last
        self.metrics |= {name: self.metrics.get(name, 0.0) + value for name, value in counts.items()}

    def finished(self) -> Episode:
        reward = sum(turn.reward for turn in self.turn_rewards)
        has_result = bool(self.turn_rewards) or self.error is not None
        sequences: tuple[TokenSequence, ...] = ()
        if self.num_turns:
            sequence = TokenSequence.of(self.prompt_ids, self.response, np.concatenate(self.masks))
            sequences = (replace(sequence, turn_rewards=tuple(self.turn_rewards)),)
        return Episode(
            sequences=sequences,
            finish_reason=self.finish_reason,
            cached_tokens=self.cached_tokens,
            result=RewardResult(reward=reward, error=self.error) if has_result else None,
            metrics=self.metrics | {"turns": float(self.num_turns)},
        )
