"""Scripts as users of other frameworks have them become commands that our own checks let through."""

import re
import shlex
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from configs.cli.compose import compose_job
from configs.cli.overrides import check_overrides
from configs.load import load
from configs.schema import Config
from scripts.migrate.command import BASE, RULES, composable, migrated
from scripts.migrate.counterparts import Translation, translate
from scripts.migrate.reading import read
from scripts.migrate.settings import Setting, Source, UnreadableError

VERL = r"""
set -xeuo pipefail
adv_estimator=grpo
max_prompt_length=$((1024 * 2))
max_response_length=$((1024 * 8))
train_prompt_bsz=512
RAY_DATA_HOME=${RAY_DATA_HOME:-"${HOME}/verl"}
TRAIN_FILE=${TRAIN_FILE:-"${RAY_DATA_HOME}/data/dapo-math-17k.parquet"}
python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=${adv_estimator} \
    data.train_files="${TRAIN_FILE}" \
    data.val_files="['$HOME/data/aime.parquet','$HOME/data/amc.parquet']" \
    data.truncation=left \
    data.max_prompt_length=${max_prompt_length} data.max_response_length=${max_response_length} \
    data.train_batch_size=${train_prompt_bsz} \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2 \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4 \
    actor_rollout_ref.rollout.n=16 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.80 \
    actor_rollout_ref.model.path=Qwen/Qwen2.5-7B \
    actor_rollout_ref.model.enable_gradient_checkpointing=True \
    actor_rollout_ref.model.use_remove_padding=True \
    actor_rollout_ref.actor.optim.lr_warmup_steps=10 \
    actor_rollout_ref.actor.use_kl_loss=False actor_rollout_ref.actor.kl_loss_coef=0.001 \
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \
    actor_rollout_ref.actor.clip_ratio_low=0.2 actor_rollout_ref.actor.clip_ratio_high=0.28 \
    actor_rollout_ref.actor.loss_agg_mode=token-mean \
    algorithm.rollout_correction.rollout_rs=seq_mean_k1 \
    algorithm.rollout_correction.rollout_rs_threshold=0.5_2.0 \
    +algorithm.filter_groups.enable=True \
    reward_model.overlong_buffer.enable=True reward_model.overlong_buffer.len=4096 \
    custom_reward_function.path=/secret/my_reward.py custom_reward_function.name=score \
    trainer.logger='["console","wandb"]' trainer.project_name=dapo trainer.experiment_name=first \
    trainer.n_gpus_per_node=8 trainer.nnodes=2 trainer.save_freq=-1 trainer.test_freq=5 \
    trainer.total_training_steps=400 trainer.device=$DEVICE "$@"
"""
ASYNC = """
python -m verl.experimental.fully_async_policy.fully_async_main data.train_batch_size=0 \\
  data.train_files=a.parquet data.val_files=b.parquet actor_rollout_ref.model.path=org/model \\
  actor_rollout_ref.actor.ppo_mini_batch_size=32 actor_rollout_ref.rollout.n=8 \\
  actor_rollout_ref.rollout.tensor_model_parallel_size=2 \\
  rollout.nnodes=2 rollout.n_gpus_per_node=8 rollout.total_rollout_steps=6400 \\
  trainer.nnodes=1 trainer.n_gpus_per_node=8 \\
  async_training.staleness_threshold=0.5 async_training.trigger_parameter_sync_step=4 async_training.require_batches=2
"""
SKYRL = """
: "${DATA_DIR:=$HOME/data/gsm8k}"
NUM_GPUS=4
uv run --isolated --extra vllm -m skyrl_train.entrypoints.main_base \\
  data.train_data="['train.parquet']" data.val_data="['val.parquet']" \\
  trainer.algorithm.advantage_estimator="grpo" \\
  trainer.policy.model.path="Qwen/Qwen2.5-1.5B-Instruct" \\
  trainer.placement.colocate_all=false trainer.placement.policy_num_gpus_per_node=$NUM_GPUS \\
  trainer.strategy=fsdp2 generator.num_inference_engines=$NUM_GPUS generator.inference_engine_tensor_parallel_size=1 \\
  trainer.fully_async.max_staleness_steps=4 trainer.fully_async.num_parallel_generation_workers=64 \\
  trainer.epochs=20 trainer.eval_interval=5 trainer.ckpt_interval=-1 \\
  trainer.train_batch_size=64 trainer.policy_mini_batch_size=64 trainer.micro_forward_batch_size_per_gpu=8 \\
  generator.sampling_params.max_generate_length=1024 trainer.max_prompt_length=512 \\
  trainer.policy.optimizer_config.lr=1.0e-6 trainer.algorithm.use_kl_loss=true trainer.algorithm.kl_loss_coef=0.01 \\
  generator.backend=vllm environment.env_class=gsm8k generator.n_samples_per_prompt=5 \\
  trainer.algorithm.loss_reduction=sequence_mean trainer.logger=wandb trainer.run_name=first
"""
TRL = """
import os
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer
os.system("touch made")
dataset = load_dataset("openai/gsm8k", "main", split="train")
dataset = dataset.map(lambda row: {"prompt": row["question"]})
GROUP = 8

def reward_len(completions, **kwargs):
    return [-abs(20 - len(completion)) for completion in completions]

args = GRPOConfig(
    output_dir="out", per_device_train_batch_size=16, gradient_accumulation_steps=4, num_generations=GROUP,
    max_completion_length=512, learning_rate=2e-6, beta=0.04, loss_type="dr_grpo", scale_rewards="none",
    lr_scheduler_type="constant_with_warmup", warmup_ratio=0.1, max_steps=200, logging_steps=10, bf16=True,
    report_to=["wandb", "trackio"], use_vllm=True, vllm_mode="colocate", save_strategy="no", seed=make_seed(),
)
trainer = GRPOTrainer(model="Qwen/Qwen2-0.5B-Instruct", reward_funcs=reward_len, args=args, train_dataset=dataset)
trainer.train()
"""
TRL_SHELL = """accelerate launch --num_processes 4 grpo.py --model_name_or_path org/model --dataset_name org/data \\
  --per_device_train_batch_size 8 --num_generations 8 --epsilon 0.1 --eval_strategy steps --eval_steps 50
"""
PRIME_RL = """
max_steps = 100
seq_len = 4096
output_dir = "outputs"
[model]
name = "PrimeIntellect/Qwen3-0.6B"
[orchestrator]
batch_size = 128
group_size = 16
max_off_policy_steps = 8
[[orchestrator.train.env]]
id = "reverse-text"
[orchestrator.train.sampling]
max_completion_tokens = 1024
[trainer.optim]
lr = 3e-6
[trainer.model]
compile = true
[deployment]
num_infer_gpus = 6
num_train_gpus = 2
[inference.parallel]
tp = 2
[slurm]
job_name = "x"
"""
FILES = {
    "verl": ("run.sh", VERL),
    "verl, asynchronous": ("async.sh", ASYNC),
    "SkyRL": ("skyrl.sh", SKYRL),
    "TRL": ("grpo.py", TRL),
    "TRL, options": ("grpo.sh", TRL_SHELL),
    "prime-rl": ("rl.toml", PRIME_RL),
}


def migrate(name: str, folder: Path) -> tuple[str, list[str]]:
    """The notes, and the words of the command."""
    file, text = FILES[name]
    (folder / file).write_text(text)
    notes, _, command = migrated(folder / file).partition("\nslipstream train ")
    assert "Refused by our checks" not in notes and "cannot be converted" not in notes
    assert all(line.startswith("#") for line in notes.splitlines() if line)
    return notes, shlex.split(command.replace("\\\n", " "))


def translated(file: Path, text: str) -> Translation:
    """Translate a file of whatever framework it is."""
    file.write_text(text)
    source = read(file, None)
    return translate(source, RULES[source.framework])


def composed(words: list[str]) -> Config:
    check_overrides(words)
    return load(compose_job("train", [*words, "dry_run=true"]).config, overrides=words)


def test_verl(tmp_path: Path) -> None:
    notes, words = migrate("verl", tmp_path)
    config = composed(words)
    assert config.data.train_files == "~/verl/data/dapo-math-17k.parquet"
    assert config.data.val_files == "~/data/aime.parquet,~/data/amc.parquet"
    assert (config.data.prompt_key, config.data.answer_key) == ("prompt", "reward_model.ground_truth")
    trainer, algorithm, rollout = config.trainer, config.algorithm, config.rollout
    assert (trainer.prompts_per_step, trainer.mini_batches, algorithm.group_size) == (512, 16, 16)
    assert trainer.tokens_per_micro_batch == 2 * (2048 + 8192)
    assert (trainer.num_ranks, rollout.num_replicas, rollout.tensor_parallel_size) == (8, 4, 2)
    assert algorithm.kl_loss_coef == 0 and trainer.lr == 1e-6  # their default
    assert (algorithm.rejection_low, algorithm.rejection_high) == (0.5, 2.0) and algorithm.filter_groups
    assert (trainer.eval_every, config.checkpoint.every, trainer.total_steps) == (5, 0, 400)
    assert "data.truncation=left: no prompt is cut: data.overlong_prompts=filter or refuse" in notes
    assert "trainer.device=$DEVICE: its value is known only when the file runs" in notes
    assert "rollout.reward takes (prompt, text), and theirs (data_source, solution_str" in notes
    assert "log_prob_micro_batch_size_per_gpu=4: the logprobs of the engine are used" in notes


def test_the_asynchronous_verl(tmp_path: Path) -> None:
    config = composed(migrate("verl, asynchronous", tmp_path)[1])
    assert (config.trainer.prompts_per_step, config.trainer.mini_batches, config.trainer.total_steps) == (32, 1, 200)
    assert (config.rollout.max_staleness, config.weight_sync.interval) == (1, 8)
    assert (config.trainer.num_ranks, config.rollout.num_replicas) == (8, 8)
    assert config.algorithm.clip_ratio_high == 0.2


def test_a_verl_one_step_off_trains_its_batch_on_gpus_of_its_own(tmp_path: Path) -> None:
    words = "data.train_batch_size=512 actor_rollout_ref.actor.ppo_mini_batch_size=32 trainer.n_gpus_per_node=6"
    words += " rollout.nnodes=2 rollout.n_gpus_per_node=2 actor_rollout_ref.rollout.tensor_model_parallel_size=2"
    script = f"python3 -m verl.experimental.one_step_off_policy.main_ppo data.train_files=a {words}"
    overrides = translated(tmp_path / "a.sh", script).overrides
    expected = {"trainer.prompts_per_step": 512, "trainer.mini_batches": 16, "rollout.max_staleness": 1}
    expected |= {"trainer.num_ranks": 6, "rollout.num_replicas": 2}
    assert {key: overrides[key] for key in expected} == expected


def test_a_kl_of_verl_without_its_coefficient_takes_that_of_verl(tmp_path: Path) -> None:
    words = "algorithm.use_kl_in_reward=True actor_rollout_ref.actor.use_kl_loss=True"
    overrides = translated(tmp_path / "a.sh", f"python3 -m verl.trainer.main_ppo data.train_files=a {words}").overrides
    assert (overrides["algorithm.kl_reward_coef"], overrides["algorithm.kl_loss_coef"]) == (0.001, 0.001)


def test_an_entropy_bonus_of_skyrl_without_its_coefficient_takes_that_of_skyrl() -> None:
    settings = (
        Setting("trainer.algorithm.use_entropy_loss", True),
        Setting("trainer.algorithm.overlong_buffer_len", 9),
    )
    overrides = translate(Source(framework="skyrl", settings=settings), RULES["skyrl"]).overrides
    assert (overrides["algorithm.entropy_coef"], overrides["algorithm.overlong_buffer_tokens"]) == (0.01, 9)


@pytest.mark.parametrize("section", ["reward.reward_kwargs", "reward_model.reward_kwargs"])
def test_the_buffer_of_long_responses_has_its_newer_names(section: str, tmp_path: Path) -> None:
    words = f"+{section}.overlong_buffer_cfg.enable=True +{section}.overlong_buffer_cfg.len=4096"
    overrides = translated(tmp_path / "a.sh", f"python3 -m verl.trainer.main_ppo data.train_files=a {words}").overrides
    assert overrides["algorithm.overlong_buffer_tokens"] == 4096


def test_skyrl(tmp_path: Path) -> None:
    notes, words = migrate("SkyRL", tmp_path)
    config = composed(words)
    assert (config.rollout.max_staleness, config.rollout.num_replicas, config.trainer.num_ranks) == (4, 4, 4)
    assert config.rollout.max_num_seqs == 64 * 5 // 4 and config.rollout.reward == "gsm8k"
    assert config.algorithm.kl_loss_coef == 0.01 and config.checkpoint.every == 0
    assert "trainer.epochs=20: set trainer.total_steps" in notes


def test_a_script_of_trl_is_read_by_its_syntax_and_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    notes, words = migrate("TRL", tmp_path)
    config = composed(words)
    assert not (tmp_path / "made").exists()
    assert (config.data.train_files, config.data.val_files) == ("openai/gsm8k:main@train", "none")
    assert (config.trainer.prompts_per_step, config.algorithm.group_size) == (16 * 4 // 8, 8)
    assert str(config.algorithm.loss_aggregation) == "LossAggregation.seq_mean_token_sum_norm"
    assert not config.algorithm.normalize_by_std and config.algorithm.kl_loss_coef == 0.04
    assert config.algorithm.clip_ratio_high == 0.2 and config.checkpoint.every == 0
    assert "seed=make_seed(): its value is known only when the file runs" in notes
    assert "reward_funcs=reward_len: rollout.reward takes (prompt, text)" in notes


def test_options_of_trl_count_the_processes(tmp_path: Path) -> None:
    config = composed(migrate("TRL, options", tmp_path)[1])
    assert config.trainer.prompts_per_step == 8 * 4 // 8 and config.trainer.eval_every == 50
    assert config.algorithm.clip_ratio_high == config.algorithm.clip_ratio_low == 0.1
    assert (config.data.train_files, config.data.val_files) == ("org/data@train", "org/data@test")


def test_what_is_switched_off_and_where_the_output_goes_cost_no_other_option_of_trl(tmp_path: Path) -> None:
    script = (
        "accelerate launch --num_processes 2 -m my.grpo --model_name_or_path org/model --dataset_name org/data "
        "--learning_rate 1.2345678e-5 --eval_strategy no --eval_steps 5 --save_strategy no "
        "--per_device_train_batch_size 8 --num_generations 4 > log.txt 2>&1\n"
    )
    overrides = translated(tmp_path / "a.sh", script).overrides
    assert overrides["algorithm.group_size"] == overrides["trainer.prompts_per_step"] == 4
    assert overrides["trainer.eval_every"] == overrides["checkpoint.every"] == 0
    assert overrides["data.val_files"] == "none"
    assert "trainer.lr=1.2345678e-05" in migrated(tmp_path / "a.sh")


def test_prime_rl(tmp_path: Path) -> None:
    notes, words = migrate("prime-rl", tmp_path)
    config = composed(words)
    assert (config.trainer.prompts_per_step, config.algorithm.group_size, config.rollout.num_replicas) == (8, 16, 3)
    assert config.rollout.agent_args == {"env": "reverse-text"} and config.rollout.max_staleness == 8
    assert "slurm.job_name=x: scripts/deploy/slurm.sh starts a run under Slurm" in notes


# -- what a silent file takes ------------------------------------------------------------------------------------------

OPTIMIZER = {"trainer.lr": 1e-6, "trainer.lr_warmup_steps": 0}
SILENT = {
    "verl": OPTIMIZER
    | {"data.max_prompt_tokens": 512, "rollout.max_response_tokens": 512, "data.overlong_prompts": "refuse"}
    | {"trainer.prompts_per_step": 1024, "trainer.mini_batches": 4, "algorithm.group_size": 1}
    | {"algorithm.advantage": "gae", "algorithm.clip_ratio_low": 0.2, "algorithm.clip_ratio_high": 0.2}
    | {"trainer.weight_decay": 0.01, "trainer.num_ranks": 4, "rollout.num_replicas": 2}
    | {"rollout.tensor_parallel_size": 2},
    "skyrl": OPTIMIZER
    | {"data.max_prompt_tokens": 512, "rollout.max_response_tokens": 1024, "trainer.prompts_per_step": 1024}
    | {"trainer.mini_batches": 4, "algorithm.group_size": 5, "algorithm.loss": "ppo_clip"}
    | {"algorithm.clip_ratio_c": 1000000, "algorithm.clip_ratio_high": 0.2, "algorithm.kl_loss_coef": 0.001}
    | {"trainer.weight_decay": 0.01},
    "trl": OPTIMIZER
    | {"rollout.max_response_tokens": 512, "algorithm.group_size": 8, "trainer.prompts_per_step": 1}
    | {"algorithm.clip_ratio_high": 0.2, "algorithm.clip_ratio_c": 1000000, "trainer.lr_schedule": "linear"},
    "prime_rl": OPTIMIZER
    | {"rollout.max_response_tokens": 2048, "trainer.prompts_per_step": 128, "algorithm.group_size": 1}
    | {"rollout.max_staleness": 8, "algorithm.loss": "dppo_tv", "algorithm.clip_ratio_c": 1000000}
    | {"algorithm.normalize_by_std": False, "algorithm.clip_ratio_high": 0.2, "algorithm.kl_rollout_coef": 1e-3}
    | {"trainer.weight_decay": 0.01, "trainer.lr_schedule": "constant"},
}
"""Our keys of each framework's defaults, as its sources of 2026 have them (docs/migrating.md)."""


@pytest.mark.parametrize("framework", SILENT)
def test_a_silent_file_takes_the_defaults_of_its_framework_where_ours_differ(framework: str) -> None:
    translation = translate(Source(framework=framework, settings=()), RULES[framework])
    taken = {key: value for told in translation.told for key, value in told.here.items()}
    assert taken == SILENT[framework]
    ours = compose_job("train", BASE).config
    for told in (told for told in translation.told if told.here):
        assert told.why.startswith("the default of ")
        if told.setting.key == "num_generations":
            continue  # the same, but batches are counted in it
        assert any(OmegaConf.select(ours, key) != value for key, value in told.here.items()), told.setting.key
    words = [f"{key}={value}" for key, value in taken.items() if key != "algorithm.group_size"]
    composed([*BASE, "model.path=x", "data.train_files=x", "data.val_files=none", *words])


def test_an_older_name_takes_the_place_of_a_default() -> None:
    settings = (Setting("batch_size", 64), Setting("rollouts_per_example", 16))
    overrides = translate(Source(framework="prime_rl", settings=settings), RULES["prime_rl"]).overrides
    assert (overrides["trainer.prompts_per_step"], overrides["algorithm.group_size"]) == (4, 16)


@pytest.mark.parametrize("words", ["data.filter_overlong_prompts=True data.truncation=error", "data.truncation=error"])
def test_prompts_of_verl_are_refused_only_where_none_is_filtered(words: str, tmp_path: Path) -> None:
    overrides = translated(tmp_path / "a.sh", f"python3 -m verl.trainer.main_ppo data.train_files=a {words}").overrides
    assert overrides["data.overlong_prompts"] == ("filter" if "filter" in words else "refuse")


# -- what is not read --------------------------------------------------------------------------------------------------

BRANCH = """
GPUS=8
case "$DEVICE" in
    npu)
        GPUS=16
        ;;
esac
if [ -n "$X" ]; then LR=1e-5; fi
python3 -m verl.trainer.main_ppo --config-path=config --config-name grpo.yaml '~data.seed' word \\
    trainer.n_gpus_per_node=$GPUS data.train_files=a.parquet > log.txt 2>&1
"""
TRL_SET_LATER = """
args = GRPOConfig("out", learning_rate=2e-6, **more)
args.num_generations = 4
args.max_completion_length = 2048
trainer = GRPOTrainer("org/model", [f], args, data, callbacks=[c], peft_config=LoraConfig(r=8, lora_dropout=0.1))
trainer.args.beta = 0.1
"""


def test_words_and_branches_that_are_not_followed_are_told(tmp_path: Path) -> None:
    (tmp_path / "a.sh").write_text(BRANCH)
    notes = migrated(tmp_path / "a.sh")
    for note in (
        "GPUS: set again in a condition or a loop: 16 counts here; before it is 8",
        "LR: set in a condition, which is not followed",
        "--config-path=config: no setting",
        "--config-name grpo.yaml: no setting",
        "~data.seed: deletes a setting of theirs",
        "word: no setting",
    ):
        assert f"#   {note}" in notes
    assert "log.txt" not in notes and "2>&1" not in notes


def test_a_config_of_trl_that_is_changed_later_and_arguments_that_are_not_read(tmp_path: Path) -> None:
    translation = translated(tmp_path / "a.py", TRL_SET_LATER)
    taken = translation.overrides
    assert (taken["algorithm.group_size"], taken["rollout.max_response_tokens"], taken["hydra.run.dir"]) == (
        4,
        2048,
        "out",
    )
    assert (taken["algorithm.kl_loss_coef"], taken["model.path"], taken["model.lora.rank"]) == (0.1, "org/model", 8)
    unread = {told.setting.key for told in translation.told if "is not read" in told.why}
    assert unread == {"GRPOConfig(**more)", "callbacks=[c]"} and taken["model.lora.dropout"] == 0.1


@pytest.mark.parametrize(
    ("file", "text", "adapter"),
    [
        ("a.sh", "python grpo.py --use_peft --num_generations 8", (16, 32, 0.05)),
        ("a.sh", "python grpo.py --use_peft --lora_r 64 --lora_alpha 128 --num_generations 8", (64, 128, 0.05)),
        ("a.sh", "python grpo.py --lora_r 64 --num_generations 8", (None, None, None)),
        ("a.py", "GRPOTrainer('a', f, GRPOConfig('o'), d, peft_config=LoraConfig(target_modules=['x']))", (8, 8, 0)),
        ("a.sh", "python -m verl.trainer.main_ppo a.b=1 actor_rollout_ref.model.lora_rank=32", (32, 16, None)),
        (
            "a.sh",
            "python -m skyrl_train a.b=1 generator.n_samples_per_prompt=4 trainer.policy.model.lora.rank=8",
            (8, 16),
        ),
        ("a.toml", "[orchestrator]\n[trainer.model.lora]", (16,)),
        ("a.toml", "[orchestrator]\n[trainer.model.lora]\nalpha = 64\ndropout = 0.1", (16, 64, 0.1)),
    ],
)
def test_an_adapter_is_sized_as_the_framework_would(file: str, text: str, adapter: tuple, tmp_path: Path) -> None:
    overrides = translated(tmp_path / file, text).overrides
    keys = ("model.lora.rank", "model.lora.alpha", "model.lora.dropout")
    assert tuple(overrides.get(key) for key in keys[: len(adapter)]) == adapter


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("a.sh", "torchrun -m verl.trainer.fsdp_sft_trainer data.train_files=a optim.lr=1e-4 model.partial_pretrain=b"),
        ("b.sh", "trl sft --model_name_or_path a --dataset_name b"),
        ("c.sh", "python -m skyrl.train.main_sft trainer.a=1 generator.sampling_params.b=2"),
        ("a.py", "import trl\ntrainer = SFTTrainer(model='a', args=SFTConfig(max_length=3))"),
    ],
)
def test_fine_tuning_is_refused_by_its_name(file: str, text: str, tmp_path: Path) -> None:
    (tmp_path / file).write_text(text)
    with pytest.raises(UnreadableError, match="is supervised fine-tuning, .* slipstream sft"):
        read(tmp_path / file, None)


TABLES = {
    "an inline table": '[[orchestrator.train.env]]\nname = "m"\ntaskset = { id = "math-env", subset = "x" }',
    "a source": '[[orchestrator.train.source]]\nname = "m"\n[orchestrator.train.source.env.taskset]\nid = "math-env"',
}


@pytest.mark.parametrize("table", TABLES)
def test_an_environment_of_prime_rl_is_named_by_its_tasks(table: str, tmp_path: Path) -> None:
    translation = translated(tmp_path / "rl.toml", f'[wandb]\nproject = "p"\nname = "n"\n{TABLES[table]}\n')
    taken = translation.overrides
    assert (taken["rollout.agent_args.env"], taken["data.train_files"]) == ("math-env", "math-env")
    assert (taken["wandb.project"], taken["wandb.name"], taken["tracking.sinks"]) == ("p", "n", ["jsonl", "wandb"])
    assert ("not read: taskset.subset=x" in str(translation.told)) == ("subset" in TABLES[table])


def test_what_our_checks_refuse_is_left_out_with_their_reason() -> None:
    words, (refusal,) = composable(
        {"model.path": "org/name", "data.train_files": "a", "data.val_files": "none"} | {"trainer.lr": -1}
    )
    assert all(not word.startswith("trainer.lr") for word in words)
    assert refusal.override == "trainer.lr=-1" and refusal.why.startswith("trainer.lr=-1")


@pytest.mark.parametrize("path", ["~/verl/models/Qwen2.5-Math-7B", "/mnt/models/q", "<path_to_model>"])
def test_a_model_that_is_not_on_this_machine_stays_in_the_command(path: str) -> None:
    overrides = {"model.path": path, "data.train_files": "a", "data.val_files": "none", "trainer.lr": 1e-6}
    words, refusals = composable(overrides)
    assert len(words) == len(overrides) and not refusals
    assert words[0].startswith("model.path=") and path in words[0]


def test_a_file_of_nobody_and_one_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.sh").write_text("echo hello\n")
    with pytest.raises(UnreadableError, match=re.escape("nothing in it tells its framework; name it: from-verl")):
        read(tmp_path / "a.sh", None)
    (tmp_path / "a.py").write_text("def f(:\n")
    with pytest.raises(UnreadableError, match="line 1 is no Python"):
        read(tmp_path / "a.py", "trl")
    with pytest.raises(UnreadableError, match="cannot be read"):
        read(tmp_path / "none.sh", None)


def test_every_rule_leads_to_a_key_of_ours_and_no_rule_hides_another() -> None:
    assert set(RULES) == {"verl", "skyrl", "trl", "prime_rl"}
    for rules in RULES.values():
        check_overrides([f"{key}=x" for key in rules.always if key != "data.chat_template"])
        assert not rules.rules.keys() & rules.own_code.keys()
