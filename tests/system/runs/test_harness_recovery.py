"""Sessions of harnesses in runs that are killed, or that lose a replica, while episodes are under way."""

import contextlib
import json
import re
import signal
from collections import defaultdict
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import psutil
import pytest

from scripts.observe.audit import audit
from tests.support.whole_runs import END_DEADLINE_S, START_DEADLINE_S, Run, find, started, trained

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

TURNS = 4
CHANCE = 8
"""Characters that an untrained model does not sample twice by chance."""
STEPS = 6
AGENT = """
import asyncio, json, os

STOP = ["e", "a", " ", "\\n"]


def note(**what):
    line = json.dumps({"life": os.environ["LIFE"], **what}) + "\\n"
    file = os.open(os.environ["HEARD"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, line.encode())  # one line at once, whoever else writes
    os.close(file)


async def agent(task, client):
    session = str(client.base_url).rstrip("/").split("/")[-2]
    messages, said = [{"role": "user", "content": task.prompt}], ""
    note(session=session, turn=-1)
    for turn in range(4):
        answer = await client.chat.completions.create(model="any", messages=messages, stop=STOP, max_tokens=12)
        text = answer.choices[0].message.content or ""
        note(session=session, turn=turn, id=answer.id, text=text)
        said += text
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "More?"}]
        await asyncio.sleep(0.4)
    return float(len(said) % 2)
"""
SPECIAL = re.compile(r"<(\|im_start\||\|im_end\||pad|bos|eos|unk)>|<[|\w]*$")
"""Control tokens, which records leave out; the last may be cut by a stop string in its name."""
Heard = dict[str, list[tuple[str, str]]]
"""The id and text of the answers that the harness of each episode heard, in order."""


def job(tmp_path: Path, model: Path) -> tuple[list[str], dict[str, str]]:
    (tmp_path / "my_agent.py").write_text(AGENT)
    overrides = [
        *("device=cpu", "model.kind=hf", f"model.path={model}", f"trainer.total_steps={STEPS}", "trainer.eval_every=0"),
        *("trainer.prompts_per_step=2", "algorithm.group_size=4", "data.num_train=200", "data.num_val=2"),
        *("rollout.agent=my_agent:agent", "rollout.max_response_tokens=64", "data.max_prompt_tokens=512"),
        *("rollout.max_failed_rewards=0", "rollout.max_num_seqs=16", "checkpoint.every=1", "resume=auto"),
    ]
    return overrides, {"PYTHONPATH": str(tmp_path), "HEARD": str(tmp_path / "heard.jsonl")}


def heard(tmp_path: Path, life: str) -> tuple[Heard, dict[str, int]]:
    """Return what the training episodes heard, and how often the harness of each was started."""
    answers, starts = defaultdict[str, list[tuple[str, str]]](list), defaultdict[str, int](int)
    for line in (tmp_path / "heard.jsonl").read_text().splitlines():
        note: dict[str, Any] = json.loads(line)
        if note["life"] != life or note["session"].startswith("eval"):
            continue
        ordinal, _, rest = note["session"].partition("-")
        episode = f"{ordinal.partition('_')[0]}-{rest.partition('-')[0]}"
        if note["turn"] < 0:
            starts[episode] += 1
        else:
            answers[episode].append((note["id"], note["text"]))
    return dict(answers), dict(starts)


def kill(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def check_records(run: Run) -> None:
    """Every trajectory is there once, and trained on all that was sampled in it and on nothing else."""
    found = audit(run.run_dir)
    assert (found.findings, found.lost, found.twice) == ((), 0, 0)
    steps = trained(run)
    assert [len(step) for step in steps] == [8] * STEPS
    for sequence in (sequence for step in steps for record in step for sequence in record["sequences"]):
        assert sequence["loss_tokens"] == sum(end - start for start, end, _ in sequence["versions"]) > 0


@pytest.mark.parametrize("who", [pytest.param("driver", marks=pytest.mark.nightly), "everything"])
def test_a_harness_hears_the_recorded_answers_after_its_run_was_killed(
    tmp_path: Path, chat_model: Path, who: str
) -> None:
    overrides, environment = job(tmp_path, chat_model)
    with started(tmp_path, *overrides, LIFE="first", **environment) as first:
        first.wait_for(f" 4/{STEPS} ")
        first.watch_children()
        if who == "everything":
            kill(list(first.children.values()))
        first.process.send_signal(signal.SIGKILL)
        first.process.wait()
        assert first.survivors() == []
    with started(tmp_path, *overrides, LIFE="second", **environment) as second:
        assert second.wait_for_end(START_DEADLINE_S + END_DEADLINE_S) == 0, second.output.read_text()
    assert json.loads((second.run_dir / "summary.json").read_text())["resumed_from"] >= 1
    check_records(second)
    before, _ = heard(tmp_path, "first")
    after, starts = heard(tmp_path, "second")
    assert set(starts.values()) == {1} and {len(answers) for answers in after.values()} == {TURNS}
    replayed = {episode: common(before[episode], after[episode]) for episode in after if episode in before}
    assert max(map(len, replayed.values()), default=0) >= CHANCE, f"none heard its first answers again: {replayed}"
    records = {f"{record['ordinal']}-{record['index']}": record for step in trained(second) for record in step}
    for episode, text in replayed.items():
        readable, _, _ = after[episode][0][1].partition("\ufffd")  # beside a control token, bytes may be a character
        assert not text or records[episode]["response"].startswith(SPECIAL.sub("", readable))


def common(before: Sequence[tuple[str, str]], after: Sequence[tuple[str, str]]) -> str:
    """The texts of the first answers that are the same in both lives, with the ids."""
    return "".join(text for _, text in takewhile(lambda answer: answer in before, after))


def test_an_episode_goes_on_in_its_session_when_its_replica_is_lost(tmp_path: Path, chat_model: Path) -> None:
    overrides, environment = job(tmp_path, chat_model)
    more = ["rollout.num_replicas=2", "rollout.max_replacements=0", "rollout.replica_timeout_s=30"]
    with started(tmp_path, *overrides, *more, LIFE="first", **environment) as run:
        run.wait_for(f" 2/{STEPS} ")
        find(run, "VLLM::EngineCore").send_signal(signal.SIGKILL)
        run.wait_for(" is given up: ")
        assert run.wait_for_end(START_DEADLINE_S + END_DEADLINE_S) == 0, run.output.read_text()
    check_records(run)
    answers, starts = heard(tmp_path, "first")
    assert set(starts.values()) == {1}, "no harness was started again"
    episodes = {f"{record['ordinal']}-{record['index']}" for step in trained(run) for record in step}
    assert {len(answers[episode]) for episode in episodes} == {TURNS}
