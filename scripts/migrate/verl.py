"""The rules of verl (main_ppo, its fully asynchronous main, and DAPO's recipe)."""

import math
from operator import not_
from typing import Any

from scripts.migrate.counterparts import (
    CHAT,
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
    reward_by_hand,
    sinks,
    under_the_name,
)

ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
BATCH, MINI_BATCH = "data.train_batch_size", f"{ACTOR}.ppo_mini_batch_size"
FILTER, OVERLONG = "data.filter_overlong_prompts", "data.overlong_prompts"
WARMUP_STEPS, WARMUP_RATIO = f"{ACTOR}.optim.lr_warmup_steps", f"{ACTOR}.optim.lr_warmup_steps_ratio"
CORRECTION = "algorithm.rollout_correction"
LOSSES = {
    **{name: name for name in ("gspo", "sapo", "cispo", "dppo_tv", "dppo_kl", "clip_cov", "kl_cov")},
    "vanilla": "ppo_clip",
    "geo_mean": "gmpo",
    "gpg": "reinforce",
}
ADVANTAGES = {
    **{name: name for name in ("grpo", "rloo", "opo", "grpo_passk", "gpg", "remax", "gae", "gdpo")},
    **{name: name for name in ("reinforce_plus_plus", "reinforce_plus_plus_baseline")},
    **{"grpo_vectorized": "grpo", "rloo_vectorized": "rloo", "optimal_token_baseline": "otb"},
}
ESTIMATORS = {"low_var_kl": "k3", "k3": "k3", "kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2"}
BUFFERS = (
    *(f"{section}.reward_kwargs.overlong_buffer_cfg" for section in ("reward", "reward_model")),
    "reward_model.overlong_buffer",
)
IN_BUFFER = {
    "enable": covered,
    "len": under_the_name("algorithm.overlong_buffer_tokens"),
    "penalty_factor": under_the_name("algorithm.overlong_penalty"),
}
TOKENS = "micro-batches are filled up to so many tokens"


def _has_own_gpus(theirs: Theirs) -> bool:
    """Return whether generation has GPUs of its own, as in the mains that are asynchronous."""
    return any(key.startswith(("async_training.", "rollout.")) for key in theirs)


def _is_async(theirs: Theirs) -> bool:
    """Return whether it is the fully asynchronous main: that which is one step off counts batches as the plain one."""
    is_named = any(key.startswith("async_training.") for key in theirs)
    return is_named or "rollout.total_rollout_steps" in theirs or theirs.get(BATCH) == 0


def _batch(value: Any, theirs: Theirs) -> Answer:
    """The fully asynchronous main has 0 here, and counts mini-batches."""
    return Covered() if _is_async(theirs) else Here({"trainer.prompts_per_step": int(value)})


def _mini_batch(value: Any, theirs: Theirs) -> Answer:
    if _is_async(theirs):
        return Here({"trainer.prompts_per_step": int(value)}, "prompts of one optimizer step")
    return Here(dict(parts(number(theirs, BATCH), int(value))), "the number of mini-batches, not their size")


def _gpus(value: Any, theirs: Theirs) -> Answer:
    num = int(value) * number(theirs, "trainer.nnodes", 1)
    if _has_own_gpus(theirs):
        return Here({"trainer.num_ranks": num}, "GPUs of all nodes together")
    ranks, replicas, why = halves(num, number(theirs, f"{ROLLOUT}.tensor_model_parallel_size"))
    return Here({"trainer.num_ranks": ranks, "rollout.num_replicas": replicas}, why)


def _rollout_gpus(value: Any, theirs: Theirs) -> Answer:
    num = int(value) * number(theirs, "rollout.nnodes", 1)
    per_replica = number(theirs, f"{ROLLOUT}.tensor_model_parallel_size")
    values = {"rollout.num_replicas": max(1, num // per_replica)}
    if _is_async(theirs):
        return Here(values, "replicas, not GPUs")
    return Here(values | {"rollout.max_staleness": 1}, "replicas, not GPUs; the next batch is generated meanwhile")


def _clip(value: Any, theirs: Theirs) -> Answer:
    low, high = theirs.get(f"{ACTOR}.clip_ratio_low", value), theirs.get(f"{ACTOR}.clip_ratio_high", value)
    return Here({"algorithm.clip_ratio_low": low, "algorithm.clip_ratio_high": high})


def _staleness(value: Any, theirs: Theirs) -> Answer:
    why = "versions, a bound for every token, where theirs is a share of samples: as many groups may be under way"
    return Here({"rollout.max_staleness": math.ceil(float(value))}, why)


def _threshold(value: Any, theirs: Theirs) -> Answer:
    return Here({"rollout.max_staleness": int(value) - 1}, "theirs counts from 1")


def _interval(value: Any, theirs: Theirs) -> Answer:
    num = number(theirs, "async_training.trigger_parameter_sync_step", 4)
    return Here({"weight_sync.interval": num * number(theirs, "async_training.require_batches", 1)}, "optimizer steps")


def _samples(value: Any, theirs: Theirs) -> Answer:
    steps = math.ceil(int(value) / number(theirs, MINI_BATCH))
    return Here({"trainer.total_steps": steps}, "steps, not prompts")


def _micro_batch(value: Any, theirs: Theirs) -> Answer:
    if theirs.get(f"{ACTOR}.ppo_max_token_len_per_gpu"):
        return Covered()
    longest = number(theirs, "data.max_prompt_length") + number(theirs, "data.max_response_length")
    return Here({"trainer.tokens_per_micro_batch": int(value) * longest}, f"{TOKENS}, not trajectories")


def _micro_batch_tokens(value: Any, theirs: Theirs) -> Answer:
    ranks = number(theirs, f"{ACTOR}.ulysses_sequence_parallel_size", 1)
    return Here({"trainer.tokens_per_micro_batch": int(value) * ranks}, "of all ranks of a sequence together")


def _resume(value: Any, theirs: Theirs) -> Answer:
    if value == "resume_path":
        return Covered()
    if value == "auto" and "trainer.default_local_dir" in theirs:
        return Here({"resume": "auto"})
    return Here({"resume": "never"}, "auto needs the folder: hydra.run.dir" if value == "auto" else "")


def _correction(value: Any, theirs: Theirs) -> Answer:
    known = {None: "none", "token": "token_is", "sequence": "seq_is"}
    threshold = theirs.get(f"{CORRECTION}.rollout_is_threshold")
    if value == "token" and isinstance(threshold, str) and "_" in threshold:  # IcePop's bounds
        low, high = map(float, threshold.split("_"))
        bounds = {"algorithm.icepop_low": low, "algorithm.icepop_high": high}
        return Here({"algorithm.correction": "token_icepop", **bounds})
    return Here({"algorithm.correction": known[value]}) if value in known else Nothing("unknown weights")


def _cap(value: Any, theirs: Theirs) -> Answer:
    return Covered() if isinstance(value, str) else Here({"algorithm.importance_cap": value})


def _rejection_bounds(value: Any, theirs: Theirs) -> Answer:
    """verl bounds 1 / r where this project bounds r, for k1; a single number u means [1 / u, u]."""
    name = str(theirs.get(f"{CORRECTION}.rollout_rs"))
    if "," in name:
        return Nothing("several rejections: write them as algorithm.rejections={NAME: [LOW, HIGH], ...}")
    if not name.endswith("k1"):
        return Here({"algorithm.rejection_high": float(value)})
    low, _, high = str(value).partition("_")
    bounds = (float(low), float(high)) if high else (1 / float(low), float(low))
    values = {"algorithm.rejection_low": round(1 / bounds[1], 6), "algorithm.rejection_high": round(1 / bounds[0], 6)}
    return Here(values, "bounds of pi / mu, where verl bounds 1 / r")


def _rejection(value: Any, theirs: Theirs) -> Answer:
    if value is None or "," in str(value):
        return Covered()
    return Here({"algorithm.rejection": value})


def _targets(value: Any, theirs: Theirs) -> Answer:
    if not theirs.get(f"{MODEL}.lora_rank"):
        return Covered()
    names = value if isinstance(value, list) else [str(value).replace("-", "_")]
    return Here({"model.lora.targets": names})


def _truncation(value: Any, theirs: Theirs) -> Answer:
    if theirs.get(FILTER):
        return Covered()  # no prompt is left that could be cut or refused
    return Here({OVERLONG: "refuse"}) if value == "error" else Nothing(f"no prompt is cut: {OVERLONG}=filter or refuse")


def _warmup_steps(value: Any, theirs: Theirs) -> Answer:
    """Below 0 the ratio counts, which is 0 by default."""
    if value is not None and int(value) >= 0:
        return Here({"trainer.lr_warmup_steps": int(value)})
    return Covered() if theirs.get(WARMUP_RATIO) else Here({"trainer.lr_warmup_steps": 0})


def _warmup_ratio(value: Any, theirs: Theirs) -> Answer:
    counts = value and int(theirs.get(WARMUP_STEPS) or -1) < 0
    return Here({"trainer.lr_warmup_ratio": value}) if counts else Covered()


RULES = Rules(
    rules={
        "data.train_files": files("data.train_files"),
        "data.val_files": files("data.val_files"),
        "data.prompt_key": under_the_name("data.prompt_key"),
        "data.return_raw_chat": covered,
        "data.truncation": _truncation,
        FILTER: lambda value, _: Here({OVERLONG: "filter"}) if value else Covered(),
        "data.seed": under_the_name("seed"),
        BATCH: _batch,
        MINI_BATCH: _mini_batch,
        f"{MODEL}.path": under_the_name("model.path"),
        f"{MODEL}.lora_rank": only_if(f"{MODEL}.lora_rank", under_the_name("model.lora.rank")),
        f"{MODEL}.lora_alpha": only_if(f"{MODEL}.lora_rank", under_the_name("model.lora.alpha")),
        f"{MODEL}.target_modules": _targets,
        f"{MODEL}.use_remove_padding": on_or_off("trainer.layout", "packed", "rows", "no row is padded with packed"),
        f"{MODEL}.enable_gradient_checkpointing": on_or_off("trainer.gradient_checkpointing", "full", "none", ""),
        "algorithm.adv_estimator": renamed("algorithm.advantage", ADVANTAGES),
        "algorithm.gamma": under_the_name("algorithm.gamma"),
        "algorithm.use_kl_in_reward": covered,
        "algorithm.kl_ctrl.kl_coef": only_if("algorithm.use_kl_in_reward", under_the_name("algorithm.kl_reward_coef")),
        f"{CORRECTION}.rollout_is": _correction,
        f"{CORRECTION}.rollout_is_threshold": _cap,
        f"{CORRECTION}.rollout_rs": _rejection,
        f"{CORRECTION}.rollout_rs_threshold": _rejection_bounds,
        f"{CORRECTION}.bypass_mode": renamed("algorithm.proximal", {True: "rollout"}),
        f"{ACTOR}.clip_ratio": _clip,
        f"{ACTOR}.policy_loss.loss_mode": renamed("algorithm.loss", LOSSES),
        f"{ACTOR}.use_kl_loss": covered,
        f"{ACTOR}.kl_loss_coef": only_if(f"{ACTOR}.use_kl_loss", under_the_name("algorithm.kl_loss_coef")),
        f"{ACTOR}.kl_loss_type": only_if(f"{ACTOR}.use_kl_loss", renamed("algorithm.kl_loss_estimator", ESTIMATORS)),
        f"{ACTOR}.loss_agg_mode": lambda value, _: Here({"algorithm.loss_aggregation": value.replace("-", "_")}),
        f"{ACTOR}.ppo_micro_batch_size_per_gpu": _micro_batch,
        f"{ACTOR}.ppo_max_token_len_per_gpu": _micro_batch_tokens,
        f"{ACTOR}.use_dynamic_bsz": covered,
        f"{ACTOR}.fsdp_config.param_offload": covered_if(not_, "parameters stay on the GPU"),
        f"{ACTOR}.strategy": covered_if(lambda value: "fsdp" in str(value), "FSDP2 is the only one"),
        WARMUP_STEPS: _warmup_steps,
        WARMUP_RATIO: _warmup_ratio,
        f"{ACTOR}.optim.warmup_style": under_the_name("trainer.lr_schedule"),
        f"{ROLLOUT}.name": only("vllm", "vLLM is the only engine"),
        f"{ROLLOUT}.mode": covered,
        f"{ROLLOUT}.calculate_log_probs": covered,
        f"{ROLLOUT}.enable_chunked_prefill": covered,
        f"{ROLLOUT}.n_gpus_per_node": _rollout_gpus,
        f"{ROLLOUT}.val_kwargs.do_sample": covered,
        "rollout.n_gpus_per_node": _rollout_gpus,
        "rollout.nnodes": covered,
        "rollout.total_rollout_steps": _samples,
        "async_training.staleness_threshold": _staleness,
        "async_training.trigger_parameter_sync_step": _interval,
        "async_training.require_batches": _interval,
        "async_training.partial_rollout": covered,
        "trainer.v1.sampler.max_off_policy_threshold": _threshold,
        "trainer.v1.sampler.max_off_policy_strategy": renamed("rollout.stale_policy", {"drop": "drop", "wait": "wait"}),
        "trainer.n_gpus_per_node": _gpus,
        "trainer.nnodes": covered,
        "trainer.logger": sinks,
        "trainer.test_freq": never_is_zero("trainer.eval_every"),
        "trainer.save_freq": never_is_zero("checkpoint.every"),
        "trainer.total_epochs": epochs("trainer.total_training_steps", "rollout.total_rollout_steps"),
        "trainer.resume_mode": _resume,
        "trainer.val_before_train": covered_if(bool, "a run always evaluates first"),
        **dict.fromkeys(
            ("reward_model.reward_manager", "reward.reward_manager.name"),
            renamed("rollout.reward", {"dapo": "dapo", "naive": "gsm8k"}, "by data_source there"),
        ),
        **{
            f"{buffer}.{name}": only_if(f"{buffer}.enable", rule, True)
            for buffer in BUFFERS
            for name, rule in IN_BUFFER.items()
        },
        **dict.fromkeys(("custom_reward_function.name", "reward.custom_reward_function.name"), covered),
    },
    nothing={
        "actor_rollout_ref.ref.": "the reference is computed as the policy is, with the keys of trainer",
        "actor_rollout_ref.hybrid_engine": "engine and trainer have GPUs of their own",
        f"{ACTOR}.fsdp_config": "FSDP2 shards all parameters over trainer.num_ranks",
        f"{ACTOR}.megatron": "the trainer is FSDP2",
        f"{ROLLOUT}.log_prob": "the logprobs of the engine are used, so none are computed again",
        f"{ROLLOUT}.max_num_batched_tokens": "rollout.engine_args.max_num_batched_tokens passes it to vLLM",
        f"{ROLLOUT}.multi_turn": "environments and tools are agent loops (docs/environments.md)",
        f"{ROLLOUT}.agent": "agent loops are named by rollout.agent_loop (docs/agents.md)",
        "trainer.resume_from_path": "checkpoints of verl are not read: export its weights, and name them in model.path",
        "trainer.balance_batch": "ranks get equal shares of tokens as it is",
        "trainer.critic_warmup": "the critic has no steps of its own",
        "algorithm.filter_groups.metric": "what is compared is the reward itself",
        "critic.": "the critic is sized as the policy; critic.lr and critic.value_clip are its keys",
        "data.reward_fn_key": "a row's data_source is prompt.data_source for the reward",
    },
    own_code=dict.fromkeys(
        ("custom_reward_function.path", "reward.custom_reward_function.path"),
        reward_by_hand(
            "(data_source, solution_str, ground_truth, extra_info)",
            "compute_score(prompt.data_source, text, prompt.ground_truth, prompt.extra)",
        ),
    ),
    defaults={
        "data.max_prompt_length": 512,
        "data.max_response_length": 512,
        "data.truncation": "error",
        BATCH: 1024,
        MINI_BATCH: 256,
        f"{ROLLOUT}.n": 1,
        f"{ROLLOUT}.tensor_model_parallel_size": 2,
        "algorithm.adv_estimator": "gae",
        "algorithm.kl_ctrl.kl_coef": 0.001,
        f"{ACTOR}.clip_ratio": 0.2,
        f"{ACTOR}.kl_loss_coef": 0.001,
        f"{MODEL}.lora_alpha": 16,
        f"{ACTOR}.optim.lr": 1e-6,
        f"{ACTOR}.optim.weight_decay": 0.01,
        WARMUP_STEPS: -1,
        "trainer.n_gpus_per_node": 8,
        "trainer.total_epochs": 30,
    },
    always={**CHAT, "data.answer_key": "reward_model.ground_truth"},
)
"""The table of names in `configs.cli.peers` says the rest."""
