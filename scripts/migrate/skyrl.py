"""The rules of SkyRL."""

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
    halves,
    never_is_zero,
    number,
    on_or_off,
    only,
    only_if,
    parts,
    renamed,
    sinks,
    under_the_name,
)

ALGORITHM, POLICY = "trainer.algorithm", "trainer.policy"
CRITIC = f"{ALGORITHM}.advantage_estimator"
"""The key of the estimator, which has a critic as `gae`."""
BATCH, MINI_BATCH = "trainer.train_batch_size", "trainer.policy_mini_batch_size"
ENGINES = ("generator.inference_engine", "generator")
"""The section of the engines' keys, and where they were before."""
LOSSES = {
    **{name: name for name in ("gspo", "cispo", "sapo", "clip_cov", "kl_cov", "dppo_tv", "dppo_kl")},
    "dual_clip": "ppo_clip",
}
ADVANTAGES = {"grpo": "grpo", "gae": "gae", "rloo": "rloo", "maxrl": "maxrl", "reinforce++": "reinforce_plus_plus"}
AGGREGATIONS = {
    **{name: name for name in ("token_mean", "seq_mean_token_sum_norm")},
    "sequence_mean": "seq_mean_token_mean",
}
REWARDS = {"gsm8k": "gsm8k", "aime": "dapo"}
TOKEN_TYPES = {None: "none", "token": "token_is", "sequence": "seq_is"}


def _engine(theirs: Theirs, *names: str) -> int:
    """Return the first of these keys of the engines that is there, else 1."""
    keys = [f"{section}.{name}" for section in ENGINES for name in names]
    return next((number(theirs, key) for key in keys if key in theirs), 1)


def _loss(value: Any, theirs: Theirs) -> Answer:
    if value == "regular":
        return Here({"algorithm.loss": "ppo_clip", "algorithm.clip_ratio_c": 1000000}, "without the second clip")
    return renamed("algorithm.loss", LOSSES)(value, theirs)


def _mini_batch(value: Any, theirs: Theirs) -> Answer:
    return Here(dict(parts(number(theirs, BATCH), int(value))), "the number of mini-batches, not their size")


def _gpus(value: Any, theirs: Theirs) -> Answer:
    num = int(value) * number(theirs, "trainer.placement.policy_num_nodes", 1)
    if not theirs.get("trainer.placement.colocate_all", True):
        return Here({"trainer.num_ranks": num}, "GPUs of all nodes together")
    per_replica = _engine(theirs, "tensor_parallel_size", "inference_engine_tensor_parallel_size")
    ranks, replicas, why = halves(num, per_replica)
    return Here({"trainer.num_ranks": ranks, "rollout.num_replicas": replicas}, why)


def _engines(value: Any, theirs: Theirs) -> Answer:
    if theirs.get("trainer.placement.colocate_all", True) and "trainer.placement.policy_num_gpus_per_node" in theirs:
        return Covered()  # `_gpus` divides the GPUs
    return Here({"rollout.num_replicas": int(value)})


def _workers(value: Any, theirs: Theirs) -> Answer:
    engines = _engine(theirs, "num_engines", "num_inference_engines")
    group = number(theirs, "generator.n_samples_per_prompt")
    seats = max(1, int(value) * group // engines)
    return Here({"rollout.max_num_seqs": seats}, "trajectories of one replica, not groups of all")


def _micro_batch(value: Any, theirs: Theirs) -> Answer:
    length = number(theirs, "generator.sampling_params.max_generate_length")
    longest = number(theirs, "trainer.max_prompt_length") + length
    why = "micro-batches are filled up to so many tokens, not trajectories"
    return Here({"trainer.tokens_per_micro_batch": int(value) * longest}, why)


def _environment(value: Any, theirs: Theirs) -> Answer:
    if value in REWARDS:
        return Here({"rollout.reward": REWARDS[value]}, "an environment of one turn is a reward")
    loop = {"rollout.agent_loop": "rollout.environments.skyrl_gym:agent_loop", "rollout.agent_args.env": value}
    if "generator.max_turns" in theirs:
        loop["rollout.agent_args.max_turns"] = theirs["generator.max_turns"]
    return Here(loop, "needs the package skyrl-gym; an environment of your own is package.module:Class")


def _resume(value: Any, theirs: Theirs) -> Answer:
    if value in (None, "none"):
        return Here({"resume": "never"})
    if value == "latest" and "trainer.ckpt_path" in theirs:
        return Here({"resume": "auto"})
    if value == "latest":
        return Here({"resume": "never"}, "auto needs the folder: hydra.run.dir")
    return Nothing("checkpoints of SkyRL are not read: name its exported weights in model.path")


def _tis(value: Any, theirs: Theirs) -> Answer:
    return Here({"algorithm.correction": TOKEN_TYPES[value]}) if value in TOKEN_TYPES else Nothing("unknown weights")


RULES = Rules(
    rules={
        "data.train_data": files("data.train_files"),
        "data.val_data": files("data.val_files"),
        BATCH: under_the_name("trainer.prompts_per_step"),
        MINI_BATCH: _mini_batch,
        f"{ALGORITHM}.advantage_estimator": renamed("algorithm.advantage", ADVANTAGES),
        f"{ALGORITHM}.policy_loss_type": _loss,
        f"{ALGORITHM}.value_clip": only_if(CRITIC, under_the_name("critic.value_clip"), is_on="gae"),
        "trainer.critic.optimizer_config.lr": only_if(CRITIC, under_the_name("critic.lr"), is_on="gae"),
        f"{POLICY}.optimizer_config.scheduler": renamed("trainer.lr_schedule", SCHEDULES),
        f"{ALGORITHM}.loss_reduction": renamed("algorithm.loss_aggregation", AGGREGATIONS),
        f"{ALGORITHM}.use_kl_loss": covered,
        f"{ALGORITHM}.kl_loss_coef": only_if(
            f"{ALGORITHM}.use_kl_loss", under_the_name("algorithm.kl_loss_coef"), default=True
        ),
        f"{ALGORITHM}.use_kl_in_reward": covered_if(not_, "set algorithm.kl_reward_coef to the coefficient"),
        f"{ALGORITHM}.use_entropy_loss": covered,
        f"{ALGORITHM}.entropy_loss_coef": only_if(
            f"{ALGORITHM}.use_entropy_loss", under_the_name("algorithm.entropy_coef")
        ),
        f"{ALGORITHM}.dynamic_sampling.type": lambda value, _: (
            Here({"algorithm.filter_groups": value == "filter"}, "other groups take the places of equal rewards")
            if value in (None, "none", "filter")
            else Nothing("only filter has a counterpart: algorithm.filter_groups")
        ),
        f"{ALGORITHM}.off_policy_correction.tis_ratio_type": _tis,
        f"{ALGORITHM}.use_tis": on_or_off("algorithm.correction", "token_is", "none", ""),
        f"{POLICY}.model.lora.rank": lambda value, _: Here({"model.lora.rank": value}) if value else Covered(),
        f"{POLICY}.model.lora.alpha": only_if(f"{POLICY}.model.lora.rank", under_the_name("model.lora.alpha")),
        "trainer.strategy": covered_if(lambda value: "fsdp" in str(value), "FSDP2 is the only one"),
        "trainer.placement.colocate_all": covered_if(
            not_, "engine and trainer have GPUs of their own, or share one by gpu_share"
        ),
        "trainer.placement.policy_num_gpus_per_node": _gpus,
        "trainer.placement.policy_num_nodes": covered,
        **{f"{section}.{name}": _engines for section in ENGINES for name in ("num_engines", "num_inference_engines")},
        **{f"{section}.backend": only("vllm", "vLLM is the only engine") for section in ENGINES},
        "trainer.fully_async.enabled": covered,
        "trainer.fully_async.num_parallel_generation_workers": _workers,
        "trainer.max_training_steps": under_the_name("trainer.total_steps"),
        "trainer.epochs": epochs("trainer.max_training_steps"),
        "trainer.micro_train_batch_size_per_gpu": _micro_batch,
        "trainer.use_sample_packing": on_or_off("trainer.layout", "packed", "rows", "no row is padded with packed"),
        "trainer.flash_attn": lambda value, _: Here({"trainer.attention": "auto"}, "by device and layout"),
        "trainer.gradient_checkpointing": on_or_off("trainer.gradient_checkpointing", "full", "none", ""),
        "trainer.eval_interval": never_is_zero("trainer.eval_every"),
        "trainer.ckpt_interval": never_is_zero("checkpoint.every"),
        "trainer.max_ckpts_to_keep": lambda value, _: (
            Here({"checkpoint.keep_last": value}) if int(value) > 0 else Nothing("set checkpoint.keep_last to a number")
        ),
        "trainer.resume_mode": _resume,
        "trainer.logger": sinks,
        "trainer.seed": under_the_name("seed"),
        "trainer.eval_before_train": covered_if(bool, "a run always evaluates first"),
        "environment.env_class": _environment,
        "generator.max_turns": covered,
        "generator.batched": covered,
        "generator.async_engine": covered,
    },
    nothing={
        "trainer.ref.": "the reference is computed as the policy is, with the keys of trainer",
        "trainer.critic.": "the critic is sized as the policy; critic.lr and critic.value_clip are its keys",
        "trainer.placement.": "Ray places ranks and replicas; trainer.num_ranks and rollout.num_replicas count them",
        "trainer.micro_forward_batch_size": "the logprobs of the engine are used, so none are computed again",
        "trainer.hf_save_interval": "slipstream export writes a checkpoint for transformers",
        "trainer.export_path": "slipstream export writes a checkpoint for transformers",
        "trainer.eval_batch_size": "the held-out set is evaluated as the replicas have room",
        f"{ENGINES[0]}.run_engines_locally": "a run starts its own engines",
        f"{ENGINES[0]}.weight_sync_backend": "weight_sync.transport=shared_memory, collective or filesystem",
        "generator.run_engines_locally": "a run starts its own engines",
        "generator.weight_sync_backend": "weight_sync.transport=shared_memory, collective or filesystem",
    },
    defaults={
        "trainer.max_prompt_length": 512,
        "generator.sampling_params.max_generate_length": 1024,
        BATCH: 1024,
        MINI_BATCH: 256,
        "generator.n_samples_per_prompt": 5,
        f"{ALGORITHM}.policy_loss_type": "regular",
        f"{ALGORITHM}.eps_clip_high": 0.2,
        f"{ALGORITHM}.kl_loss_coef": 0.001,
        f"{ALGORITHM}.value_clip": 0.2,
        f"{POLICY}.model.lora.alpha": 16,
        f"{ALGORITHM}.entropy_loss_coef": 0.01,
        "trainer.critic.optimizer_config.lr": 5e-6,
        f"{POLICY}.optimizer_config.lr": 1e-6,
        f"{POLICY}.optimizer_config.weight_decay": 0.01,
        f"{POLICY}.optimizer_config.num_warmup_steps": 0,
        "trainer.epochs": 1,
    },
    always={**CHAT, "data.answer_key": "reward_spec.ground_truth"},
)
"""The table of names in `configs.cli.peers` says the rest."""
