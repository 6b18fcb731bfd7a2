"""What harnesses do to a session, and what is trained of it."""

from dataclasses import replace

import pytest

from rollout.sessions.generation import Cause, Delivery
from rollout.sessions.messages import Finish, Message, ToolCall, ToolSpec
from rollout.sessions.transcript import TranscriptClosedError
from rollout.types import TurnReward
from tests.support.conversations import Conversations, assistant, result, said, sampled, system, user

QUESTION = (system("be brief"), user("2 + 2?"))


def test_a_linear_session_is_one_sequence() -> None:
    chat = Conversations()
    conversation = QUESTION
    for turn in range(5):
        one = chat.ask(*conversation, calls=['{"a": 1}'])
        conversation += (said(one), result(chat.transcript.names.call_id(turn, 0), f"{turn}"))
    (only,) = chat.transcript.sequences()
    last = chat.transcript.generation(4)
    assert only.token_ids.tolist() == last.token_ids.tolist()
    assert only.prompt_ids.tolist() == chat.transcript.generation(0).prompt_ids.tolist()
    counts = chat.transcript.statistics()
    assert (counts.num_sequences, counts.merged_fraction, counts.delivered_fraction) == (1, 1.0, 1.0)
    assert counts.forks == counts.bridged == {}


def test_tokens_between_turns_are_masked_without_version_and_logprob() -> None:
    chat = Conversations()
    first = chat.ask(*QUESTION, versions=(4, 5))
    chat.ask(*QUESTION, said(first), user("and?"), versions=(5,))
    (only,) = chat.transcript.sequences()
    assert only.loss_mask.tolist() == [True, True, False, False, True]
    assert only.token_versions().tolist() == [4, 5, -1, -1, 5]
    assert (only.rollout_logprobs == -only.response_ids * only.loss_mask).all()


# -- what the client does ----------------------------------------------------------------------------------------------


def test_a_first_call_that_is_repeated_is_answered_from_the_record() -> None:
    chat = Conversations()
    one = chat.ask(*QUESTION)
    again = chat.attach(*QUESTION, is_retry=True)
    assert again.recorded == (one.number,)
    assert chat.transcript.repeat(again)[0].answer is one.answer
    assert len(chat.transcript.generations) == 1 and chat.transcript.statistics().num_repeated == 1


def test_an_answer_that_was_lost_is_given_again_without_a_retry_mark() -> None:
    chat = Conversations()
    one = chat.ask(*QUESTION, whole=False)
    again = chat.attach(*QUESTION)
    assert again.recorded == (one.number,)
    chat.transcript.repeat(again)
    assert chat.attach(*QUESTION).recorded == (), "it is on its way: an equal request wants another answer"
    chat.transcript.deliver(one.number, whole=True)
    chat.transcript.deliver(one.number, whole=False)
    assert chat.transcript.generation(0).delivery is Delivery.read
    assert len(chat.transcript.sequences()) == 1


def test_a_retry_joins_the_generation_that_still_runs() -> None:
    chat = Conversations()
    (one,) = chat.begin(*QUESTION)
    assert chat.attach(*QUESTION, is_retry=True).recorded == (one.number,)
    assert chat.attach(*QUESTION).recorded == (), "without a mark it is one more sample of the same prompt"


def test_a_retry_of_another_request_or_another_place_is_generated() -> None:
    chat = Conversations()
    one = chat.ask(*QUESTION)
    assert chat.attach(*QUESTION, is_retry=True, max_tokens=5).recorded == ()
    assert chat.attach(*QUESTION, is_retry=True, tools=(ToolSpec(name="f"),)).recorded == ()
    assert chat.attach(*QUESTION, said(one), is_retry=True).recorded == ()


def test_of_equal_requests_a_retry_gets_the_answer_that_nobody_read() -> None:
    chat = Conversations()
    chat.ask(*QUESTION)
    lost = chat.ask(*QUESTION, whole=False)
    chat.begin(*QUESTION)
    assert chat.attach(*QUESTION, is_retry=True).recorded == (lost.number,)


def test_an_unread_sibling_is_not_trained() -> None:
    chat = Conversations()
    (slow,) = chat.begin(*QUESTION)
    one = chat.ask(*QUESTION)  # the client gave up and asked anew
    chat.finish(slow.number, "late")
    chat.transcript.deliver(slow.number, whole=False)
    assert sampled(chat.transcript.sequences()) == one.completion.token_ids.tolist()
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
    one = chat.ask(*QUESTION)
    assert sampled(chat.transcript.sequences()) == one.completion.token_ids.tolist()
    assert chat.transcript.statistics().delivered_fraction == 3 / 5
    assert chat.transcript.generation(gone.number).completion.num_tokens == 2


def test_best_of_n_is_n_siblings_each_trained_once() -> None:
    chat = Conversations()
    chosen, other = chat.begin(*QUESTION, num_answers=2)
    for one in (chosen, other):
        chat.finish(one.number, f"answer {one.number}")
    chat.ask(*QUESTION, assistant("answer 0"), user("why?"))
    chat.ask(*QUESTION)  # and one more of the same
    first, second, third = chat.transcript.sequences()
    assert len(sampled([first])) == 6 and len(sampled([second])) == 3 and len(sampled([third])) == 3
    assert len(set(sampled((first, second, third)))) == 12
    assert chat.transcript.statistics().forks == {}
    assert chat.attach(*QUESTION, num_answers=2, is_retry=True).recorded == (0, 1)


# -- what the harness does ---------------------------------------------------------------------------------------------


def test_reasoning_that_the_harness_dropped_leaves_one_sequence_if_the_tokens_are_kept() -> None:
    chat = Conversations()
    first = chat.ask(*QUESTION, reasoning="a long thought")
    second = chat.begin(*QUESTION, replace(said(first), reasoning=None), user("and?"))[0]
    assert second.continues and second.cause is None


def test_a_history_without_reasoning_forks_with_its_cause_if_the_template_is_followed() -> None:
    chat = Conversations()
    first = chat.ask(*QUESTION, reasoning="a long thought")
    attachment = chat.attach(*QUESTION, replace(said(first), reasoning=None), user("and?"))
    (second,) = chat.transcript.begin(attachment)
    with pytest.raises(ValueError, match="give the cause, one of template, retoken"):
        chat.transcript.set_prompt(second.number, [1, 2, 3])
    chat.transcript.set_prompt(second.number, [1, 2, 3], Cause.template)
    chat.finish(second.number, "4")
    assert [one.prompt_ids.tolist() for one in chat.transcript.sequences()][1] == [1, 2, 3]
    assert chat.transcript.statistics().forks == {Cause.template: 1}
    assert chat.transcript.statistics().merged_fraction == 0.0


def test_arguments_that_the_harness_wrote_anew_are_those_that_were_sampled() -> None:
    chat = Conversations()
    first = chat.ask(*QUESTION, calls=['{"b": 1.0,  "a": "é"}'])
    (call,) = said(first).tool_calls
    echoed = assistant("", tool_calls=(replace(call, call_id="x", arguments='{"a": "\\u00e9", "b": 1}'),))
    second = chat.begin(*QUESTION, replace(echoed, content=said(first).content), result("x", "3"))[0]
    assert second.continues and second.cause is None


def test_interleaved_sub_agents_are_lineages_of_their_own() -> None:
    chat = Conversations()
    searches = {name: (system("search"), user(f"find {name}")) for name in "xy"}
    heads: dict[str, tuple[Message, ...]] = {"main": QUESTION, **searches}
    for _ in range(3):
        for name in heads:
            one = chat.ask(*heads[name])
            heads[name] += (said(one), user("go on"))
    assert [len(sampled([one])) for one in chat.transcript.sequences()] == [9, 9, 9]
    counts = chat.transcript.statistics()
    assert (counts.num_sequences, counts.merged_fraction, counts.forks) == (3, 1.0, {})


def test_compaction_begins_a_sequence_and_keeps_the_old_one() -> None:
    chat = Conversations()
    summary = "Summary:\nTwo and two were added, with care."
    first = chat.ask(*QUESTION)
    second = chat.ask(*QUESTION, said(first), user("sum up what was done"), text=summary)
    third = chat.ask(QUESTION[0], user(f"You go on from here. {summary.splitlines()[1]} Now what is 3 + 3?"))
    assert (third.parent, third.cause) == (None, Cause.compaction)
    old, new = chat.transcript.sequences()
    assert sampled([old]) == [*first.completion.token_ids.tolist(), *second.completion.token_ids.tolist()]
    assert new.prompt_ids.tolist() == third.prompt_ids.tolist() and sampled([new]) == sampled([new, old])[:3]
    assert chat.transcript.statistics().forks == {Cause.compaction: 1}


def test_a_node_that_ended_by_length_is_not_extended_silently() -> None:
    chat = Conversations()
    first = chat.ask(*QUESTION, finish=Finish.length)
    attachment = chat.attach(*QUESTION, said(first), user("go on"))
    assert (attachment.parent, attachment.can_bridge, attachment.cause) == (first.number, False, Cause.length)
    chat.ask(*QUESTION, said(first), user("go on"))
    assert len(chat.transcript.sequences()) == 2
    assert chat.transcript.statistics().forks == {Cause.length: 1}


@pytest.mark.parametrize("bridges", [True, False])
def test_an_edit_goes_on_or_forks_as_the_policy_says_and_counts(bridges: bool) -> None:
    chat = Conversations(bridges=bridges)
    first = chat.ask(system("It is 10:01."), user("2 + 2?"), calls=["{}"])
    call_id = chat.transcript.names.call_id(0, 0)
    chat.ask(system("It is 10:02."), user("2 + 2?"), said(first), result(call_id, "4"))
    counts = chat.transcript.statistics()
    assert len(sampled(chat.transcript.sequences())) == 6
    assert (counts.num_sequences, counts.merged_fraction) == ((1, 1.0) if bridges else (2, 0.0))
    assert (counts.bridged if bridges else counts.forks) == {Cause.edit: 1}


def test_an_answer_without_tokens_is_in_no_sequence_and_hides_nothing() -> None:
    """A full context is answered with nothing and "length"."""
    chat = Conversations()
    first = chat.ask(*QUESTION)
    chat.ask(*QUESTION, said(first), user("go on"), versions=(), finish=Finish.length)
    (only,) = chat.transcript.sequences()
    assert only.token_ids.tolist() == first.token_ids.tolist()


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
    (one,) = chat.begin(*QUESTION)
    other = Conversations("b")
    with pytest.raises(ValueError, match="it is running and has no answer"):
        chat.transcript.deliver(one.number, whole=True)
    with pytest.raises(ValueError, match="must be the id of an answer"):
        chat.transcript.reward(1.0, chat.transcript.names.answer_id(one.number))
    chat.finish(one.number, "4")
    with pytest.raises(ValueError, match="finished already"):
        chat.finish(one.number, "5")
    with pytest.raises(ValueError, match="must be the id of an answer"):
        chat.transcript.reward(1.0, other.transcript.names.answer_id(0))
    with pytest.raises(ValueError, match="reward nan"):
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
