"""A dry run says what would be trained, and refuses what cannot be."""

import json
from pathlib import Path

import pytest

from configs.data import DataConfig
from configs.rollout import ToolPlace
from configs.schema import Config, ModelKind
from configs.validate import ConfigError
from scripts.plan import budget
from scripts.plan import plan as plan_module
from scripts.plan.machine import Machine
from scripts.plan.plan import plan
from scripts.plan.preview import check_agent_loop, refuse_agent_loop
from tests.support.chat_models import chat_tokenizer
from tests.support.compose import changed

TRAIN_AND_VAL = ("train_files", "val_files")


def parts_of(config: Config) -> dict[str, str]:
    text = plan("train", config, "cpu", Path("/run"), TRAIN_AND_VAL)
    return dict(line.strip().split(": ", 1) for line in text.splitlines())


def with_data(folder: Path, *rows: dict[str, object]) -> Config:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Config(data=DataConfig(train_files=str(file), val_files=str(file)))


def test_a_plan_says_what_a_step_and_the_run_train_on(tmp_path: Path) -> None:
    config = with_data(tmp_path, *({"question": f"{n}?", "answer": n} for n in range(64)))
    parts = parts_of(changed(config, trainer__total_steps=8, trainer__prompts_per_step=16, trainer__lr=1e-5))
    assert parts["epochs"] == "2 (128 prompts of 64)"
    assert parts["held out"].endswith("rows.jsonl, 64 prompts")
    assert parts["step"] == "128 trajectories, at most 4,096 sampled tokens and 1024 prompt tokens each"
    assert parts["loss"].startswith("ppo_clip, token_mean, correction auto")
    assert parts["optimizer"].startswith("AdamW, lr 1e-05 after 5 steps")


def test_a_plan_says_that_nothing_is_held_out(tmp_path: Path) -> None:
    config = with_data(tmp_path, *({"question": f"{n}?", "answer": n} for n in range(16)))
    assert parts_of(changed(config, data__val_files="none"))["held out"] == "none, so nothing is evaluated"


def test_a_plan_reads_the_data_that_is_there(tmp_path: Path) -> None:
    config = with_data(tmp_path, {"question": "1?", "answer": 1}, {"question": "2?"})
    with pytest.raises(ConfigError, match=r"rows\.jsonl:2: no column 'answer'; the row has question"):
        parts_of(config)


def test_a_plan_says_what_each_process_takes_and_refuses_what_cannot_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Machine(gpu=None, host=2.0**33, shared=2.0**30)
    monkeypatch.setattr(plan_module, "this_machine", lambda config: here)
    monkeypatch.setattr(budget, "this_machine", lambda config: here)
    parts = parts_of(Config())
    assert parts["memory"].startswith("0.2M parameters; ")
    assert parts["per rank"].startswith("host 58.4 MiB: weights 0.7 MiB") and "activations" in parts["per rank"]
    assert parts["per worker"].endswith("KV cache for 262,144 tokens")
    assert parts["shared"] == "0.7 MiB in /dev/shm, 1.0 GiB free here"
    too_much = changed(Config(), trainer__tokens_per_micro_batch=10**7)
    with pytest.raises(ConfigError, match=r"^trainer\.gradient_checkpointing: 1 train worker\(s\) and 1 of replicas"):
        parts_of(too_much)
    with pytest.raises(ConfigError, match="there are 8.0 GiB; most is activations$"):
        budget.refuse_without_memory(too_much, "cpu")


def test_an_agent_loop_that_is_none_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "no_loop.py").write_text("def make(tokenizer):\n    return len(tokenizer)\n")
    monkeypatch.syspath_prepend(tmp_path)
    config = changed(Config(), rollout__agent_loop="no_loop:make")
    with pytest.raises(
        ConfigError, match=r"rollout\.agent_loop=no_loop:make: gave 4\d\d, which has no run\(tasks, gen"
    ):
        parts_of(config)


@pytest.mark.parametrize(
    ("family", "said"), [("qwen2.5", "chat template: append-only; "), ("deepseek", "chat template: NOT append-only; ")]
)
def test_a_harness_is_told_of_the_chat_template(family: str, said: str, tmp_path: Path) -> None:
    chat_tokenizer(family).save_pretrained(tmp_path)
    config = changed(Config(), model__kind=ModelKind.hf, model__path=str(tmp_path), rollout__agent_command="run-it")
    assert parts_of(config)["sessions"].startswith(said)
    assert "sessions" not in parts_of(changed(config, rollout__agent_command=None))


def test_a_chat_template_that_is_not_here_is_not_looked_at_and_one_that_is_none_is_refused() -> None:
    away = changed(Config(), model__kind=ModelKind.hf, model__path="no/such-model", rollout__agent_command="run-it")
    assert parts_of(away)["sessions"].startswith("chat template: not looked at, for want of the tokenizer: ")
    none = changed(Config(), rollout__agent_command="run-it")
    with pytest.raises(
        ConfigError, match=r"^rollout\.agent_command=run-it: sessions need a tokenizer with one chat temp"
    ):
        parts_of(none)


TOOL_LOOPS = """
from rollout.agents.chat_turns import ChatTurns
from rollout.agents.multi_turn import MultiTurn
from rollout.agents.tools import Toolbox, ToolEnvironment


def power(base: int) -> int:
    return base**2


def loop_of(tokenizer, function):
    toolbox = Toolbox([function])
    chat = ChatTurns(tokenizer, toolbox.specs())
    return MultiTurn(lambda prompt: ToolEnvironment(toolbox), tokenizer, max_turns=2, chat=chat)


def with_tool(tokenizer):
    return loop_of(tokenizer, power)


def with_closure(tokenizer):
    def closure(base: int) -> int:
        return base + len(tokenizer)

    return loop_of(tokenizer, closure)
"""


@pytest.fixture
def tool_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """A config whose agent loop has a tool, for a model with a chat template."""
    (tmp_path / "tool_loops.py").write_text(TOOL_LOOPS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    chat_tokenizer("qwen2.5").save_pretrained(tmp_path / "model")
    config = changed(Config(), model__kind=ModelKind.hf, model__path=str(tmp_path / "model"))
    return changed(config, rollout__agent_loop="tool_loops:with_tool", data__chat_template=True)


def test_tools_that_no_template_shows_are_refused_and_the_error_names_the_next_key(tool_loop: Config) -> None:
    assert check_agent_loop(tool_loop) is None
    with pytest.raises(ConfigError) as refused:
        check_agent_loop(changed(tool_loop, data__chat_template=False))
    assert str(refused.value) == (
        "data.chat_template=false: rollout.agent_loop=tool_loops:with_tool: has tools, which only a chat template "
        "shows: set data.chat_template=true"
    )
    plain = changed(tool_loop, model__kind=ModelKind.tiny, model__path=None)
    with pytest.raises(ConfigError, match=r"this one has none; model=chat has a chat template \(with its data.gener"):
        check_agent_loop(plain)


def test_a_tool_that_no_process_can_find_is_refused_before_anything_starts(tool_loop: Config) -> None:
    closure = changed(tool_loop, rollout__agent_loop="tool_loops:with_closure")
    assert check_agent_loop(closure) is None
    in_processes = changed(closure, rollout__tools_run_in=ToolPlace.process)
    with pytest.raises(ConfigError, match=r"^rollout\.tools_run_in=process: the tool closure is not found by its name"):
        check_agent_loop(in_processes)
    assert check_agent_loop(changed(tool_loop, rollout__tools_run_in=ToolPlace.process)) is None


@pytest.mark.slow
def test_a_run_refuses_what_its_dry_run_refuses_in_another_process(tool_loop: Config) -> None:
    with pytest.raises(ConfigError, match=r"^data\.chat_template=false: .*: set data\.chat_template=true$"):
        refuse_agent_loop(changed(tool_loop, data__chat_template=False))
    refuse_agent_loop(changed(tool_loop, rollout__tools_run_in=ToolPlace.process))
