"""What a dry run says, and what it refuses."""

import json
from pathlib import Path

import pytest

from configs.data import DataConfig
from configs.schema import Config, ModelKind
from configs.validate import ConfigError
from scripts.launch import budget
from scripts.launch import plan as plan_module
from scripts.launch.machine import Machine
from scripts.launch.plan import plan
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
