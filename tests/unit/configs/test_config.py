"""Every key is documented, every recipe composes, and what cannot work is refused with its key, value and a hint."""

import math
import re
import typing
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

from configs import load
from configs.algorithm import ADVANTAGES, LOSSES, Correction, Proximal
from configs.checkpoint import is_checkpoint
from configs.checks.ranges import NUM_ARITHMETIC, RANGES, bounds, out_of_range
from configs.cli.overrides import check_overrides
from configs.model import LoraServing
from configs.rewards import BUILT_IN_REWARDS
from configs.rollout import Speculation
from configs.schema import Config, Device, ModelKind, PauseMode, SinkName, Transport
from configs.trainer import AttentionKind, LearningRateSchedule
from configs.validate import ConfigError, check
from rollout.data.arithmetic import num_problems
from scripts.launch.models import NUM_VAL
from tests.support.compose import changed

SEARCH = "rollout.search.tags:agent_loop"


def refusal(**values: object) -> str:
    with pytest.raises(ConfigError) as caught:
        check(changed(Config(), **values))
    return str(caught.value)


def schema_keys(section: type = Config, prefix: str = "") -> dict[str, Any]:
    """Every key by its dotted name, with its type."""
    types = typing.get_type_hints(section)
    keys: dict[str, Any] = {}
    for field in fields(section):
        if is_dataclass(types[field.name]):
            keys |= schema_keys(types[field.name], f"{prefix}{field.name}.")
        else:
            keys[prefix + field.name] = types[field.name]
    return keys


# -- keys --------------------------------------------------------------------------------------------------------------


def test_every_key_has_documentation_and_a_default() -> None:
    docs = load.key_docs()
    assert set(docs) == set(schema_keys())
    assert [key for key, (_, doc) in docs.items() if not doc] == []
    assert docs["trainer.lr"] == ("0.0003", "AdamW's learning rate after warm-up.")
    assert [docs[key][0] for key in ("model.path", "device", "dry_run", "rollout.stale_policy")] == [
        "null",
        "auto",
        "false",
        "wait",
    ]


def test_the_documentation_of_a_choice_names_every_built_in() -> None:
    docs = load.key_docs()
    for key, names in {
        "algorithm.advantage": ADVANTAGES,
        "algorithm.loss": LOSSES,
        "algorithm.correction": [correction.value for correction in Correction],
        "rollout.reward": BUILT_IN_REWARDS,
    }.items():
        assert [name for name in names if not re.search(rf"\b{name}\b", docs[key][1])] == [], key


@pytest.mark.parametrize(
    "argument, hint",
    [
        ("trainer.lrr=1", "trainer.lrr=1: there is no such key; did you mean trainer.lr "),
        ("max_staleness=1", "did you mean rollout.max_staleness"),
        ("+rollout.replicas=2", "rollout.num_replicas"),
        ("receipe=gsm8k", "did you mean recipe"),
        ("zzz=1", "--help lists the sections"),
        ("__pycache_=1", "--help lists the sections"),
    ],
)
def test_an_unknown_key_is_refused_with_a_hint(argument: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_overrides(["trainer.lr=1", argument])
    assert hint in str(caught.value)


def test_known_keys_groups_and_options_pass() -> None:
    check_overrides(["seed=3", "++trainer.lr=1", "recipe=gsm8k", "model=hf", "sizes=hf", "hydra.run.dir=x", "~recipe"])


# -- values ------------------------------------------------------------------------------------------------------------

SHARED = {"gpu_share": 0.5}
SERVED = {"model__lora__rank": 8, "model__lora__serve": LoraServing.adapter}
COSINE = LearningRateSchedule.cosine
NUMBERS = [key for key, kind in schema_keys().items() if {int, float} & {kind, *typing.get_args(kind)}]


@pytest.mark.parametrize("key", NUMBERS)
def test_a_number_out_of_its_range_is_refused_and_its_bounds_are_not(key: str) -> None:
    low, high = bounds(key)
    name = key.replace(".", "__")
    for value in (low - 1, high * 1.5, 1e30, math.inf, math.nan):
        assert f"{key}={value}: must be between {low:.12g} and {high:.12g}" in refusal(**{name: value}).splitlines()
    for bound in (low, high):
        assert list(out_of_range(changed(Config(), **{name: bound}))) == []


def test_ranges_are_of_numbers_that_there_are() -> None:
    assert set(RANGES) <= set(NUMBERS)


def test_no_more_arithmetic_problems_are_asked_for_than_there_are() -> None:
    assert num_problems() - NUM_VAL == NUM_ARITHMETIC


@pytest.mark.parametrize(
    "values, line",
    [
        ({"rollout__temperature": 0.0}, "rollout.temperature=0.0: must be above 0 (evaluation may be greedy)"),
        ({"rollout__temperature": math.nan}, "rollout.temperature=nan: must be above 0 (evaluation may be greedy)"),
        ({"rollout__top_k": 0}, "rollout.top_k=0: must be -1 (the whole vocabulary) or at least 1"),
        ({"rollout__top_k": -2}, "rollout.top_k=-2: must be -1 (the whole vocabulary) or at least 1"),
        ({"algorithm__clip_ratio_c": 1.0}, "algorithm.clip_ratio_c=1.0: must be above 1"),
        ({"algorithm__group_size": 1}, "algorithm.group_size=1: must be at least 2: group advantages of one"),
        ({"algorithm__group_size": 0}, "algorithm.group_size=0: must be at least 2: group advantages of one"),
        ({"model__kind": ModelKind.hf}, "model.path=None: model.kind=hf needs the folder or hub name"),
        ({"model__path": "org/name"}, "model.path=org/name: model.kind=tiny makes its own model; choose model=hf"),
        ({"data__prompt_template": "Q: "}, "data.prompt_template='Q: ': must contain {question}"),
        ({"data__train_files": "/no/x"}, "data.train_files=/no/x: train_files and val_files are set both, or neither"),
        ({"data__train_files": "/no/x"}, "data.train_files=/no/x: no such file (from /"),
        ({"data__val_files": "/no/x"}, "data.val_files=/no/x: train_files and val_files are set both, or neither"),
        ({"data__train_files": "", "data__val_files": ""}, "data.val_files=: no such file (from /"),
        ({"rollout__agent_loop": "multi"}, "rollout.agent_loop=multi: must be one of single_turn, or package.module"),
        (
            {"rollout__reward": "gsm9k"},
            "rollout.reward=gsm9k: must be one of gsm8k, gsm8k_flexible, dapo, math_verify,",
        ),
        (
            {"rollout__reward": "gsm8k+0.1*x"},
            "rollout.reward=gsm8k+0.1*x: '0.1*x' must be one of gsm8k, gsm8k_flexible",
        ),
        ({"rollout__reward": "no.such:f"}, "rollout.reward=no.such:f: no.such cannot be imported: ModuleNotFound"),
        ({"rollout__reward": "gsm8k+math:pi"}, "rollout.reward=math:pi: must be callable with (prompt, text)"),
        ({"rollout__format_pattern": "(a"}, "rollout.format_pattern='(a': must be a regular expression: missing ), un"),
        ({"data__loader": "no.such:f"}, "data.loader=no.such:f: needs data.train_files and data.val_files"),
        ({"data__loader": "no.such:f"}, "data.loader=no.such:f: no.such cannot be imported"),
        ({"data__loader": "math:pow"}, "data.loader=math:pow: must be callable with (entries)"),
        ({"evaluation__samples": 2}, "evaluation.samples=2: greedy samples are all the same"),
        (
            {"evaluation__replicas": 2, "rollout__num_replicas": 2},
            "evaluation.replicas=2: must leave one of rollout.num_replicas=2 to the training",
        ),
        ({"model__hidden_size": 80}, "model.hidden_size=80: must be a multiple of 32"),
        ({"model__num_layers": 0}, "model.num_layers=0: must be between 1 and 1024"),
        ({"weight_sync__interval": 7}, "weight_sync.interval=7: must divide trainer.total_steps=60"),
        ({"weight_sync__interval": 6, "checkpoint__keep_every": 40}, "checkpoint.every=20: with checkpoint.keep_every"),
        ({"checkpoint__keep_every": 30}, "checkpoint.keep_every=30: must be a multiple of checkpoint.every=20: no o"),
        ({"rollout__min_replicas": 2}, "rollout.min_replicas=2: at most rollout.num_replicas=1"),
        ({"weight_sync__pause_mode": PauseMode.wait}, "weight_sync.pause_mode=wait: must be keep or abort: an update"),
        ({"trainer__num_ranks": 17}, "trainer.num_ranks=17: at most trainer.prompts_per_step=16"),
        ({"device": Device.cpu, "rollout__kv_cache_mb": None}, "rollout.kv_cache_mb=None: device=cpu needs a size in"),
        ({"weight_sync__prefill_grace_s": 60.0}, "weight_sync.prefill_grace_s=60.0: must be less than weight_sync.pau"),
        ({**SHARED, "trainer__num_ranks": 2}, "trainer.num_ranks=2: at most 1 with gpu_share=0.5: each of several"),
        (SHARED, "rollout.gpu_memory_utilization=0.85: at most gpu_share=0.5: the rest of the GPU"),
        ({**SHARED, "rollout__tensor_parallel_size": 2}, "rollout.tensor_parallel_size=2: at most 1 with gpu"),
        ({**SHARED, "rollout__data_parallel_size": 2}, "rollout.data_parallel_size=2: at most 1 with gpu_share"),
        (
            {**SHARED, "weight_sync__transport": Transport.collective},
            "weight_sync.transport=collective: with gpu_share=0.5, must be cuda_ipc, shared_memory or filesystem",
        ),
    ],
)
def test_a_value_that_cannot_work_is_refused(values: dict[str, object], line: str) -> None:
    assert any(given.startswith(line) for given in refusal(**values).splitlines()), refusal(**values)


@pytest.mark.parametrize(
    ("values", "line"),
    [
        (
            {"model__lora__alpha": 8.0},
            "model.lora.alpha=8.0: needs model.lora.rank: without it, all weights are trained",
        ),
        ({"model__lora__rank": 0}, "model.lora.rank=0: must be between 1 and 4096"),
        ({"model__lora__rank": -8}, "model.lora.rank=-8: must be between 1 and 4096"),
        (
            {"model__lora__rank": 8, "model__lora__targets": []},
            "model.lora.targets=[]: must be [all_linear] or names of",
        ),
        (
            {"model__lora__rank": 8, "model__lora__targets": ["q_proj", "all_linear"]},
            "model.lora.targets=['q_proj', 'all_linear']: all_linear stands for every linear layer but the head: leave",
        ),
        ({"model__lora__serve": LoraServing.adapter}, "model.lora.serve=adapter: needs model.lora.rank: without it"),
        (
            {"model__lora__rank": 513, "model__lora__serve": LoraServing.adapter},
            "model.lora.rank=513: at most 512 with model.lora.serve=adapter, as in vLLM",
        ),
        (
            {**SERVED, "device": Device.cuda},
            "rollout.dtype=float32: must be bfloat16 with model.lora.serve=adapter: vLLM's LoRA kernels for GPUs have",
        ),
        (
            {"model__lora__rank": 8, "model__lora__served_path": "/quantized"},
            "model.lora.served_path=/quantized: needs model.lora.serve=adapter: an adapter is merged into the weights",
        ),
        (
            {**SERVED, "rollout__speculative__method": Speculation.eagle3, "rollout__speculative__model": "x"},
            "rollout.speculative.method=eagle3: none, ngram or suffix with model.lora.serve=adapter: vLLM's other",
        ),
        ({"rollout__speculative__num_tokens": 0}, "rollout.speculative.num_tokens=0: must be between 1 and 64"),
        (
            {"rollout__speculative__num_tokens": 5},
            "rollout.speculative.num_tokens=5: needs a rollout.speculative.method",
        ),
        (
            {"rollout__speculative__max_match": 5},
            "rollout.speculative.max_match=5: needs rollout.speculative.method=ngram",
        ),
        (
            {"rollout__speculative__method": Speculation.ngram, "rollout__speculative__min_match": 5},
            "rollout.speculative.min_match=5: at most rollout.speculative.max_match=4",
        ),
        (
            {"rollout__speculative__method": Speculation.ngram, "rollout__speculative__model": "x"},
            "rollout.speculative.model=x: set with rollout.speculative.method=draft_model, eagle, eagle3, and",
        ),
        (
            {"model__lora__rank": 8, "weight_sync__delta": True},
            "weight_sync.delta=True: with model.lora.rank=8, must be false: only the adapter travels",
        ),
    ],
)
def test_an_adapter_that_cannot_be_is_refused(values: dict[str, object], line: str) -> None:
    assert any(given.startswith(line) for given in refusal(**values).splitlines()), refusal(**values)


@pytest.mark.parametrize(
    "values, line",
    [
        (
            {"trainer__activation_offload": True},
            "trainer.activation_offload=True: needs trainer.gradient_checkpointing=full: the inputs of recomputed",
        ),
        ({"trainer__sequence_parallel": 2}, "trainer.sequence_parallel=2: must divide trainer.num_ranks=1"),
        (
            {"trainer__sequence_parallel": 3, "trainer__num_ranks": 3},
            "trainer.sequence_parallel=3: must divide the 4 attention heads of the model",
        ),
        (
            {"trainer__sequence_parallel": 2, "trainer__num_ranks": 34},
            "trainer.num_ranks=34: at most trainer.prompts_per_step=16 x sequence_parallel=2",
        ),
        (
            {"trainer__attention": AttentionKind.flex, "device": Device.cpu},
            "trainer.attention=flex: device=cpu needs dense or varlen: flex has no gradients on CPUs",
        ),
        ({"trainer__attention": AttentionKind.varlen}, "trainer.attention=varlen: varlen is for trainer.layout=packed"),
        ({"trainer__mini_batches": 17}, "trainer.mini_batches=17: at most 16: of trainer.prompts_per_step=16"),
        (
            {"trainer__mini_batches": 9, "trainer__num_ranks": 2},
            "trainer.mini_batches=9: at most 8: of trainer.prompts_per_step=16, each has a group for every rank (train",
        ),
        ({"trainer__mini_batches": 0}, "trainer.mini_batches=0: must be between 1 and"),
        ({"trainer__mini_batches": -1}, "trainer.mini_batches=-1: must be between 1 and"),
        ({"trainer__epochs": 0}, "trainer.epochs=0: must be between 1 and 1000"),
        ({"trainer__lr_warmup_ratio": 1.1}, "trainer.lr_warmup_ratio=1.1: must be between 0 and 1"),
        ({"trainer__min_lr_ratio": -0.1}, "trainer.min_lr_ratio=-0.1: must be between 0 and 1"),
        ({"trainer__min_lr_ratio": 0.1}, "trainer.min_lr_ratio=0.1: only trainer.lr_schedule=linear and cosine read"),
        (
            {"trainer__lr_schedule": COSINE, "trainer__lr_warmup_steps": 60},
            "trainer.lr_warmup_steps=60: with trainer.lr_schedule=cosine, the warm-up must end before the run's 60 opt",
        ),
        (
            {"trainer__lr_schedule": COSINE, "trainer__lr_warmup_ratio": 1.0, "trainer__epochs": 2},
            "trainer.lr_warmup_ratio=1.0: with trainer.lr_schedule=cosine, the warm-up must end before the run's 120 o",
        ),
        (
            {"algorithm__loss": "reinforce", "algorithm__proximal": Proximal.current, "trainer__mini_batches": 4},
            "algorithm.loss=reinforce: with 4 optimizer steps per batch (trainer.mini_batches x epochs), has no ratio",
        ),
    ],
)
def test_optimizer_steps_and_rates_that_cannot_work_are_refused(values: dict[str, object], line: str) -> None:
    assert any(given.startswith(line) for given in refusal(**values).splitlines()), refusal(**values)


@pytest.mark.parametrize(
    ("sinks", "line"),
    [
        ([SinkName.wandb], "tracking.sinks=[wandb]: must have jsonl, which the audit and a resumed run read"),
        ([SinkName.jsonl] * 2, "tracking.sinks=[jsonl,jsonl]: must name each sink once"),
    ],
)
def test_sinks_have_the_file_and_are_named_once(sinks: list[SinkName], line: str) -> None:
    assert line in refusal(tracking__sinks=sinks).splitlines()


def test_tensorboard_without_its_package_is_refused_where_the_run_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("configs.checks.tracking.is_installed", lambda name: False)
    given: dict[str, object] = {"tracking__sinks": [SinkName.jsonl, SinkName.tensorboard]}
    line = "tracking.sinks=[jsonl,tensorboard]: tensorboard needs the package tensorboard: pip install tensorboard"
    assert line in refusal(**given).splitlines()
    check(changed(Config(), **given), needed_files=())


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"data__loader_args": {"n": 1}}, "data.loader_args={'n': 1}: needs data.loader=package.module:function"),
        ({"data__demonstrations": "m:f"}, "data.demonstrations=m:f: needs data.loader=package.module:function"),
        (
            {"data__loader": "rollout.data.reasoning_gym:rows", "data__loader_args": {"task": {}}},
            "data.loader=rollout.data.reasoning_gym:rows: must be callable with (entries, task=...)",
        ),
        (
            {"data__loader": "os.path:basename", "data__demonstrations": "os.path:basename"},
            "data.demonstrations=os.path:basename: must be callable with (num, seed)",
        ),
    ],
)
def test_arguments_of_a_loader_and_its_demonstrations_need_what_takes_them(values: dict[str, Any], line: str) -> None:
    assert any(given.startswith(line) for given in refusal(**values).splitlines()), refusal(**values)


@pytest.mark.parametrize(
    ("values", "line"),
    [
        (
            {"rollout__agent_loop": SEARCH, "rollout__agent_args": {"retriever": {}, "topp": 1}},
            f"rollout.agent_loop={SEARCH}: must be callable with (tokenizer, retriever=..., topp=...): got an",
        ),
        ({"rollout__agent_loop": SEARCH}, f"rollout.agent_loop={SEARCH}: must be callable with (tokenizer): missing"),
        (
            {"rollout__agent": "rollout.agents.solver:agent", "rollout__agent_args": {"topk": 1}},
            "rollout.agent=rollout.agents.solver:agent: must be callable with (task, client, topk=...): got an unexp",
        ),
        ({"rollout__agent_args": {"topk": 1}}, "rollout.agent_args={'topk': 1}: are those of rollout.agent_loop=pack"),
        (
            {"rollout__agent_command": "agent", "rollout__agent_args": {"topk": 1}},
            "rollout.agent_args={'topk': 1}: are those of rollout.agent_loop=pack",
        ),
    ],
)
def test_arguments_are_refused_that_an_agent_does_not_take(values: dict[str, object], line: str) -> None:
    assert any(given.startswith(line) for given in refusal(**values).splitlines()), refusal(**values)


def test_a_worker_is_given_up_before_its_groups_are() -> None:
    line = "rollout.agent_worker_timeout_s=120.0: must be less than rollout.group_timeout_s=120"
    assert refusal(rollout__group_timeout_s=120.0).startswith(line)


def test_values_at_the_edge_of_what_works_are_taken(tmp_path: Path) -> None:
    one, two = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    one.touch()
    two.touch()
    for values in (
        {"rollout__top_k": 1},
        {"rollout__agent_loop": "os.path:basename"},
        {"rollout__agent_loop": SEARCH, "rollout__agent_args": {"retriever": {"kind": "world"}, "topk": 1}},
        {"rollout__reward": "0.5*os.path:join+math_verify"},
        {"data__loader": "os.path:basename", "data__train_files": "a", "data__val_files": "b"},
        {"data__train_files": "openai/gsm8k:main@train", "data__val_files": f"{tmp_path}@test"},
        {"evaluation__samples": 2, "evaluation__temperature": 0.6},
        {"evaluation__replicas": 2, "rollout__num_replicas": 3},
        {"weight_sync__interval": 6, "checkpoint__every": 12, "checkpoint__keep_every": 48},
        {"weight_sync__interval": 6, "checkpoint__every": 0, "checkpoint__keep_every": 7},
        {"rollout__num_replicas": 2, "rollout__min_replicas": 2},
        {"weight_sync__pause_mode": PauseMode.abort},
        {"trainer__num_ranks": 16},
        {
            "gpu_share": 0.3,
            "rollout__gpu_memory_utilization": 0.3,
            "rollout__num_replicas": 2,
            "weight_sync__transport": Transport.cuda_ipc,
        },
        {"data__train_files": f"{one}, {two}", "data__val_files": f"{two}"},
        {"model__kind": ModelKind.hf, "model__path": "org/name"},
        {"device": Device.cuda, "rollout__kv_cache_mb": None},
    ):
        check(changed(Config(), **values))


def test_all_problems_are_listed_at_once() -> None:
    """Ranges and contradictions together, so that nothing is mended one start at a time. interval=0 divides nothing."""
    lines = refusal(
        seed=-1,
        trainer__lr=2.0,
        weight_sync__interval=0,
        rollout__reward="x",
        data__prompt_template="",
        model__path="y",
    ).splitlines()
    keys = ["seed", "trainer.lr", "weight_sync.interval", "model.path", "data.prompt_template", "rollout.reward"]
    assert [line.split("=")[0] for line in lines] == keys


def test_a_command_that_reads_the_held_out_set_only_needs_no_other(tmp_path: Path) -> None:
    (tmp_path / "test.jsonl").touch()
    config = changed(Config(), data__train_files="/no/x", data__val_files=f"{tmp_path}/test.jsonl")
    check(config, ["val_files"])
    check(changed(config, data__train_files=None), ["val_files"])
    with pytest.raises(ConfigError, match=r"data\.train_files=/no/x: no such file"):
        check(config)


def test_a_model_folder_without_a_config_is_no_model(tmp_path: Path) -> None:
    line = f"model.path={tmp_path}: no Hugging Face model: the folder has no config.json; nor a checkpoint"
    assert refusal(model__kind=ModelKind.hf, model__path=str(tmp_path)) == line
    (tmp_path / "config.json").touch()
    check(changed(Config(), model__kind=ModelKind.hf, model__path=str(tmp_path)))


@pytest.mark.parametrize("path", ["/no/model", "~/no/model", "~nobody/model", "./model", "runs/sft/model"])
def test_a_model_that_is_no_folder_here_must_have_a_name_of_the_hub(path: str) -> None:
    hf: dict[str, Any] = {"model__kind": ModelKind.hf}
    line = f"model.path={path}: no such folder, and no name of the hub, which would be NAME or OWNER/NAME"
    assert refusal(**hf, model__path=path) == line
    for name in ("gpt2", "Qwen/Qwen2.5-0.5B"):
        check(changed(Config(), **hf, model__path=name))
    check(changed(Config(), **hf, model__path=path, ray__address="auto"))
    served = {"model__lora__rank": 8, "model__lora__serve": LoraServing.adapter, "model__lora__served_path": path}
    assert refusal(**hf, model__path="gpt2", **served).startswith(f"model.lora.served_path={path}: no such folder")


def test_what_is_missing_among_runs_is_no_name_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "runs" / "sft"
    (run / "checkpoints").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    hf: dict[str, Any] = {"model__kind": ModelKind.hf}
    check(changed(Config(), **hf, model__path="runs/stf"))
    (tmp_path / "runs" / "latest").symlink_to("sft")
    assert refusal(**hf, model__path="runs/stf").startswith("model.path=runs/stf: no such folder")
    served = {"model__lora__rank": 8, "model__lora__serve": LoraServing.adapter, "model__lora__served_path": "runs/sft"}
    assert refusal(**hf, model__path="runs/sft", **served).startswith("model.lora.served_path=runs/sft: must be a Hugg")


def test_a_run_folder_or_a_checkpoint_may_be_the_model(tmp_path: Path) -> None:
    step = tmp_path / "checkpoints" / "step_000020"
    step.mkdir(parents=True)
    (step / "COMPLETE.json").touch()
    for path in (tmp_path, step):
        check(changed(Config(), model__kind=ModelKind.hf, model__path=str(path)))
        assert is_checkpoint(path)
    (tmp_path / "config.json").touch()
    assert not is_checkpoint(tmp_path), "a Hugging Face folder beside which its trainer keeps its own checkpoints"
