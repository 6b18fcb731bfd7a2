"""The places of requests, found by ids or by messages, and the causes of changes in the history."""

from dataclasses import replace
from typing import Any

import pytest

from rollout.chat.messages import Finish, Message, ToolSpec
from rollout.chat.verification import Cause
from rollout.sessions.tree import canonical
from rollout.sessions.tree.attachment import UnknownGenerationError
from rollout.sessions.tree.generation import Generation
from tests.support.conversations import Conversations, anonymous, assistant, result, said, system, user

QUESTION = (system("be brief"), user("2 + 2?"))


def tool_session(turns: int, chat: Conversations) -> tuple[Message, ...]:
    """`turns` answers, each with a tool call that is answered: the next request."""
    conversation: tuple[Message, ...] = QUESTION
    for turn in range(turns):
        answer = chat.ask(*conversation, calls=['{"a": 1}'])
        conversation += (said(answer), result(chat.transcript.names.call_id(answer.number, 0), f"result {turn}"))
    return conversation


def parent_and_cause(chat: Conversations, *messages: Message, **request: Any) -> tuple[int | None, Cause | None]:
    attachment = chat.attach(*messages, **request)
    return attachment.parent, attachment.cause


# -- by ids, by messages -----------------------------------------------------------------------------------------------


def equal_siblings(chat: Conversations, **fields: Any) -> list[Generation]:
    return [chat.ask(*QUESTION, text="4", whole=number == 0, **fields) for number in range(2)]


def test_of_siblings_with_the_same_words_the_named_one_is_the_parent() -> None:
    chat = Conversations()
    equal_siblings(chat, calls=["{}"])
    for number in range(2):
        call_id, signature = chat.transcript.names.call_id(number, 0), chat.transcript.names.answer_id(number)
        echo = chat.transcript.generation(number).answer
        assert echo is not None
        assert chat.attach(*QUESTION, echo, result(call_id, "1")).parent == number
        (plain,) = anonymous([echo])
        assert chat.attach(*QUESTION, replace(plain, signature=signature), user("?")).parent == number
        assert chat.attach(user("?"), previous=signature).parent == number
        assert chat.attach(*QUESTION, plain, result(call_id, "1")).parent == number, "by the result alone"


def test_of_siblings_without_a_name_the_delivered_one_is_the_parent_then_the_newest() -> None:
    chat = Conversations()
    equal_siblings(chat)
    assert chat.attach(*QUESTION, assistant("4"), user("?")).parent == 0
    chat.transcript.deliver(1, whole=True)
    assert chat.attach(*QUESTION, assistant("4"), user("?")).parent == 1


def test_of_siblings_the_one_with_the_same_reasoning_is_the_parent() -> None:
    chat = Conversations()
    for thought in ("add", "count", "guess"):
        chat.ask(*QUESTION, text="4", reasoning=thought)
    assert chat.attach(*QUESTION, assistant("4", reasoning="count "), user("?")).parent == 1
    assert chat.attach(*QUESTION, assistant("4"), user("?")).parent == 2


def test_an_answer_without_ids_is_found_behind_one_that_is_named() -> None:
    chat = Conversations()
    conversation = tool_session(1, chat)
    final = chat.ask(*conversation, text="It is 4.")
    conversation += (assistant("It is 4."), user("and 3 + 3?"))
    assert parent_and_cause(chat, *conversation) == (final.number, None)


def test_an_answer_without_ids_is_found_although_the_system_message_always_changes() -> None:
    chat = Conversations()
    conversation = tool_session(1, chat)
    for turn in range(3):
        conversation = (system(f"It is 10:0{turn}."), *conversation[1:])
        answer = chat.ask(*conversation)
        assert (answer.parent, answer.cause) == (turn, Cause.edit)
        conversation += (said(answer), user(f"question {turn}"))
    without_system = conversation[1:]
    assert parent_and_cause(chat, *without_system) == (3, Cause.edit)


def test_what_only_names_the_generation_before_it_has_the_whole_conversation() -> None:
    chat = Conversations()
    first = chat.ask(*QUESTION)
    name = chat.transcript.names.answer_id(first.number)
    short, long = chat.attach(user("and?"), previous=name), chat.attach(*QUESTION, said(first), user("and?"))
    assert short.conversation == long.conversation and short.messages == (user("and?"),)
    assert (short.parent, short.cause, short.digest) == (long.parent, None, long.digest)
    same_system = chat.attach(QUESTION[0], user("and?"), previous=name)
    assert (same_system.conversation, same_system.cause) == (long.conversation, None)
    assert parent_and_cause(chat, system("be long"), user("and?"), previous=name) == (first.number, Cause.edit)


@pytest.mark.parametrize("name", ["resp_1", "", "gen_0_00000000"])
def test_what_continues_nothing_that_is_there_is_refused(name: str) -> None:
    chat = Conversations()
    chat.begin(*QUESTION)
    for previous in (name, chat.transcript.names.answer_id(0), chat.transcript.names.answer_id(1)):
        with pytest.raises(UnknownGenerationError, match="must be the id of an answer that this session has given"):
            chat.attach(user("and?"), previous=previous)


def test_ids_of_another_session_or_without_an_answer_name_nothing() -> None:
    chat, other = Conversations("a"), Conversations("b")
    tool_session(2, chat)
    conversation = tool_session(1, other)
    (running,) = chat.begin(user("?"))
    running_id = result(chat.transcript.names.call_id(running.number, 0), "1")
    assert chat.attach(*QUESTION[:1], user("else"), *conversation[2:]).parent is None
    assert chat.attach(user("else"), assistant("hm"), running_id).parent is None


def test_a_tool_result_in_another_order_is_another_conversation() -> None:
    chat = Conversations()
    answer = chat.ask(*QUESTION, calls=["{}", "{}"])
    x, y = (call.call_id for call in said(answer).tool_calls)
    two = chat.ask(*QUESTION, said(answer), result(x, "1"), result(y, "2"))
    crossed = anonymous([*QUESTION, said(answer), result(x, "2"), result(y, "1"), said(two), user("?")])
    swapped = anonymous([*QUESTION, said(answer), result(y, "1"), result(x, "2"), said(two), user("?")])
    assert chat.attach(*crossed).parent == chat.attach(*swapped).parent == answer.number


# -- what the harness did ----------------------------------------------------------------------------------------------


def test_an_edited_answer_is_foreign_text_after_the_one_before_it() -> None:
    chat = Conversations()
    first = chat.ask(*QUESTION)
    chat.ask(*QUESTION, said(first), user("and?"))
    edited = chat.attach(*QUESTION, said(first), user("and?"), assistant("I refuse."), user("why?"))
    assert (edited.parent, edited.cause, edited.can_bridge) == (first.number, Cause.edit, True)
    assert [message.content for message in edited.messages] == ["and?", "I refuse.", "why?"]


@pytest.mark.parametrize("with_ids", [True, False])
def test_a_cleared_tool_result_is_an_edit(with_ids: bool) -> None:
    chat = Conversations()
    conversation = list(tool_session(3, chat))
    conversation[3] = replace(conversation[3], content="[cleared]")
    expected = (2, Cause.edit) if with_ids else (0, Cause.edit)
    assert parent_and_cause(chat, *(conversation if with_ids else anonymous(conversation))) == expected


def test_other_tools_are_read_in_a_prompt_of_their_own_whatever_the_policy_of_edits() -> None:
    """Another agent takes over with its own instructions, and gives back."""
    search, answer = (ToolSpec(name=name) for name in ("search", "answer"))
    chat = Conversations(bridges=True)
    first = chat.ask(*QUESTION, tools=(search,), calls=["{}"])
    call_id = chat.transcript.names.call_id(first.number, 0)
    history = (QUESTION[1], said(first), result(call_id, "over to you"))
    second = chat.ask(system("you answer"), *history, tools=(answer,))
    assert (second.parent, second.cause, second.continues) == (first.number, Cause.tools, False)
    history += (said(second), user("and?"))
    third = chat.ask(system("you answer"), *history, tools=(answer,))
    assert (third.parent, third.cause, third.continues) == (second.number, None, True)
    without = chat.attach(*history[1:], previous=chat.transcript.names.answer_id(third.number))
    assert (without.parent, without.cause, without.can_bridge) == (third.number, Cause.tools, False)
    assert len(chat.transcript.sequences()) == 2 and chat.transcript.statistics().forks == {Cause.tools: 1}


@pytest.mark.parametrize("with_ids", [True, False])
def test_a_history_that_is_cut_at_the_front_is_a_compaction(with_ids: bool) -> None:
    chat = Conversations()
    conversation = tool_session(3, chat)
    cut = (*QUESTION, *conversation[-2:])
    assert parent_and_cause(chat, *(cut if with_ids else anonymous(cut))) == (None, Cause.compaction)
    headless = (QUESTION[0], *conversation[2:4])
    assert parent_and_cause(chat, *(headless if with_ids else anonymous(headless))) == (None, Cause.compaction)
    middle = (*conversation[:3], user("Then much was done."), *conversation[-2:])
    assert parent_and_cause(chat, *(middle if with_ids else anonymous(middle))) == (0, Cause.compaction)


def test_a_summary_in_the_policys_own_words_is_a_compaction_and_a_sub_agent_is_none() -> None:
    chat = Conversations()
    summary = "<summary>\nThe sum of two and two was found.\n</summary>"
    first = chat.ask(*QUESTION)
    chat.ask(*QUESTION, said(first), user("sum up"), text=summary)
    quoting = user("Before: The sum of two and two was found.\nGo on.")
    assert parent_and_cause(chat, QUESTION[0], quoting) == (None, Cause.compaction)
    assert parent_and_cause(chat, system("you search"), quoting) == (None, None)
    assert parent_and_cause(chat, QUESTION[0], user("another question")) == (None, None)


def test_examples_before_the_first_answer_are_no_edit() -> None:
    chat = Conversations()
    examples = (QUESTION[0], user("1 + 1?"), assistant("2"), QUESTION[1])
    assert parent_and_cause(chat, *examples) == (None, None)
    assert parent_and_cause(chat, *examples, said(chat.ask(*examples)), user("and?")) == (0, None)


@pytest.mark.parametrize("changed", ["system", "user", "result", "options", "name", "one more", "one less", "swapped"])
def test_what_is_not_the_policys_is_never_passed_over(changed: str) -> None:
    chat = Conversations(bridges=True)
    options: dict[str, Any] = {"template_options": {"enable_thinking": True}}
    first = chat.ask(*QUESTION, calls=["{}", "{}"], **options)
    results = [result(call.call_id, str(place)) for place, call in enumerate(said(first).tool_calls)]
    second = chat.ask(*QUESTION, said(first), *results, calls=["{}"], **options)
    before = [*QUESTION, replace(said(first), content="in other words"), *results, said(second)]
    match changed:
        case "system":
            before[0] = system("be long")
        case "user":
            before[1] = user("3 + 3?")
        case "result":
            before[3] = replace(results[0], content="[cleared]")
        case "options":
            options = {"template_options": {"enable_thinking": False}}
        case "name":
            before[1] = replace(before[1], name="Anna")
        case "one more":
            before.insert(2, user("Hurry."))
        case "one less":
            del before[4]
        case "swapped":
            before[3:5] = [replace(results[1], content="0"), replace(results[0], content="1")]
    again = chat.attach(*before, result(said(second).tool_calls[0].call_id, "2"), **options)
    assert not again.can_bridge and again.cause in (Cause.edit, Cause.compaction)
    words = [*QUESTION, replace(said(first), content="in other words"), *results, said(second)]
    options = {"template_options": {"enable_thinking": True}}
    same = chat.attach(*words, result(said(second).tool_calls[0].call_id, "2"), **options)
    assert (same.parent, same.cause, same.can_bridge) == (second.number, Cause.edit, True), "the policy's own words"


def test_a_system_message_that_comes_back_is_not_taken_for_that_of_a_fork() -> None:
    chat = Conversations()
    first = chat.ask(system("STATE-1"), QUESTION[1], calls=["{}"])
    history = (QUESTION[1], said(first), result(chat.transcript.names.call_id(0, 0), "4"))
    second = chat.ask(system("STATE-2"), *history)
    assert (second.parent, second.cause, second.continues) == (0, Cause.edit, False)
    back = chat.attach(system("STATE-1"), *history, said(second), user("and?"))
    assert (back.parent, back.cause, back.can_bridge) == (second.number, Cause.edit, False)
    stays = chat.attach(system("STATE-2"), *history, said(second), user("and?"))
    assert (stays.parent, stays.cause, stays.can_bridge) == (second.number, None, True)
    by_name = chat.attach(user("and?"), previous=chat.transcript.names.answer_id(second.number))
    assert by_name.conversation == stays.conversation and by_name.can_bridge


def test_the_lineage_goes_on_after_an_edit_with_and_without_ids() -> None:
    """A system message with the time of day, and then a harness without ids that stays with the last one."""
    chat = Conversations()
    conversation: tuple[Message, ...] = QUESTION
    for turn in range(4):
        conversation = (system(f"It is 10:0{turn}."), *conversation[1:])
        answer = chat.ask(*conversation, calls=["{}"])
        assert answer.parent == (turn - 1 if turn else None)
        conversation += (said(answer), result(chat.transcript.names.call_id(turn, 0), "1"))
    assert chat.transcript.statistics().num_sequences == 4, "each is read under its own system message"
    assert parent_and_cause(chat, *anonymous(conversation)) == (3, None)


def test_a_length_is_named_before_an_edit() -> None:
    chat = Conversations()
    first = chat.ask(*QUESTION, finish=Finish.length)
    attachment = chat.attach(*QUESTION, said(first), user("a"), assistant("b"), user("c"))
    assert (attachment.cause, attachment.can_bridge) == (Cause.length, False)


# -- cost --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_ids", [True, False])
def test_the_hashes_of_a_session_are_linear_in_its_turns(with_ids: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cost is in calls and in characters, with long thoughts that the harness sends back."""
    hashed: list[int] = []
    digest = canonical.digest

    def counted(text: str, *, after: str = "") -> str:
        hashed.append(len(text))
        return digest(text, after=after)

    monkeypatch.setattr(canonical, "digest", counted)
    chat = Conversations()
    conversation: tuple[Message, ...] = QUESTION
    per_turn = []
    for turn in range(128):
        hashed.clear()
        answer = chat.ask(*(conversation if with_ids else anonymous(conversation)), calls=["{}"], reasoning="hm" * 99)
        per_turn.append((len(hashed), sum(hashed)))
        conversation += (said(answer), result(said(answer).tool_calls[0].call_id, f"result {turn}"))
    assert chat.transcript.generation(127).parent == 126
    assert per_turn[127][0] == per_turn[8][0] <= 9
    assert per_turn[127][1] <= 1.5 * per_turn[8][1]


def test_what_every_request_repeats_is_kept_once() -> None:
    """A session of many turns would else hold the square of its text."""

    def tools(*keys: str) -> tuple[ToolSpec, ...]:
        return (ToolSpec(name="f", parameters=dict.fromkeys(keys, {"type": "string"})),)

    chat = Conversations()
    first, *_ = chat.begin(*QUESTION, tools=tools("a", "b"))
    answer = chat.finish(first.number, "4")
    copies = [replace(message, content="".join(list(message.content))) for message in (*QUESTION, said(answer))]
    second, *_ = chat.begin(*copies, user("and?"), tools=tools("a", "b"))
    assert all(kept is one for kept, one in zip(second.conversation, first.conversation, strict=False))
    assert second.tools is first.tools
    other, *_ = chat.begin(*QUESTION, tools=tools("b", "a"))
    assert other.tools == first.tools and list(other.tools[0].parameters) == ["b", "a"], "a template writes this order"
