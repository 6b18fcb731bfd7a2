"""Whatever a harness does, in any order: each answer that counts is trained once, behind exactly what it was given."""

from collections import defaultdict
from dataclasses import dataclass, replace

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from rollout.sessions.generation import Cause, Delivery, Generation, State
from rollout.sessions.messages import Finish, Message, Role
from tests.support.conversations import Conversations, anonymous, result, sampled, system, user


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
        assert [one.parent for one in ones] == [request.after] * request.num_answers
        if index is None:
            index = len(self.requests)
            self.requests.append(request)
        self.of_call |= {one.number: index for one in ones}
        if request.after is not None:
            self.heard.add(request.after)

    def in_state(self, state: State) -> list[Generation]:
        return [one for one in self.transcript.generations if one.state is state]

    @rule(agent=st.sampled_from(["main", "searches", "writes"]), num_answers=st.integers(1, 2))
    def begin_a_conversation(self, agent: str, num_answers: int) -> None:
        self.send(Request((system(agent), user(f"question {len(self.requests)}")), num_answers, None))

    @precondition(lambda self: self.in_state(State.finished))
    @rule(data=st.data(), num_answers=st.integers(1, 2), is_careless=st.booleans(), is_edited=st.booleans())
    def go_on(self, data: st.DataObject, num_answers: int, is_careless: bool, is_edited: bool) -> None:
        """From any answer: the last one, or one from which others went on before."""
        parent = data.draw(st.sampled_from(self.in_state(State.finished)))
        before = self.requests[self.of_call[parent.number]]
        assert parent.answer is not None
        calls = [result(call.call_id, f"result {len(self.requests)}") for call in parent.answer.tool_calls]
        new = calls or [user(f"question {len(self.requests)}")]
        messages = (*before.messages, parent.answer, *new)
        if is_careless:
            messages = tuple(careless(one) if one.role is Role.assistant else one for one in messages)
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
        """As a client does that had no answer; if the record has none, the policy is asked again."""
        index = data.draw(st.integers(0, len(self.requests) - 1))
        request = self.requests[index]
        attachment = self.chat.attach(*request.messages, num_answers=request.num_answers, is_retry=True)
        states = [one.state for one in self.transcript.generations if self.of_call[one.number] == index]
        assert bool(attachment.recorded) >= (State.cancelled not in states)
        if not attachment.recorded:
            self.send(request, index)
            return
        assert {self.of_call[number] for number in attachment.recorded} == {index}
        num_generations = len(self.transcript.generations)
        for one in self.transcript.repeat(attachment):
            assert one.state is not State.cancelled and len(attachment.recorded) == request.num_answers
            self.unheard.discard(one.number)
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
        one = data.draw(st.sampled_from(self.in_state(State.running)))
        finish = Finish.length if is_full and not versions else Finish.stop
        calls = ['{"a": 1, "b": 2}'] if with_call else []
        text = f" answer {one.number}\n"
        self.chat.finish(one.number, text, calls, versions=versions, reasoning=f"{one.number}?", finish=finish)

    @precondition(lambda self: self.in_state(State.running))
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.in_state(State.running)))
        self.transcript.cancel(one.number, self.chat.completion((1, 1)))

    @precondition(lambda self: self.in_state(State.finished))
    @rule(data=st.data(), whole=st.booleans())
    def deliver(self, data: st.DataObject, whole: bool) -> None:
        one = data.draw(st.sampled_from(self.in_state(State.finished)))
        self.transcript.deliver(one.number, whole=whole)
        (self.heard if whole else self.unheard).add(one.number)

    def expected(self) -> list[Generation]:
        finished = self.in_state(State.finished)
        calls = defaultdict(set)
        for one in finished:
            calls[self.of_call[one.number]].add(one.call)
        lost = self.unheard - self.heard
        assert lost == {one.number for one in finished if one.delivery is Delivery.lost}
        return [one for one in finished if one.number not in lost or len(calls[self.of_call[one.number]]) == 1]

    @invariant()
    def every_answer_that_counts_is_trained_once_behind_what_it_was_given(self) -> None:
        sequences = self.transcript.sequences()
        trained = sampled(sequences)
        expected = {int(token): one for one in self.expected() for token in one.completion.token_ids}
        assert sorted(trained) == sorted(expected)
        for sequence in sequences:
            versions, whole = sequence.token_versions(), sequence.token_ids
            for at, token in enumerate(sequence.response_ids.tolist()):
                if not sequence.loss_mask[at]:
                    assert (versions[at], sequence.rollout_logprobs[at]) == (-1, 0)
                    continue
                one = expected[token]
                place = one.completion.token_ids.tolist().index(token)
                given = whole[: len(sequence.prompt_ids) + at]
                assert np.array_equal(given, one.token_ids[: len(one.prompt_ids) + place])
                assert versions[at] == one.completion.spans[place].global_steps
                assert sequence.rollout_logprobs[at] == -token

    @invariant()
    def the_numbers_are_those_of_the_sequences(self) -> None:
        counts, sequences = self.transcript.statistics(), self.transcript.sequences()
        assert counts.num_sequences == len(sequences)
        assert counts.delivered_tokens == len(sampled(sequences))
        trained = [one for one in self.expected() if one.completion.num_tokens]
        assert counts.num_children == sum(one.parent is not None for one in trained) >= counts.num_merged
        causes = [one.cause for one in trained if one.cause is not None]
        assert sum(counts.forks.values()) + sum(counts.bridged.values()) == len(causes)

    @invariant()
    def sequences_are_as_few_as_the_tree_has_leaves(self) -> None:
        """Where no answer was cut off, which forks, and none is empty."""
        trained = self.expected()
        if all(one.completion.num_tokens and one.cause is not Cause.length for one in trained):
            leaves = {one.number for one in trained} - {one.parent for one in trained}
            assert len(self.transcript.sequences()) == len(leaves)


def test_every_schedule() -> None:
    budget = settings(
        max_examples=60,
        stateful_step_count=30,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
    run_state_machine_as_test(Harnesses, settings=budget)
