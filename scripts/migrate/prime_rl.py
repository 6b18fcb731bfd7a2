"""The rules of prime-rl."""

from typing import Any

from scripts.migrate.counterparts import (
    CHAT,
    Answer,
    Covered,
    Here,
    Nothing,
    Rule,
    Rules,
    Theirs,
    covered,
    number,
    on_or_off,
    only,
    renamed,
    under_the_name,
)
from scripts.migrate.settings import flat

GROUP = ("orchestrator.group_size", "orchestrator.rollouts_per_example", "rollouts_per_example")
LENGTH = "orchestrator.train.sampling.max_completion_tokens"
LORA = "trainer.model.lora"
LENGTHS = ("orchestrator.seq_len", "seq_len")
PARALLEL = ("inference.parallel.tp", "inference.vllm.tensor_parallel_size")


def _batch(value: Any, theirs: Theirs) -> Answer:
    group = next(number(theirs, key) for key in GROUP if key in theirs)
    if int(value) % group:
        raise ValueError(f"{value} trajectories are not whole groups of {group}; set trainer.prompts_per_step")
    return Here({"trainer.prompts_per_step": int(value) // group}, "in prompts; theirs counts trajectories")


def _replicas(value: Any, theirs: Theirs) -> Answer:
    per_replica = next((number(theirs, key) for key in PARALLEL if key in theirs), 1)
    return Here({"rollout.num_replicas": max(1, int(value) // per_replica)}, "replicas, not GPUs")


def _environments(value: Any, theirs: Theirs) -> Answer:
    """One table names the environment by its own `id`, by that of its `taskset`, or in `env`."""
    tables = value if isinstance(value, list) else [value]
    if len(tables) != 1 or not isinstance(tables[0], dict):
        raise ValueError("one environment of verifiers is taken at a time (docs/environments.md)")
    settings = {setting.key: setting.value for setting in flat(tables[0])}
    key = next((key for key in NAMES if key in settings), None)
    if key is None:
        raise ValueError(f"names no environment: has none of {', '.join(NAMES)}")
    name = str(settings.pop(key))
    settings.pop("name", None)  # for people
    rest = f"; not read: {', '.join(f'{key}={value}' for key, value in settings.items())}" if settings else ""
    return Here(
        {
            "rollout.agent": "rollout.environments.verifiers:agent",
            "rollout.agent_args.env": name,
            "data.loader": "rollout.environments.verifiers:rows",
            "data.train_files": name,
            "data.val_files": name,
        },
        "needs the packages of verifiers and of the environment; its args are rollout.agent_args.args" + rest,
    )


def _length(value: Any, theirs: Theirs) -> Answer:
    if value is not None:
        return Here({"rollout.max_response_tokens": int(value)})
    longest = next((number(theirs, key) for key in LENGTHS if key in theirs), 2048)
    return Here({"rollout.max_response_tokens": longest}, "only the whole sequence has a limit, of so many tokens")


def _loss(value: Any, theirs: Theirs) -> Answer:
    """Its own loss as docs/algorithms.md has it. The bounds and `kl_tau` have keys of their own."""
    if value != "default":
        return Nothing("algorithm.loss has no such value")
    values = {"algorithm.loss": "dppo_tv", "algorithm.clip_ratio_c": 1000000, "algorithm.normalize_by_std": False}
    return Here(values, "without std, and without the second clip")


def _schedule(value: Any, theirs: Theirs) -> Answer:
    if value == "constant":
        return Here({"trainer.lr_schedule": value, "trainer.lr_warmup_steps": 0})
    if value not in ("linear", "cosine"):
        return Nothing("trainer.lr_schedule has no such value")
    warmup = number(theirs, "trainer.scheduler.warmup_steps", 10)
    return Here({"trainer.lr_schedule": value, "trainer.lr_warmup_steps": warmup})


def _wandb(value: Any, theirs: Theirs) -> Answer:
    return Here({"wandb.project": value, "tracking.sinks": ["jsonl", "wandb"]}, "and the sink; jsonl is always in it")


def _min_lr(value: Any, theirs: Theirs) -> Answer:
    ratio = float(value) / float(theirs["trainer.optim.lr"]) if "trainer.optim.lr" in theirs else None
    return Nothing("a share of trainer.lr here") if ratio is None else Here({"trainer.min_lr_ratio": ratio}, "a share")


def _resume(value: Any, theirs: Theirs) -> Answer:
    return Nothing("checkpoints of prime-rl are not read: name its weights in model.path")


def _lora(here: str) -> Rule:
    """Return a rule for a key of the adapter, which has a rank wherever its table is."""

    def rule(value: Any, theirs: Theirs) -> Answer:
        rank = {"model.lora.rank": number(theirs, f"{LORA}.rank", 16)}
        return Here(rank if value in ({}, None) else rank | {here: value})

    return rule


def _checkpointing(value: Any, theirs: Theirs) -> Answer:
    return Here({"trainer.gradient_checkpointing": "full"})


ENVIRONMENTS = ("orchestrator.env", "orchestrator.train.env", "orchestrator.train.source", "env")
NAMES = ("id", "taskset.id", "env.id", "env.taskset.id")
BOUND = under_the_name("rollout.max_staleness", "a bound for every token; theirs drops what is older")
RULES = Rules(
    rules={
        "orchestrator.batch_size": _batch,
        "batch_size": _batch,
        "rollouts_per_example": under_the_name("algorithm.group_size"),
        "deployment.num_infer_gpus": _replicas,
        "orchestrator.max_off_policy_steps": BOUND,
        "max_off_policy_steps": BOUND,
        "max_async_level": BOUND,
        "trainer.scheduler.min_lr": _min_lr,
        "trainer.scheduler.type": _schedule,
        "trainer.scheduler.warmup_steps": covered,
        "trainer.optim.type": only("adamw", "AdamW is the only optimizer"),
        "trainer.loss.type": _loss,
        "max_steps": lambda value, _: (
            Here({"trainer.total_steps": int(value)}) if value else Nothing("it does not end: set trainer.total_steps")
        ),
        LENGTH: _length,
        **{f"{section}.project": _wandb for section in ("wandb", "monitors.wandb")},
        "wandb.name": under_the_name("wandb.name"),
        LORA: _lora("model.lora.rank"),
        f"{LORA}.alpha": _lora("model.lora.alpha"),
        f"{LORA}.dropout": _lora("model.lora.dropout"),
        f"{LORA}.target_modules": _lora("model.lora.targets"),
        "trainer.model.ac": _checkpointing,
        "trainer.model.ac.freq": _checkpointing,
        "trainer.model.ac.mode": renamed("trainer.gradient_checkpointing", {"full": "full", "selective": "selective"}),
        "trainer.model.compile": on_or_off("trainer.compile", True, False, "each layer by itself"),
        "trainer.model.ep": lambda value, _: Here({"trainer.expert_parallel": int(value) > 1}, "by all ranks"),
        "trainer.model.attn": lambda value, _: Here({"trainer.attention": "auto"}, "by device and layout"),
        "trainer.model.seq_len": under_the_name("trainer.tokens_per_micro_batch", "tokens of one pass"),
        LENGTHS[0]: lambda value, theirs: (
            Covered() if theirs.get(LENGTH) is None else Nothing("no sequence is cut: rollout.max_response_tokens")
        ),
        "seq_len": under_the_name("trainer.tokens_per_micro_batch", "tokens of one pass; no response is cut by it"),
        "weight_broadcast.type": renamed(
            "weight_sync.transport", {"nccl": "collective", "filesystem": "filesystem"}, "see docs/weight-sync.md"
        ),
        "ckpt.resume_step": _resume,
        "seed": under_the_name("seed"),
        "orchestrator.seed": under_the_name("seed"),
        "orchestrator.sampling.max_tokens": under_the_name("rollout.max_response_tokens"),
        "orchestrator.sampling.temperature": under_the_name("rollout.temperature"),
        **dict.fromkeys(PARALLEL, under_the_name("rollout.tensor_parallel_size")),
        **dict.fromkeys(ENVIRONMENTS, _environments),
        "inference.model.name": covered,
        "inference.model.enforce_eager": under_the_name("rollout.enforce_eager"),
    },
    nothing={
        "log": "the log is in the run folder",
        "inference.server": "a run starts its own engines",
        "orchestrator.client": "a run starts its own engines",
        "trainer.loss.": "see algorithm.loss, algorithm.clip_ratio_low and algorithm.clip_ratio_high",
        "slurm": "scripts/deploy/slurm.sh starts a run under Slurm",
    },
    defaults={
        LENGTH: None,
        "orchestrator.batch_size": 128,
        GROUP[0]: 1,
        "orchestrator.max_off_policy_steps": 8,
        "trainer.loss.type": "default",
        "trainer.loss.dppo_mask_high": 0.2,
        "trainer.loss.kl_tau": 1e-3,
        "trainer.optim.lr": 1e-6,
        "trainer.optim.weight_decay": 0.01,
        "trainer.scheduler.type": "constant",
        "max_steps": None,
    },
    other_names={
        LENGTH: ("orchestrator.sampling.max_tokens",),
        "orchestrator.batch_size": ("batch_size", "orchestrator.token_batch_size"),
        GROUP[0]: GROUP[1:],
        "orchestrator.max_off_policy_steps": ("max_off_policy_steps", "max_async_level"),
    },
    always={**CHAT, "data.answer_key": "answer"},
)
"""The table of names in `configs.cli.peers` says the rest."""
