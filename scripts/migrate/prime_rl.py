"""The rules of prime-rl."""

from typing import Any

from scripts.migrate.counterparts import (
    Answer,
    Covered,
    Here,
    Nothing,
    Rules,
    Theirs,
    covered,
    number,
    on_or_off,
    renamed,
    under_the_name,
)

SAMPLING = "orchestrator.train.sampling"
GROUP = ("orchestrator.group_size", "orchestrator.rollouts_per_example")
PARALLEL = ("inference.parallel.tp", "inference.vllm.tensor_parallel_size")


def _batch(value: Any, theirs: Theirs) -> Answer:
    group = next((number(theirs, key) for key in GROUP if key in theirs), 8)
    if int(value) % group:
        raise ValueError(f"{value} trajectories are not whole groups of {group}; set trainer.prompts_per_step")
    return Here({"trainer.prompts_per_step": int(value) // group}, "in prompts; theirs counts trajectories")


def _replicas(value: Any, theirs: Theirs) -> Answer:
    per_replica = next((number(theirs, key) for key in PARALLEL if key in theirs), 1)
    return Here({"rollout.num_replicas": max(1, int(value) // per_replica)}, "replicas, not GPUs")


def _environments(value: Any, theirs: Theirs) -> Answer:
    tables = value if isinstance(value, list) else [value]
    names = [str(table["id"]) for table in tables if isinstance(table, dict) and "id" in table]
    if len(names) != 1:
        raise ValueError("one environment of verifiers is taken at a time (docs/environments.md)")
    name = names[0]
    return Here(
        {
            "rollout.agent": "rollout.environments.verifiers:agent",
            "rollout.agent_args.env": name,
            "data.loader": "rollout.environments.verifiers:rows",
            "data.train_files": name,
            "data.val_files": name,
        },
        "needs the packages of verifiers and of the environment; its args are rollout.agent_args.args",
    )


def _min_lr(value: Any, theirs: Theirs) -> Answer:
    ratio = float(value) / float(theirs["trainer.optim.lr"]) if "trainer.optim.lr" in theirs else None
    return Nothing("a share of trainer.lr here") if ratio is None else Here({"trainer.min_lr_ratio": ratio}, "a share")


def _resume(value: Any, theirs: Theirs) -> Answer:
    return Nothing("checkpoints of prime-rl are not read: name its weights in model.path")


def _staleness(value: Any, theirs: Theirs) -> Answer:
    return Here({"rollout.max_staleness": int(value)}, "a bound for every token; theirs drops what is older")


def _checkpointing(value: Any, theirs: Theirs) -> Answer:
    return Here({"trainer.gradient_checkpointing": "full"})


ENVIRONMENTS = ("orchestrator.env", "orchestrator.train.env", "env")
RULES = Rules(
    rules={
        "orchestrator.batch_size": _batch,
        "batch_size": _batch,
        "rollouts_per_example": under_the_name("algorithm.group_size"),
        "deployment.num_infer_gpus": _replicas,
        "orchestrator.max_off_policy_steps": _staleness,
        "max_off_policy_steps": _staleness,
        "max_async_level": _staleness,
        "trainer.scheduler.min_lr": _min_lr,
        "trainer.scheduler.type": renamed(
            "trainer.lr_schedule", {"constant": "constant", "linear": "linear", "cosine": "cosine"}
        ),
        "trainer.optim.type": lambda value, _: (
            Covered() if value == "adamw" else Nothing("AdamW is the only optimizer")
        ),
        "trainer.loss.type": lambda value, _: Nothing(
            "its default loss is algorithm.loss=dppo_tv with the same bounds; set it, or keep ppo_clip"
        ),
        "trainer.model.ac": _checkpointing,
        "trainer.model.ac.freq": _checkpointing,
        "trainer.model.ac.mode": renamed("trainer.gradient_checkpointing", {"full": "full", "selective": "selective"}),
        "trainer.model.compile": on_or_off("trainer.compile", True, False, "each layer by itself"),
        "trainer.model.ep": lambda value, _: Here({"trainer.expert_parallel": int(value) > 1}, "by all ranks"),
        "trainer.model.attn": lambda value, _: Here({"trainer.attention": "auto"}, "by device and layout"),
        "trainer.model.seq_len": under_the_name("trainer.tokens_per_micro_batch", "tokens of one pass"),
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
    defaults={"trainer.optim.lr": 1e-6},
    always={
        "data.prompt_key": "prompt",
        "data.answer_key": "answer",
        "data.prompt_template": "{question}",
        "data.chat_template": True,
    },
)
"""The table of names in `configs.cli.peers` says the rest."""
