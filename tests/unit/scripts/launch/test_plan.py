"""What a dry run says, and what it refuses."""

import json
import struct
from pathlib import Path

import pytest

from configs.data import DataConfig
from configs.schema import Config, DType, ModelKind, Transport
from configs.validate import ConfigError
from scripts.launch import budget
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


def test_memory_follows_from_the_headers_of_the_weights(tmp_path: Path) -> None:
    """One billion parameters in files with a hole in the place of the data."""
    for number, shape in enumerate(([1000, 1000, 500], [500_000_000])):
        tensor = {"dtype": "I8", "shape": shape, "data_offsets": [0, 500_000_000]}
        text = json.dumps({"a": tensor}).encode()
        for name in (f"model-0000{number}-of-00002", "consolidated"):  # which transformers does not load
            with (tmp_path / f"{name}.safetensors").open("wb") as file:
                file.write(struct.pack("<Q", len(text)) + text)
                file.truncate(file.tell() + 500_000_000)
    config = changed(Config(), model__kind=ModelKind.hf, model__path=str(tmp_path), trainer__num_ranks=4)
    config = changed(config, rollout__dtype=DType.bfloat16, rollout__tensor_parallel_size=2)
    known = budget.num_parameters(config)
    assert known == 10**9
    parts = budget.memory_parts(config, known)
    assert parts["per_rank"] == "weights 953.7 MiB, AdamW 1.9 GiB, gradients 3.7 GiB (whole until a step's last batch)"
    assert parts["per_worker"] == "weights 953.7 MiB, staging 953.7 MiB (host), KV cache 256 MiB"
    assert parts["shared"].startswith(f"1.9 GiB in {budget.DIRECTORY}, ")
    adapted = budget.memory_parts(changed(config, model__lora__rank=8), known)
    assert adapted["per_rank"].startswith("frozen weights 953.7 MiB, adapter of rank 8 (16 bytes for each")
    assert "what adapters are merged into 1.9 GiB (host)" in adapted["per_worker"]
    large = budget.memory_parts(changed(config, trainer__unsharded_gradients_mb=100), known)
    assert "gradients 953.7 MiB" in large["per_rank"]
    assert "shared" not in budget.memory_parts(changed(config, weight_sync__transport=Transport.collective), known)
    assert budget.num_parameters(changed(config, model__path="no/such-model-here")) is None
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ConfigError, match="model.safetensors cannot be read: "):
        budget.num_parameters(config)


def test_too_little_shared_memory_is_warned_of() -> None:
    assert budget.memory_problem(Config(), 10**6) is None
    found = budget.memory_problem(Config(), 10**15)
    assert found is not None and found.startswith("weight_sync.transport=shared_memory: needs ")


def test_a_run_whose_weights_do_not_fit_into_shared_memory_ends_before_it_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    budget.refuse_without_memory(Config())
    monkeypatch.setattr(budget, "num_parameters", lambda config: 10**15)
    with pytest.raises(ConfigError, match=r"^weight_sync\.transport=shared_memory: needs .*--shm-size"):
        budget.refuse_without_memory(Config())
    budget.refuse_without_memory(changed(Config(), weight_sync__transport=Transport.collective))


@pytest.mark.parametrize(("hidden_size", "num_layers", "millions"), [(64, 2, 0.2), (192, 4, 2.2)])
def test_the_models_made_here_have_the_size_that_the_pages_say(
    hidden_size: int, num_layers: int, millions: float
) -> None:
    known = budget.num_parameters(changed(Config(), model__hidden_size=hidden_size, model__num_layers=num_layers))
    assert known is not None and round(known / 1e6, 1) == millions


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
