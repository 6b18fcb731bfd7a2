"""The rules of TRL: GRPOConfig's arguments, as a script, a YAML file or options give them."""

from operator import not_
from typing import Any

from scripts.migrate.counterparts import (
    CHAT,
    SCHEDULES,
    Answer,
    Covered,
    Here,
    Nothing,
    Rules,
    Theirs,
    covered,
    covered_if,
    epochs,
    files,
    number,
    on_or_off,
    only_if,
    renamed,
    sinks,
    under_the_name,
)
from scripts.migrate.settings import Unknown

PROMPTS = "in prompts; theirs counts trajectories of {} process(es)"
LOSSES = {
    "grpo": {"algorithm.loss_aggregation": "seq_mean_token_mean"},
    "dapo": {"algorithm.loss_aggregation": "token_mean"},
    "bnpo": {"algorithm.loss_aggregation": "token_mean"},
    "dr_grpo": {"algorithm.loss_aggregation": "seq_mean_token_sum_norm"},
    **{name: {"algorithm.loss": name} for name in ("cispo", "sapo", "luspo", "vespo")},
}
CORRECTIONS = {"token_truncate": "token_is", "sequence_truncate": "seq_is"}
BATCH = ("per_device_train_batch_size", "gradient_accumulation_steps", "generation_batch_size", "num_generations")
NEVER = ("no", False)
"""The strategy that never evaluates or saves, which YAML and command lines take for false."""


def _batch(value: Any, theirs: Theirs) -> Answer:
    """Prompts of one optimizer step: TRL's batch is per process and in trajectories."""
    processes = number(theirs, "num_processes", 1)
    step = number(theirs, BATCH[0]) * number(theirs, BATCH[1]) * processes
    group = number(theirs, "num_generations")
    if step % group:
        raise ValueError(f"{step} trajectories of a step are not whole groups of {group}; set trainer.prompts_per_step")
    values: dict[str, Any] = {"trainer.prompts_per_step": step // group}
    whole = number(theirs, "generation_batch_size", step)
    if whole > step and whole % step == 0:
        values = {"trainer.prompts_per_step": whole // group, "trainer.mini_batches": whole // step}
    return Here(values, PROMPTS.format(processes))


def _clip_high(value: Any, theirs: Theirs) -> Answer:
    return Here({"algorithm.clip_ratio_high": theirs.get("epsilon", 0.2) if value is None else value})


def _loss(value: Any, theirs: Theirs) -> Answer:
    return Here(LOSSES[value]) if value in LOSSES else Nothing("algorithm.loss has no such value")


def _level(value: Any, theirs: Theirs) -> Answer:
    if value == "sequence":
        return Here({"algorithm.loss": "gspo"}, "the ratio of a sequence is gspo's")
    return Covered() if value == "token" else Nothing("algorithm.loss has no such value")


def _frequency(switch: str, here: str):
    """Return a rule for a number of steps that counts where the strategy is `steps`."""

    def rule(value: Any, theirs: Theirs) -> Answer:
        if theirs.get(switch, "steps") != "steps":
            return Covered()
        if isinstance(value, float) and value < 1:
            return Nothing(f"a share of the run; set {here} in steps")
        return Here({here: int(value)})

    return rule


def _strategy(here: str):
    def rule(value: Any, theirs: Theirs) -> Answer:
        if value in NEVER:
            return Here({here: 0}, "0 is never")
        return Covered() if value == "steps" else Nothing(f"{here} counts steps")

    return rule


def _warmup_steps(value: Any, theirs: Theirs) -> Answer:
    """A share of the run where it is below 1, as in transformers 5; before, warmup_ratio was the share."""
    if 0 < float(value) < 1:
        return Here({"trainer.lr_warmup_ratio": value})
    return Covered() if not value and theirs.get("warmup_ratio") else Here({"trainer.lr_warmup_steps": int(value)})


def _warmup_ratio(value: Any, theirs: Theirs) -> Answer:
    return Here({"trainer.lr_warmup_ratio": value}) if value and not theirs.get("warmup_steps") else Covered()


def _delta(value: Any, theirs: Theirs) -> Answer:
    if value is None:
        return Here({"algorithm.clip_ratio_c": 1000000}, "without the second clip")
    return Nothing("algorithm.clip_ratio_c bounds the loss, delta the ratio")


def _steps(value: Any, theirs: Theirs) -> Answer:
    return Here({"trainer.total_steps": int(value)}) if int(value) > 0 else Covered()


def _lora_targets(value: Any, theirs: Theirs) -> Answer:
    if value == "all-linear":
        return Here({"model.lora.targets": ["all_linear"]})
    return Here({"model.lora.targets": value if isinstance(value, list) else str(value).split()})


def _data_set(value: Any, theirs: Theirs) -> Answer:
    split = theirs.get("dataset_train_split", "train")
    config = theirs.get("dataset_config")
    name = f"{value}{f':{config}' if config else ''}"
    held_out = {"data.val_files": f"{name}@{theirs.get('dataset_test_split', 'test')}"}
    return Here(
        {"data.train_files": f"{name}@{split}"} | (held_out if theirs.get("eval_strategy", False) not in NEVER else {})
    )


def _reward(value: Any, theirs: Theirs) -> Answer:
    shown = value.text if isinstance(value, Unknown) else value
    wrapper = "def reward(prompt, text): return theirs(completions=[text], **{...})[0]"
    return Nothing(
        f"rollout.reward takes (prompt, text) of one response, and {shown} lists of completions and columns, which are "
        f"prompt.ground_truth and prompt.extra here: put `{wrapper}` into my_reward.py, and add "
        "rollout.reward=my_reward:reward"
    )


SENTENCE = "every step is logged"
RULES = Rules(
    rules={
        **dict.fromkeys(BATCH[1:3], covered),
        BATCH[0]: _batch,
        "model_name_or_path": under_the_name("model.path"),
        "epsilon_high": _clip_high,
        "delta": _delta,
        "loss_type": _loss,
        "importance_sampling_level": _level,
        "scale_rewards": renamed(
            "algorithm.normalize_by_std", {True: True, "group": True, "true": True, False: False, "none": False}
        ),
        "vllm_importance_sampling_correction": lambda value, _: (
            Covered() if value else Here({"algorithm.correction": "none"})
        ),
        "vllm_importance_sampling_mode": only_if(
            "vllm_importance_sampling_correction", renamed("algorithm.correction", CORRECTIONS), True
        ),
        "lr_scheduler_type": renamed("trainer.lr_schedule", SCHEDULES),
        "warmup_steps": _warmup_steps,
        "warmup_ratio": _warmup_ratio,
        "max_staleness": under_the_name("rollout.max_staleness", "a bound for every token; theirs drops older groups"),
        "weight_sync_steps": under_the_name("weight_sync.interval"),
        "gradient_checkpointing": on_or_off("trainer.gradient_checkpointing", "full", "none", ""),
        "lora_r": only_if("use_peft", under_the_name("model.lora.rank")),
        "lora_alpha": only_if("use_peft", under_the_name("model.lora.alpha")),
        "lora_dropout": only_if("use_peft", under_the_name("model.lora.dropout")),
        "lora_target_modules": only_if("use_peft", _lora_targets),
        "eval_steps": _frequency("eval_strategy", "trainer.eval_every"),
        "eval_strategy": _strategy("trainer.eval_every"),
        "save_steps": _frequency("save_strategy", "checkpoint.every"),
        "save_strategy": _strategy("checkpoint.every"),
        "max_steps": _steps,
        "num_train_epochs": epochs("max_steps"),
        "report_to": sinks,
        "resume_from_checkpoint": covered_if(not_, "checkpoints of TRL are not read: name their folder in model.path"),
        "seed": under_the_name("seed"),
        "beta": under_the_name("algorithm.kl_loss_coef"),
        "use_vllm": covered_if(bool, "vLLM is the only engine"),
        "bf16": on_or_off("trainer.dtype", "bfloat16", "float32", ""),
        "dataset_name": _data_set,
        "dataset_config": covered,
        "dataset_train_split": covered,
        "dataset_test_split": covered,
        "train_dataset": files("data.train_files"),
        "eval_dataset": files("data.val_files"),
        "use_peft": covered,
        "logging_first_step": covered,
        "top_k": lambda value, _: Here({"rollout.top_k": int(value) if value else -1}),
    },
    nothing={
        "num_processes": "set trainer.num_ranks and rollout.num_replicas: GPUs of their own",
        "steps_per_generation": "trainer.mini_batches counts the steps on one batch",
        "logging_": SENTENCE,
        "log_": "trajectories are recorded, all of them (docs/runs-and-checkpoints.md)",
        "push_to_hub": "slipstream export writes a checkpoint that can be uploaded",
        "optim": "AdamW is the only optimizer",
        "config_file": "placement is that of Ray: trainer.num_ranks, rollout.num_replicas",
        "deepspeed": "the trainer is FSDP2",
        "fsdp": "the trainer is FSDP2",
        "dataloader_": "data is read by the driver",
        "vllm_server": "a run starts its own engines",
    },
    own_code={
        "reward_funcs": _reward,
        "environment_factory": lambda value, _: Nothing(
            "rollout.agent_loop=rollout.environments.trl:agent_loop rollout.agent_args.factory=module:NAME runs it"
        ),
    },
    defaults={
        "max_completion_length": 512,
        "num_generations": 8,
        BATCH[0]: 8,
        BATCH[1]: 1,
        "epsilon_high": None,
        "delta": None,
        "learning_rate": 1e-6,
        "lr_scheduler_type": "linear",
        "warmup_steps": 0,
        "num_train_epochs": 3,
        "lora_r": 16,
        "lora_alpha": 32,
        "lora_dropout": 0.05,
    },
    always=CHAT,
)
"""The table of names in `configs.cli.peers` says the rest."""
