"""The keys that `slipstream agent-check` proposes, and how it names what an agent did."""

import shlex
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from configs.load import key_docs
from configs.rollout import SessionsConfig
from scripts.plan.agent_report import AgentReport, Exchange, Row, keys_to_set, report_text

TOKENS = st.integers(1, 10**6)
ROWS = st.lists(
    st.builds(
        lambda prompt, more, answers: Row(prompt_tokens=prompt, tokens=prompt + more, num_answers=answers),
        *(TOKENS, TOKENS, st.integers(1, 99)),
    ),
    min_size=1,
    max_size=5,
)
REPORT = AgentReport(
    key="rollout.agent=codex",
    exchanges=(),
    left_out=(),
    own_sampling=(),
    num_answers=3,
    rows=(Row(num_answers=3, prompt_tokens=1000, tokens=1500),),
    longest_prompt=1400,
    sampled_tokens=120,
    tokenizer="the tiny model",
    limit=None,
    error=None,
    exit_code=0,
    last_lines=(),
    seconds=2.0,
    processor_s=1.5,
    sessions=SessionsConfig(max_turns=64, timeout_s=600.0, idle_timeout_s=300.0),
    group_timeout_s=1200.0,
)


def values(report: AgentReport) -> dict[str, float]:
    return {key.name: float(key.value) for key in keys_to_set(report)}


@given(rows=ROWS, sampled=TOKENS, seconds=st.floats(0, 10**5), answers=st.integers(1, 500))
def test_the_keys_admit_what_was_seen_and_are_keys(rows: list[Row], sampled: int, seconds: float, answers: int) -> None:
    longest = max(row.tokens for row in rows) - 1
    report = replace(
        REPORT, rows=tuple(rows), longest_prompt=longest, sampled_tokens=sampled, seconds=seconds, num_answers=answers
    )
    limits, proposed = report.sessions, values(report)
    assert set(proposed) <= set(key_docs())
    assert proposed["data.max_prompt_tokens"] + proposed["rollout.max_response_tokens"] > longest
    assert proposed["rollout.max_response_tokens"] >= sampled
    assert proposed.get("sessions.max_turns", limits.max_turns) >= answers
    assert proposed.get("sessions.timeout_s", limits.timeout_s) >= seconds
    assert proposed.get("sessions.idle_timeout_s", limits.idle_timeout_s) >= report.longest_gap_s
    timeout_s = proposed.get("sessions.timeout_s", limits.timeout_s)
    assert timeout_s < proposed.get("rollout.group_timeout_s", report.group_timeout_s)
    assert set(shlex.split(report_text(report))) >= {key.name + "=" + key.value for key in keys_to_set(report)}


def test_an_agent_that_fits_into_the_defaults_is_told_two_lengths_only() -> None:
    assert values(REPORT) == {"data.max_prompt_tokens": 2048, "rollout.max_response_tokens": 4096}
    assert "and a model that supports 6,144 tokens" in report_text(REPORT)


def test_times_without_a_request_are_told_from_those_with_one() -> None:
    calls = [(1.0, 90.0), (5.0, 6.0), (100.0, 101.0)]
    exchanges = tuple(
        Exchange(method="POST", path="/v1/messages", status=200, began_s=begin, ended_s=end) for begin, end in calls
    )
    assert replace(REPORT, exchanges=exchanges, seconds=103.0).longest_gap_s == 10.0
    assert replace(REPORT, exchanges=exchanges, seconds=303.0).longest_gap_s == 202.0
    assert replace(REPORT, exchanges=(), seconds=5.0).longest_gap_s == 5.0
    slow = replace(REPORT, exchanges=exchanges, seconds=303.0)
    assert values(slow) | {"sessions.idle_timeout_s": 840, "sessions.timeout_s": 1260} == values(slow)


def test_an_agent_that_never_ends_is_not_given_more_turns() -> None:
    endless = replace(REPORT, num_answers=64, limit="sessions.max_turns=64")
    assert "sessions.max_turns" not in values(endless)
    assert "it did not end by itself: it reached sessions.max_turns=64" in report_text(endless)


def test_tools_of_every_dialect_and_errors_of_both_providers_are_named() -> None:
    tools = [{"type": "function", "function": {"name": "a"}}, {"name": "b", "input_schema": {}}, {"type": "web_search"}]
    answers = [
        {"error": {"message": "x = 1: no"}},
        {"type": "error", "error": {"message": "y: no"}},
        {"error": "z"},
        None,
    ]
    exchanges = tuple(
        Exchange(method="POST", path=f"/sessions/s1/v1/{n}", status=400, body={"tools": tools, "n": n}, answer=answer)
        for n, answer in enumerate(answers)
    )
    text = report_text(replace(REPORT, exchanges=exchanges))
    assert "3 tools: a, b, web_search" in text and "parameters: n=0" in text
    for number, said in enumerate(["x = 1: no", "y: no", "z", "no reason"]):
        assert f"400 POST /v1/{number}, once: {said}\n" in text


def test_rows_without_a_cause_are_named_too() -> None:
    """An agent that left an answer out and asked again has changed nothing that the policy had read."""
    rows = tuple(Row(num_answers=1, prompt_tokens=1000, tokens=1010) for _ in range(4))
    text = report_text(replace(REPORT, rows=rows, forks={"edit": 1}))
    assert "1 of them began by edit: " in text and "\n  2 rows began otherwise: " in text
    assert "began otherwise" not in report_text(replace(REPORT, rows=rows[:2], forks={"edit": 1}))
    assert "ended after 2.0 s (1.5 s of processor time) with exit code 0\n" in text
