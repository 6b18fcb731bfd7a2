"""Sessions as harnesses use and misuse them, and the sequences that are trained."""

from collections import defaultdict
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from rollout.chat.messages import Finish, Message, Role, ToolCall, ToolSpec
from rollout.chat.verification import Cause
from rollout.sessions.tree.generation import Delivery, Generation, State
from rollout.sessions.tree.transcript import TranscriptClosedError
from rollout.types import TurnReward
from tests.support.conversations import (
    Conversations,
    anonymous,
    assistant,
    rendered,
    result,
    said,
    sampled,
    system,
    user,
)

QUESTION = (system("be brief"), user("2 + 2?"))


# -- what the client does ----------------------------------------------------------------------------------------------


def test_a_first_call_that_is_repeated_is_answered_from_the_record() -> None:
    chat = Conversations()
    generation = chat.ask(*QUESTION)
    again = chat.attach(*QUESTION, is_retry=True)
    assert again.recorded == (generation.number,)
    assert chat.transcript.repeat(again)[0].answer is generation.answer
    assert len(chat.transcript.generations) == 1 and chat.transcript.statistics().num_repeated == 1


def test_an_answer_that_was_lost_is_given_again_without_a_retry_mark() -> None:
    chat = Conversations()
    generation = chat.ask(*QUESTION, whole=False)
    again = chat.attach(*QUESTION)
    assert again.recorded == (generation.number,)
    chat.transcript.repeat(again)
    assert chat.attach(*QUESTION).recorded == (), "it is on its way: an equal request wants another answer"
    chat.transcript.deliver(generation.number, whole=True)
    chat.transcript.deliver(generation.number, whole=False)
    assert chat.transcript.generation(0).delivery is Delivery.read
    assert len(chat.transcript.sequences()) == 1


def test_a_retry_joins_the_generation_that_still_runs() -> None:
    chat = Conversations()
    (generation,) = chat.begin(*QUESTION)
    assert chat.attach(*QUESTION, is_retry=True).recorded == (generation.number,)
    assert chat.attach(*QUESTION).recorded == (), "without a mark it is one more sample of the same prompt"


def test_a_retry_of_another_request_or_another_place_is_generated() -> None:
    chat = Conversations()
    generation = chat.ask(*QUESTION)
    assert chat.attach(*QUESTION, is_retry=True, max_tokens=5).recorded == ()
    assert chat.attach(*QUESTION, is_retry=True, tools=(ToolSpec(name="f"),)).recorded == ()
    assert chat.attach(*QUESTION, said(generation), is_retry=True).recorded == ()


def test_of_equal_requests_a_retry_gets_the_answer_that_nobody_read() -> None:
    chat = Conversations()
    chat.ask(*QUESTION)
    lost = chat.ask(*QUESTION, whole=False)
    chat.begin(*QUESTION)
    assert chat.attach(*QUESTION, is_retry=True).recorded == (lost.number,)


def test_an_unread_sibling_is_not_trained() -> None:
    chat = Conversations()
    (slow,) = chat.begin(*QUESTION)
    generation = chat.ask(*QUESTION)  # the client gave up and asked anew
    chat.finish(slow.number, "late")
    chat.transcript.deliver(slow.number, whole=False)
    assert sampled(chat.transcript.sequences()) == generation.completion.token_ids.tolist()
    counts = chat.transcript.statistics()
    assert (counts.num_undelivered, counts.delivered_fraction) == (1, 0.5)


def test_an_unread_answer_is_trained_if_another_request_builds_on_it() -> None:
    """The connection broke after the client had all it needed."""
    chat = Conversations()
    (slow,) = chat.begin(*QUESTION)
    chat.ask(*QUESTION)
    late = chat.finish(slow.number, "late")
    chat.transcript.deliver(slow.number, whole=False)
    chat.ask(*QUESTION, said(late), user("go on"))
    assert len(sampled(chat.transcript.sequences())) == 9
    assert chat.transcript.statistics().num_undelivered == 0


def test_a_cancelled_generation_is_kept_and_not_trained() -> None:
    chat = Conversations()
    (gone,) = chat.begin(*QUESTION)
    chat.transcript.cancel(gone.number, chat.completion((1, 1)))
    again = chat.attach(*QUESTION, is_retry=True)
    assert again.recorded == () and again.cause is Cause.retry
    assert chat.attach(*QUESTION).cause is Cause.retry, "also without a mark"
    generation = chat.ask(*QUESTION)
    assert sampled(chat.transcript.sequences()) == generation.completion.token_ids.tolist()
    assert chat.transcript.statistics().delivered_fraction == 3 / 5
    assert chat.transcript.generation(gone.number).completion.num_tokens == 2


# -- what the harness does ---------------------------------------------------------------------------------------------


def test_a_history_without_reasoning_forks_with_its_cause_if_the_template_is_followed() -> None:
    chat = Conversations()
    first = chat.ask(*QUESTION, reasoning="a long thought")
    attachment = chat.attach(*QUESTION, replace(said(first), reasoning=None), user("and?"))
    (second,) = chat.transcript.begin(attachment)
    with pytest.raises(ValueError, match="give the cause, one of template, retoken"):
        chat.transcript.set_prompt(second.number, [1, 2, 3])
    chat.transcript.set_prompt(second.number, [1, 2, 3], Cause.template)
    chat.finish(second.number, "4")
    assert [sequence.prompt_ids.tolist() for sequence in chat.transcript.sequences()][1] == [1, 2, 3]
    assert chat.transcript.statistics().forks == {Cause.template: 1}
    assert chat.transcript.statistics().merged_fraction == 0.0


def test_a_node_that_ended_by_length_is_not_extended_silently() -> None:
    chat = Conversations()
    first = chat.ask(*QUESTION, finish=Finish.length)
    attachment = chat.attach(*QUESTION, said(first), user("go on"))
    assert (attachment.parent, attachment.can_bridge, attachment.cause) == (first.number, False, Cause.length)
    chat.ask(*QUESTION, said(first), user("go on"))
    assert len(chat.transcript.sequences()) == 2
    assert chat.transcript.statistics().forks == {Cause.length: 1}


@pytest.mark.parametrize("bridges", [True, False])
def test_other_words_of_the_policy_go_on_or_fork_as_the_config_says_and_count(bridges: bool) -> None:
    chat = Conversations(bridges=bridges)
    first = chat.ask(*QUESTION, calls=["{}"], text="I compute")
    call_id = chat.transcript.names.call_id(0, 0)
    chat.ask(*QUESTION, replace(said(first), content="I compute</code>"), result(call_id, "4"))
    counts = chat.transcript.statistics()
    assert len(sampled(chat.transcript.sequences())) == 6
    assert (counts.num_sequences, counts.merged_fraction) == ((1, 1.0) if bridges else (2, 0.0))
    assert (counts.bridged if bridges else counts.forks) == {Cause.edit: 1}
    assert counts.reread_tokens == (0 if bridges else 8), "four messages of two tokens"


@pytest.mark.parametrize("bridges", [True, False])
def test_what_others_said_is_read_as_it_was_sent_whatever_the_config_says(bridges: bool) -> None:
    chat = Conversations(bridges=bridges)
    first = chat.ask(system("STATE-1"), user("2 + 2?"), calls=["{}"])
    call_id = chat.transcript.names.call_id(0, 0)
    second = chat.ask(system("STATE-2"), user("2 + 2?"), said(first), result(call_id, "4"))
    assert second.prompt_ids.tolist() == rendered(
        [system("STATE-2"), user("2 + 2?"), said(first), result(call_id, "4")]
    )
    counts = chat.transcript.statistics()
    assert (counts.num_sequences, counts.merged_fraction, counts.forks) == (2, 0.0, {Cause.edit: 1})


@pytest.mark.parametrize("name", ["appends", "window", "replaces all"])
def test_answers_that_nobody_merged_are_counted_as_such(name: str) -> None:
    """Harnesses without ids whose every request is a sequence of its own."""
    chat = Conversations()
    conversation: tuple[Message, ...] = QUESTION
    for turn in range(6):
        answer = chat.ask(*conversation, text=f"a long answer of number {turn}")
        if name == "appends":
            conversation += (assistant(f"{said(answer).content}</code>"), user(f"and {turn}?"))
        elif name == "window":
            conversation = (*QUESTION[:1], *conversation[1:][-2:], said(answer), user(f"and {turn}?"))
        else:
            words = [assistant(f"thought {number} at {turn}") for number in range(turn + 1)]
            conversation = (*QUESTION, *words, user(f"and {turn}?"))
    counts = chat.transcript.statistics()
    merged = 0.2 if name == "window" else 0.0  # only the second request has the whole history
    assert (counts.num_sequences, counts.merged_fraction) == (6 - int(5 * merged), merged)
    assert counts.reread_tokens > 0 and counts.forks.total() == counts.num_sequences - 1  # type: ignore[attr-defined]


def test_examples_and_attempts_from_the_same_beginning_are_no_forks() -> None:
    chat = Conversations()
    examples = (QUESTION[0], user("1 + 1?"), assistant("2"), QUESTION[1])
    for _ in range(3):
        chat.ask(*examples)
    counts = chat.transcript.statistics()
    assert (counts.num_sequences, counts.merged_fraction, counts.reread_tokens) == (3, 1.0, 0)


def test_a_sequence_goes_on_over_an_answer_without_tokens() -> None:
    chat = Conversations()
    first = chat.ask(*QUESTION)
    second = chat.ask(*QUESTION, said(first), user("go on"), versions=())
    third = chat.ask(*QUESTION, said(first), user("go on"), said(second), user("please"))
    (only,) = chat.transcript.sequences()
    assert only.token_ids.tolist() == third.token_ids.tolist() and len(sampled([only])) == 6


# -- rewards and misuse ------------------------------------------------------------------------------------------------


def test_the_last_reward_before_the_end_counts_and_later_ones_are_refused() -> None:
    chat = Conversations()
    first = chat.ask(*QUESTION)
    chat.ask(*QUESTION, said(first), user("and?"))
    transcript = chat.transcript
    assert transcript.rewards.total is None
    transcript.reward(0.25, metrics={"tests": 3.0})
    transcript.reward(1.0)
    transcript.reward(9.0, transcript.names.answer_id(0))
    transcript.reward(0.5, f"chatcmpl-{transcript.names.answer_id(0)}")
    assert (transcript.rewards.total, transcript.rewards.metrics) == (1.5, {"tests": 3.0})
    assert transcript.sequences()[0].turn_rewards == (TurnReward(3, 0.5, 0), TurnReward(8, 0.0, 1))
    transcript.close()
    with pytest.raises(TranscriptClosedError, match="session a has ended"):
        transcript.reward(2.0)
    with pytest.raises(TranscriptClosedError):
        chat.attach(*QUESTION)
    assert transcript.rewards.total == 1.5


def test_rewards_of_turns_are_at_the_ends_of_their_turns() -> None:
    chat = Conversations()
    first = chat.ask(*QUESTION)
    second = chat.ask(*QUESTION, said(first), user("and?"))
    chat.ask(*QUESTION, said(first), user("or?"))
    for number, reward in enumerate((0.1, 0.2, 0.3)):
        chat.transcript.reward(reward, chat.transcript.names.answer_id(number))
    main, branch = chat.transcript.sequences()
    assert main.turn_rewards == (TurnReward(3, 0.1, 0), TurnReward(8, 0.2, 1)) and second.continues
    assert branch.turn_rewards == (TurnReward(3, 0.3, 2),)


def test_what_cannot_be_is_refused_by_name() -> None:
    chat = Conversations()
    (generation,) = chat.begin(*QUESTION)
    other = Conversations("b")
    with pytest.raises(ValueError, match="it is running and has no answer"):
        chat.transcript.deliver(generation.number, whole=True)
    with pytest.raises(ValueError, match="must be the id of an answer"):
        chat.transcript.reward(1.0, chat.transcript.names.answer_id(generation.number))
    with pytest.raises(ValueError, match="a reward must be from -1e\\+30 to 1e\\+30, not 1e\\+39"):
        chat.transcript.reward(1e39)
    with pytest.raises(ValueError, match="the metric steps must be from -1e\\+30"):
        chat.transcript.reward(1.0, metrics={"steps": 1e39})
    chat.finish(generation.number, "4")
    with pytest.raises(ValueError, match="finished already"):
        chat.finish(generation.number, "5")
    with pytest.raises(ValueError, match="must be the id of an answer"):
        chat.transcript.reward(1.0, other.transcript.names.answer_id(0))
    with pytest.raises(ValueError, match="a reward must be a finite number, not nan"):
        chat.transcript.reward(float("nan"))
    with pytest.raises(ValueError, match="has 1, counted from 0"):
        chat.transcript.generation(1)
    (two,) = chat.begin(*QUESTION)
    foreign = assistant("", tool_calls=(ToolCall(call_id="call_0", name="f", arguments="{}"),))
    with pytest.raises(ValueError, match=r"generation 1: its tool calls must have the ids \['call_1_0_"):
        chat.transcript.finish(two.number, chat.completion((1,)), foreign, Finish.tool_calls)


def test_the_newest_answer_may_be_in_the_sequence_that_began_first() -> None:
    chat = Conversations()
    first = chat.ask(*QUESTION)
    chat.ask(user("A sub-agent's question?"))
    assert chat.transcript.newest_sequence() == 1
    chat.ask(*QUESTION, said(first), user("and?"))
    assert chat.transcript.newest_sequence() == 0


# -- every schedule ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """One that was sent, and the generation that its harness means to go on from."""

    messages: tuple[Message, ...]
    num_answers: int
    after: int | None
    is_edited: bool = False


def careless(message: Message) -> Message:
    """An assistant's message on its way through a harness that keeps ids only."""
    calls = tuple(replace(call, arguments='{ "b" : 2.0, "a" : 1 }') for call in message.tool_calls)
    return replace(message, reasoning=None, content=message.content.strip(), tool_calls=calls)


class Harnesses(RuleBasedStateMachine):
    """A main agent, sub-agents and their clients. The texts are unique, so that every request has one right parent; its
    own books say what must be trained."""

    def __init__(self) -> None:
        super().__init__()
        self.chat = Conversations()
        self.transcript = self.chat.transcript
        self.requests: list[Request] = []
        self.of_call: dict[int, int] = {}  # generation -> request
        self.heard: set[int] = set()
        self.unheard: set[int] = set()

    def send(self, request: Request, index: int | None = None) -> None:
        ones = self.chat.begin(*request.messages, num_answers=request.num_answers)
        assert [node.parent for node in ones] == [request.after] * request.num_answers
        if index is None:
            index = len(self.requests)
            self.requests.append(request)
        self.of_call |= {node.number: index for node in ones}
        if request.after is not None:
            self.heard.add(request.after)

    def in_state(self, state: State) -> list[Generation]:
        return [node for node in self.transcript.generations if node.state is state]

    @rule(agent=st.sampled_from(["main", "searches", "writes"]), num_answers=st.integers(1, 2))
    def begin_a_conversation(self, agent: str, num_answers: int) -> None:
        self.send(Request((system(agent), user(f"question {len(self.requests)}")), num_answers, None))

    @precondition(lambda self: self.in_state(State.finished))
    @rule(data=st.data(), num_answers=st.integers(1, 2), is_careless=st.booleans(), is_edited=st.booleans())
    def go_on(self, data: st.DataObject, num_answers: int, is_careless: bool, is_edited: bool) -> None:
        """Go on from any answer: the last one, or one from which others went on before."""
        parent = data.draw(st.sampled_from(self.in_state(State.finished)))
        before = self.requests[self.of_call[parent.number]]
        assert parent.answer is not None
        calls = [result(call.call_id, f"result {len(self.requests)}") for call in parent.answer.tool_calls]
        new = calls or [user(f"question {len(self.requests)}")]
        messages = (*before.messages, parent.answer, *new)
        if is_careless:
            messages = tuple(careless(message) if message.role is Role.assistant else message for message in messages)
        plain, named = self.chat.attach(*anonymous(messages)), self.chat.attach(*messages)
        assert named.parent == parent.number
        assert before.is_edited or (plain.parent, plain.cause, plain.digest) == (
            named.parent,
            named.cause,
            named.digest,
        )
        if is_edited and calls:  # only ids say now where it belongs
            messages = (system(f"another {len(self.requests)}"), *messages[1:])
        elif data.draw(st.booleans()):
            messages = anonymous(messages) if not before.is_edited else messages
        self.send(Request(messages, num_answers, parent.number, before.is_edited or bool(is_edited and calls)))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def send_again(self, data: st.DataObject) -> None:
        """Ask again as a client without an answer does; if the record has none, the policy is asked again."""
        index = data.draw(st.integers(0, len(self.requests) - 1))
        request = self.requests[index]
        attachment = self.chat.attach(*request.messages, num_answers=request.num_answers, is_retry=True)
        states = [node.state for node in self.transcript.generations if self.of_call[node.number] == index]
        assert bool(attachment.recorded) >= (State.cancelled not in states)
        if not attachment.recorded:
            self.send(request, index)
            return
        assert {self.of_call[number] for number in attachment.recorded} == {index}
        num_generations = len(self.transcript.generations)
        for node in self.transcript.repeat(attachment):
            assert node.state is not State.cancelled and len(attachment.recorded) == request.num_answers
            self.unheard.discard(node.number)
        assert len(self.transcript.generations) == num_generations

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def ask_for_one_more_sample(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.requests) - 1))
        self.send(self.requests[index], index)

    @precondition(lambda self: self.in_state(State.running))
    @rule(
        data=st.data(),
        versions=st.lists(st.integers(0, 3), max_size=4).map(sorted),
        with_call=st.booleans(),
        is_full=st.booleans(),
    )
    def answer(self, data: st.DataObject, versions: list[int], with_call: bool, is_full: bool) -> None:
        node = data.draw(st.sampled_from(self.in_state(State.running)))
        finish = Finish.length if is_full and not versions else Finish.stop
        calls = ['{"a": 1, "b": 2}'] if with_call else []
        text = f" answer {node.number}\n"
        self.chat.finish(node.number, text, calls, versions=versions, reasoning=f"{node.number}?", finish=finish)

    @precondition(lambda self: self.in_state(State.running))
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        node = data.draw(st.sampled_from(self.in_state(State.running)))
        self.transcript.cancel(node.number, self.chat.completion((1, 1)))

    @precondition(lambda self: self.in_state(State.finished))
    @rule(data=st.data(), whole=st.booleans())
    def deliver(self, data: st.DataObject, whole: bool) -> None:
        node = data.draw(st.sampled_from(self.in_state(State.finished)))
        self.transcript.deliver(node.number, whole=whole)
        (self.heard if whole else self.unheard).add(node.number)

    def expected(self) -> list[Generation]:
        finished = self.in_state(State.finished)
        calls = defaultdict(set)
        for node in finished:
            calls[self.of_call[node.number]].add(node.call)
        lost = self.unheard - self.heard
        assert lost == {node.number for node in finished if node.delivery is Delivery.lost}
        return [node for node in finished if node.number not in lost or len(calls[self.of_call[node.number]]) == 1]

    @invariant()
    def every_answer_that_counts_is_trained_once_behind_what_it_was_given(self) -> None:
        sequences = self.transcript.sequences()
        trained = sampled(sequences)
        expected = {int(token): node for node in self.expected() for token in node.completion.token_ids}
        assert sorted(trained) == sorted(expected)
        for sequence in sequences:
            versions, whole = sequence.token_versions(), sequence.token_ids
            for at, token in enumerate(sequence.response_ids.tolist()):
                if not sequence.loss_mask[at]:
                    assert (versions[at], sequence.rollout_logprobs[at]) == (-1, 0)
                    continue
                node = expected[token]
                place = node.completion.token_ids.tolist().index(token)
                before = whole[: len(sequence.prompt_ids) + at]
                assert np.array_equal(before, node.token_ids[: len(node.prompt_ids) + place])
                assert versions[at] == node.completion.spans[place].global_steps
                assert sequence.rollout_logprobs[at] == -token

    @invariant()
    def the_numbers_are_those_of_the_sequences(self) -> None:
        counts, sequences = self.transcript.statistics(), self.transcript.sequences()
        assert counts.num_sequences == len(sequences)
        assert counts.delivered_tokens == len(sampled(sequences))
        trained = [node for node in self.expected() if node.completion.num_tokens]
        going_on = [node for node in trained if node.parent is not None or node.cause not in (None, Cause.retry)]
        assert counts.num_children == len(going_on) >= counts.num_merged
        causes = [node.cause for node in trained if node.cause is not None]
        assert sum(counts.forks.values()) + sum(counts.bridged.values()) == len(causes)

    @invariant()
    def sequences_are_as_few_as_the_tree_has_leaves(self) -> None:
        """Count the leaves, unless an answer forks, as after one that was cut off or an edit, or is empty."""
        trained = self.expected()
        if all(node.completion.num_tokens and (node.parent is None or node.continues) for node in trained):
            leaves = {node.number for node in trained} - {node.parent for node in trained}
            assert len(self.transcript.sequences()) == len(leaves)


def test_every_schedule() -> None:
    budget = settings(
        max_examples=60,
        stateful_step_count=30,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
    run_state_machine_as_test(Harnesses, settings=budget)
