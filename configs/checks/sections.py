"""Values that contradict one another or name what does not exist, section by section."""

import ipaddress
import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from configs.algorithm import DISTILLATION
from configs.checkpoint import LATEST, is_checkpoint
from configs.checks.problem import Problem, dotted_problems
from configs.checks.secrets import NOT_SHOWN
from configs.data import NO_FILES, ORDERS, CurriculumConfig, Generated, parse_sources
from configs.installed import is_installed
from configs.model import ALL_LINEAR, SERVED_RANKS, LoraConfig, LoraServing, names_experts
from configs.rewards import BUILT_IN_REWARDS, parse_reward
from configs.rollout import AutoscaleConfig, RolloutConfig, Speculation, SpeculativeConfig
from configs.schema import SINK_PARAMETERS, Config, Device, DType, ModelKind, PauseMode, Transport
from configs.serve import TOKEN_ENV, host_names
from configs.trainer import AttentionKind, GradientCheckpointing, Layout, LearningRateSchedule, TrainerConfig
from configs.weight_sync import CPU_TRANSPORTS

HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
"""NAME or OWNER/NAME, as huggingface_hub takes them; which exist only the hub knows."""
SHARED_NEEDS_SIZE = "needs a size in MiB: what is free on a GPU that processes share changes while they start"
NO_FOLDER = "no such folder, and no name of the hub, which would be NAME or OWNER/NAME"


def teacher_problems(config: Config) -> Iterator[Problem]:
    teacher, algorithm, share = config.teacher, config.algorithm, config.gpu_share
    if teacher.path is None:
        if algorithm.advantage == DISTILLATION:
            yield Problem("algorithm.advantage", "needs teacher.path, the model to learn from")
        elif algorithm.teacher_coef != 1:
            yield Problem("algorithm.teacher_coef", "needs teacher.path, the model to learn from")
        return
    yield from _path_problems(config, "teacher.path", teacher.path)
    yield from _learning_problems(config)
    if teacher.min_replicas > teacher.num_replicas:
        yield Problem("teacher.min_replicas", f"at most teacher.num_replicas={teacher.num_replicas}")
    if teacher.max_num_batched_tokens < teacher.max_num_seqs:
        yield Problem("teacher.max_num_batched_tokens", f"at least teacher.max_num_seqs={teacher.max_num_seqs}")
    if teacher.timeout_s >= config.rollout.group_timeout_s:
        allowed = f"must be less than rollout.group_timeout_s={config.rollout.group_timeout_s:g}"
        yield Problem("teacher.timeout_s", allowed)
    if config.device is Device.cpu and teacher.kv_cache_mb is None:
        yield Problem("teacher.kv_cache_mb", "device=cpu needs a size in MiB (null is for GPUs)")
    if share < 1 and teacher.tensor_parallel_size > 1:
        allowed = f"at most 1 with gpu_share={share:g}: each of several needs a GPU of its own"
        yield Problem("teacher.tensor_parallel_size", allowed)
    if share < 1 and teacher.kv_cache_mb is None:
        yield Problem("teacher.kv_cache_mb", f"gpu_share={share:g} {SHARED_NEEDS_SIZE}")


def _learning_problems(config: Config) -> Iterator[Problem]:
    algorithm = config.algorithm
    if algorithm.teacher_coef == 0:
        yield Problem("algorithm.teacher_coef", "nothing would be learned from teacher.path: leave that out instead")
    if algorithm.advantage != DISTILLATION:
        return
    for key, off in (("filter_groups", False), ("kl_reward_coef", 0), ("overlong_buffer_tokens", 0)):
        if getattr(algorithm, key) != off:
            yield Problem(
                f"algorithm.{key}", f"with algorithm.advantage={DISTILLATION} nothing is learned from rewards"
            )


def tracking_problems(config: Config, trains: bool) -> Iterator[Problem]:
    """`trains`: whether the command trains; another may run on a machine that lacks the packages of sinks."""
    sinks = config.tracking.sinks
    shown = f"[{','.join(sinks)}]"
    if "jsonl" not in sinks:
        yield Problem("tracking.sinks", "must have jsonl, which the audit and a resumed run read", shown)
    if len(set(sinks)) < len(sinks):
        yield Problem("tracking.sinks", "must name each sink once", shown)
    if trains and "tensorboard" in sinks and not is_installed("tensorboard"):
        yield Problem("tracking.sinks", "tensorboard needs the package tensorboard: pip install tensorboard", shown)
    for sink in sinks if trains else ():
        yield from dotted_problems("tracking.sinks", sink, BUILT_IN_SINKS, SINK_PARAMETERS)


TRAIN_AND_VAL = ("train_files", "val_files")
CONVERSATIONS = ("conversations",)
"""The keys of the files that supervised fine-tuning reads, below sft.*."""
CE_COEF = "algorithm.ce_coef"
MODEL_DRAFTS = (Speculation.draft_model, Speculation.eagle, Speculation.eagle3)
TEXT_DRAFTS = (Speculation.none, Speculation.ngram, Speculation.suffix)
BUILT_IN_SINKS = ("jsonl", "wandb", "tensorboard")
BUILT_IN_AGENT_LOOPS = ("single_turn",)
"""A copy of names in `rollout.agents.loop`: a config is checked before anything of rollout is imported."""
TINY_HEADS = 4
"""The attention heads of the models that `trainer.tiny.model` makes, copied for the same reason."""
READ_BY_ORDER: dict[str, tuple[str, ...]] = {
    "uniform": (),
    "frontier": ("key", "pass_reward", "half_life"),
    "stages": ("key", "pass_reward", "stage_pass_rate"),
    "retry": ("pass_reward", "retry_after"),
}
"""The keys besides `order` that an order reads."""
READ_BY_FUNCTIONS = ("key", "pass_reward", "half_life")
"""The keys that decide what a user's function is told."""


def model_problems(config: Config) -> Iterator[Problem]:
    model = config.model
    if model.kind is ModelKind.tiny:
        if model.path is not None:
            yield Problem("model.path", "model.kind=tiny makes its own model; choose model=hf to load one")
        if model.hidden_size % 32 != 0:
            yield Problem("model.hidden_size", "must be a multiple of 32")
        if model.replay_routes and not model.num_experts:
            yield Problem(
                "model.replay_routes", "needs model.num_experts with model.kind=tiny: set it to null or false"
            )
        ranks = config.trainer.num_ranks
        if config.trainer.expert_parallel and (not model.num_experts or model.num_experts % ranks):
            allowed = f"needs model.num_experts, with model.kind=tiny, to be a multiple of trainer.num_ranks={ranks}"
            yield Problem("trainer.expert_parallel", allowed)
        if model.num_experts == 1:
            yield Problem("model.num_experts", "must be 0, for a dense model, or at least 2: each token has two")
    elif model.path is None:
        yield Problem("model.path", "model.kind=hf needs the folder or hub name of a Hugging Face model")
    else:
        yield from _path_problems(config, "model.path", model.path)


def lora_problems(config: Config) -> Iterator[Problem]:
    lora = config.model.lora
    if lora.rank is None:
        for key in ("alpha", "targets", "dropout", "serve", "served_path"):
            if getattr(lora, key) != getattr(LoraConfig(), key):
                yield Problem(f"model.lora.{key}", "needs model.lora.rank: without it, all weights are trained")
        return
    if not lora.targets or "" in lora.targets:
        yield Problem(
            "model.lora.targets", f"must be [{ALL_LINEAR}] or names of linear layers, such as [q_proj,v_proj]"
        )
    elif ALL_LINEAR in lora.targets and len(lora.targets) > 1:
        yield Problem(
            "model.lora.targets", f"{ALL_LINEAR} stands for every linear layer but the head: leave out the rest"
        )
    if names_experts(lora.targets):
        yield from _expert_adapter_problems(config)
    if lora.serve is LoraServing.adapter:
        if lora.rank > max(SERVED_RANKS):
            yield Problem("model.lora.rank", f"at most {max(SERVED_RANKS)} with model.lora.serve=adapter, as in vLLM")
        if config.device is Device.cuda and config.rollout.dtype is DType.float32:
            allowed = "must be bfloat16 with model.lora.serve=adapter: vLLM's LoRA kernels for GPUs have no float32"
            yield Problem("rollout.dtype", allowed)
        if lora.served_path is not None:
            yield from _path_problems(config, "model.lora.served_path", lora.served_path, may_be_checkpoint=False)
    elif lora.served_path is not None:
        allowed = "needs model.lora.serve=adapter: an adapter is merged into the weights that it was trained on"
        yield Problem("model.lora.served_path", allowed)
    if config.weight_sync.delta:
        yield Problem("weight_sync.delta", f"with model.lora.rank={lora.rank}, must be false: only the adapter travels")


def _expert_adapter_problems(config: Config) -> Iterator[Problem]:
    """Yield what adapters of experts cannot be combined with."""
    lora, trainer = config.model.lora, config.trainer
    if lora.serve is LoraServing.adapter:
        allowed = "must be merged for adapters of experts (model.lora.targets), which vLLM would need in another form"
        yield Problem("model.lora.serve", allowed)
    if lora.dropout > 0:
        yield Problem("model.lora.dropout", "must be 0 for adapters of experts, whose weights are merged to compute")
    if trainer.expert_parallel:
        yield Problem("trainer.expert_parallel", "must be false for adapters of experts (model.lora.targets)")
    if trainer.compile:
        yield Problem("trainer.compile", "must be false for adapters of experts (model.lora.targets): untested")


def data_problems(config: Config, needed_files: Sequence[str]) -> Iterator[Problem]:
    data = config.data
    is_half = (data.train_files is None) != (data.val_files is None) and data.holds_out
    if "{question}" not in data.prompt_template:
        yield Problem("data.prompt_template", "must contain {question}", repr(data.prompt_template))
    if data.val_share is not None:
        if data.train_files is None:
            yield Problem("data.val_share", "needs data.train_files, of which it is a share")
        if data.val_files is not None:
            yield Problem("data.val_share", "data.val_files is set, too: leave out one")
    elif tuple(needed_files) == TRAIN_AND_VAL and is_half:
        key = "train_files" if data.val_files is None else "val_files"
        allowed = "train_files and val_files are set both, or neither"
        ways = f"; data.val_share=0.05 holds out a part of one file, and data.val_files={NO_FILES} nothing"
        yield Problem(f"data.{key}", allowed + (ways if data.val_files is None else ""))
    elif tuple(needed_files) == ("val_files",) and not data.holds_out:
        yield Problem("data.val_files", "names nothing to evaluate: must be files, or null for generated problems")
    if data.loader is not None:
        if data.train_files is None and (data.val_files is None or not data.holds_out):
            yield Problem("data.loader", "needs data.train_files and data.val_files, which it is called with")
        yield from dotted_problems("data.loader", data.loader, (), ("entries",), data.loader_args)
        if data.demonstrations is not None:
            named = data.loader_args
            yield from dotted_problems("data.demonstrations", data.demonstrations, (), ("num", "seed"), named)
    elif data.loader_args or data.demonstrations is not None:
        key = "loader_args" if data.loader_args else "demonstrations"
        yield Problem(f"data.{key}", "needs data.loader=package.module:function")


def curriculum_problems(config: Config) -> Iterator[Problem]:
    curriculum = config.data.curriculum
    order = curriculum.order
    yield from dotted_problems("data.curriculum.order", order, ORDERS, ("rows", "passes", "random"))
    for key in ("key", "pass_reward", "half_life", "stage_pass_rate", "retry_after"):
        is_set = getattr(curriculum, key) != getattr(CurriculumConfig(), key)
        if is_set and key not in READ_BY_ORDER.get(order, READ_BY_FUNCTIONS):
            readers = [name for name, keys in READ_BY_ORDER.items() if key in keys]
            own = ", or to a function of your own" if key in READ_BY_FUNCTIONS else ""
            allowed = f"data.curriculum.order={order} does not read it; set that to {' or '.join(readers)}{own}"
            yield Problem(f"data.curriculum.{key}", allowed)
    if order == "stages" and curriculum.key is None:
        yield Problem("data.curriculum.key", "data.curriculum.order=stages needs the column of the difficulty")
    elif curriculum.key is not None and config.data.train_files is None:
        yield Problem("data.curriculum.key", "needs data.train_files: generated problems have no columns")


def missing_data(config: Config, needed_files: Sequence[str] = TRAIN_AND_VAL) -> Iterator[Problem]:
    """Files and folders that do not exist. Hub names are looked up only when they are loaded."""
    hint = f"no such file (from {Path.cwd()}); `slipstream prepare-data all` makes those of the recipes"
    keys = [key for key in needed_files if key in TRAIN_AND_VAL and (key != "val_files" or config.data.holds_out)]
    if config.data.val_share is not None and keys:
        keys = ["train_files"]
    files = {f"data.{key}": getattr(config.data, key) for key in keys}
    if config.data.loader is not None:
        files = {}
    if learns_conversations(config, needed_files):
        files |= {"sft.train_files": config.sft.train_files, "sft.val_files": config.sft.val_files}
    for key, entries in files.items():
        for source in parse_sources(entries) if entries is not None else ():
            if not source.may_be_on_the_hub and (not source.name or not source.exists):
                yield Problem(key, hint, str(source))


def learns_conversations(config: Config, needed_files: Sequence[str]) -> bool:
    """Return true for a command that reads the files of sft.*."""
    is_mixed = tuple(needed_files) == TRAIN_AND_VAL and config.algorithm.ce_coef != 0
    return tuple(needed_files) == CONVERSATIONS or is_mixed


def sft_problems(config: Config, needed_files: Sequence[str]) -> Iterator[Problem]:
    sft, generated = config.sft, config.data.generated
    if not learns_conversations(config, needed_files):
        return
    if sft.train_files is None and sft.val_files is not None:
        yield Problem("sft.val_files", "needs sft.train_files")
    if sft.train_files is None and generated is Generated.search_world:
        yield Problem("sft.train_files", f"data.generated={generated.value} makes no conversations: name files")
    if sft.train_files is None and config.data.train_files is not None:
        yield Problem("sft.train_files", "with data.train_files, must name files: nothing is generated")


def unread_sft_keys(config: Config, needed_files: Sequence[str], overrides: Sequence[str]) -> Iterator[Problem]:
    """Yield the keys of sft.* that a command line sets for a command that does not read them. A sweep of
    algorithm.ce_coef may have a job without."""
    keys = [override.partition("=")[0].lstrip("+") for override in overrides]
    is_sft = tuple(needed_files) == CONVERSATIONS
    for key in dict.fromkeys(keys):
        if key == "sft.per_step" and is_sft:
            yield Problem(key, "`slipstream sft` takes trainer.prompts_per_step in each step: leave it out")
        elif key.startswith("sft.") and not learns_conversations(config, needed_files) and CE_COEF not in keys:
            yield Problem(key, f"only `slipstream sft`, and training with {CE_COEF} above 0, read it")


def rollout_problems(config: Config) -> Iterator[Problem]:
    rollout = config.rollout
    if not 0 < rollout.temperature < math.inf:
        yield Problem("rollout.temperature", "must be above 0 (evaluation may be greedy)")
    if rollout.top_k == 0 or rollout.top_k < -1:
        yield Problem("rollout.top_k", "must be -1 (the whole vocabulary) or at least 1")
    if "" in rollout.stop:
        yield Problem("rollout.stop", "an empty text would stop everything: leave it out")
    args = {} if rollout.agent is not None else rollout.agent_args
    yield from dotted_problems("rollout.agent_loop", rollout.agent_loop, BUILT_IN_AGENT_LOOPS, ("tokenizer",), args)
    if rollout.agent_args and rollout.agent is None and rollout.agent_loop in BUILT_IN_AGENT_LOOPS:
        yield Problem("rollout.agent_args", "are those of rollout.agent_loop=package.module:name, or of rollout.agent")
    try:
        for term in parse_reward(rollout.reward):
            yield from dotted_problems("rollout.reward", term.path, BUILT_IN_REWARDS, ("prompt", "text"))
    except ValueError as error:
        yield Problem("rollout.reward", str(error).removeprefix(f"rollout.reward={rollout.reward}: "))
    try:
        re.compile(rollout.format_pattern)
    except re.error as error:
        yield Problem("rollout.format_pattern", f"must be a regular expression: {error}", repr(rollout.format_pattern))
    if rollout.agent_worker_timeout_s >= rollout.group_timeout_s:
        allowed = f"must be less than rollout.group_timeout_s={rollout.group_timeout_s:g}, or no loss is ever noticed"
        yield Problem("rollout.agent_worker_timeout_s", allowed)
    if rollout.min_replicas > rollout.num_replicas:
        yield Problem("rollout.min_replicas", f"at most rollout.num_replicas={rollout.num_replicas}")
    yield from _autoscale_problems(rollout)
    if config.device is Device.cpu and rollout.kv_cache_mb is None:
        yield Problem("rollout.kv_cache_mb", "device=cpu needs a size in MiB (null is for GPUs)")


def _autoscale_problems(rollout: RolloutConfig) -> Iterator[Problem]:
    least, most = rollout.autoscale.min_replicas, rollout.autoscale.max_replicas
    if most is None:
        if least != AutoscaleConfig().min_replicas:
            yield Problem("rollout.autoscale.min_replicas", "needs rollout.autoscale.max_replicas")
        return
    if most < rollout.num_replicas:
        yield Problem("rollout.autoscale.max_replicas", f"at least rollout.num_replicas={rollout.num_replicas}")
    if not rollout.min_replicas <= least <= rollout.num_replicas:
        allowed = f"from rollout.min_replicas={rollout.min_replicas} to rollout.num_replicas={rollout.num_replicas}"
        yield Problem("rollout.autoscale.min_replicas", allowed)


def speculative_problems(config: Config) -> Iterator[Problem]:
    chosen, method = config.rollout.speculative, config.rollout.speculative.method
    if method is not Speculation.ngram:
        for key in ("min_match", "max_match"):
            if getattr(chosen, key) != getattr(SpeculativeConfig(), key):
                yield Problem(f"rollout.speculative.{key}", "needs rollout.speculative.method=ngram")
    elif chosen.min_match > chosen.max_match:
        allowed = f"at most rollout.speculative.max_match={chosen.max_match}"
        yield Problem("rollout.speculative.min_match", allowed)
    if method is Speculation.none and chosen.num_tokens != SpeculativeConfig().num_tokens:
        yield Problem("rollout.speculative.num_tokens", "needs a rollout.speculative.method")
    if (method in MODEL_DRAFTS) != (chosen.model is not None):
        names = ", ".join(draft.value for draft in MODEL_DRAFTS)
        yield Problem("rollout.speculative.model", f"set with rollout.speculative.method={names}, and only then")
    if method is not Speculation.none and config.rollout.min_p > 0:
        yield Problem("rollout.min_p", "must be 0 with rollout.speculative.method: vLLM drafts without it")
    if config.model.lora.serve is LoraServing.adapter and method not in TEXT_DRAFTS:
        allowed = "none, ngram or suffix with model.lora.serve=adapter: vLLM's other drafters share layers with it"
        yield Problem("rollout.speculative.method", allowed)


def evaluation_problems(config: Config) -> Iterator[Problem]:
    evaluation, num_replicas = config.evaluation, config.rollout.num_replicas
    if evaluation.samples > 1 and evaluation.temperature == 0:
        yield Problem("evaluation.samples", "greedy samples are all the same: set evaluation.temperature, or samples=1")
    if evaluation.replicas > max(1, num_replicas - 1):
        yield Problem("evaluation.replicas", f"must leave one of rollout.num_replicas={num_replicas} to the training")


def unread_evaluation_keys(config: Config, needed_files: Sequence[str], overrides: Sequence[str]) -> Iterator[Problem]:
    """Keys of evaluations that a command line sets for a run that has none. Those of a recipe may stay."""
    if tuple(needed_files) != TRAIN_AND_VAL or config.data.holds_out:
        return
    for key in dict.fromkeys(override.partition("=")[0].lstrip("+") for override in overrides):
        is_read = key != "data.num_val" and not key.startswith("evaluation.")
        if not is_read or (key == "trainer.eval_every" and config.trainer.eval_every > 0):
            yield Problem(key, f"data.val_files={NO_FILES}: nothing is held out, so nothing is evaluated; leave it out")


def trainer_problems(config: Config) -> Iterator[Problem]:
    trainer, checkpoint, interval = config.trainer, config.checkpoint, config.weight_sync.interval
    yield from _attention_problems(config)
    if trainer.sequence_parallel < 1 or trainer.num_ranks % trainer.sequence_parallel:
        yield Problem("trainer.sequence_parallel", f"must divide trainer.num_ranks={trainer.num_ranks}")
    elif trainer.prompts_per_step < trainer.data_parallel:
        shared = "" if trainer.sequence_parallel == 1 else f" x sequence_parallel={trainer.sequence_parallel}"
        yield Problem("trainer.num_ranks", f"at most trainer.prompts_per_step={trainer.prompts_per_step}{shared}")
    elif trainer.mini_batches * trainer.data_parallel > trainer.prompts_per_step:
        most = trainer.prompts_per_step // trainer.data_parallel
        groups = f"of trainer.prompts_per_step={trainer.prompts_per_step}, each has a group for every rank"
        shared = "" if trainer.sequence_parallel == 1 else f", sequence_parallel={trainer.sequence_parallel}"
        yield Problem(
            "trainer.mini_batches", f"at most {most}: {groups} (trainer.num_ranks={trainer.num_ranks}{shared})"
        )
    if trainer.activation_offload and trainer.gradient_checkpointing is not GradientCheckpointing.full:
        allowed = "needs trainer.gradient_checkpointing=full: the inputs of recomputed layers are what it moves"
        yield Problem("trainer.activation_offload", allowed)
    if trainer.expert_parallel and trainer.compile:
        allowed = "needs trainer.compile=false: how many tokens travel is known only when they do"
        yield Problem("trainer.expert_parallel", allowed)
    yield from _learning_rate_problems(trainer)
    if checkpoint.memory_every > 0 and checkpoint.every == 0:
        yield Problem("checkpoint.memory_every", "needs checkpoint.every > 0: without checkpoints no rank restarts")
    if checkpoint.every > 0 and checkpoint.keep_every is not None:
        if interval > 0 and checkpoint.every % interval:
            allowed = f"with checkpoint.keep_every, must be a multiple of weight_sync.interval={interval}"
            yield Problem("checkpoint.every", allowed)
        if checkpoint.keep_every % checkpoint.every:
            allowed = f"must be a multiple of checkpoint.every={checkpoint.every}: no other step has a checkpoint"
            yield Problem("checkpoint.keep_every", allowed)


def _attention_problems(config: Config) -> Iterator[Problem]:
    trainer, num_heads = config.trainer, attention_heads(config)
    if num_heads is not None and num_heads % max(1, trainer.sequence_parallel):
        yield Problem("trainer.sequence_parallel", f"must divide the {num_heads} attention heads of the model")
    if trainer.attention is AttentionKind.flex and config.device is Device.cpu:
        yield Problem("trainer.attention", "device=cpu needs dense or varlen: flex has no gradients on CPUs")
    if trainer.attention is AttentionKind.varlen and trainer.layout is Layout.tree:
        yield Problem("trainer.attention", "varlen is for trainer.layout=packed or rows: trees have branches")


def attention_heads(config: Config) -> int | None:
    """Return the number of query heads that the model's folder states, or None where the model is not on this
    machine."""
    if config.model.kind is ModelKind.tiny:
        return TINY_HEADS
    file = Path(config.model.path or "").expanduser() / "config.json"
    if not file.is_file():
        return None
    with suppress(ValueError):
        model = json.loads(file.read_text(encoding="utf-8"))
        num_heads = model.get("text_config", model).get("num_attention_heads")
        return num_heads if isinstance(num_heads, int) else None
    return None


def _learning_rate_problems(trainer: TrainerConfig) -> Iterator[Problem]:
    schedule, total, ratio = trainer.lr_schedule, trainer.total_optimizer_steps, trainer.lr_warmup_ratio
    warmup_steps = trainer.lr_warmup_steps or 0
    if ratio is not None and 0 <= ratio <= 1:  # others are out of their range
        warmup_steps = round(ratio * total)
    never_falls = warmup_steps >= total
    if ratio is None and warmup_steps > total:
        run_steps = f"the run's {total} optimizer steps (trainer.total_steps x mini_batches x epochs)"
        allowed = f"at most {run_steps}: trainer.lr would never be reached; null and trainer.lr_warmup_ratio adapt"
        yield Problem("trainer.lr_warmup_steps", allowed)
        return
    if schedule is LearningRateSchedule.constant:
        if trainer.min_lr_ratio != 0:
            yield Problem("trainer.min_lr_ratio", "only trainer.lr_schedule=linear and cosine read it")
    elif never_falls:
        key = "trainer.lr_warmup_steps" if ratio is None else "trainer.lr_warmup_ratio"
        run_steps = f"the run's {total} optimizer steps (trainer.total_steps x mini_batches x epochs)"
        yield Problem(key, f"with trainer.lr_schedule={schedule.value}, the warm-up must end before {run_steps}")


def weight_sync_problems(config: Config) -> Iterator[Problem]:
    sync, total_steps = config.weight_sync, config.trainer.total_steps
    if sync.interval > 0 and total_steps % sync.interval:
        yield Problem("weight_sync.interval", f"must divide trainer.total_steps={total_steps}")
    if sync.pause_mode is PauseMode.wait:
        allowed = "must be keep or abort: an update that waits for the longest trajectory would stop the replica"
        yield Problem("weight_sync.pause_mode", allowed)
    if (sync.transport is Transport.filesystem) != (sync.directory is not None):
        allowed = "set with weight_sync.transport=filesystem, and only then: a folder that all machines share"
        yield Problem("weight_sync.directory", allowed)
    if sync.transport is Transport.cuda_ipc and config.device is Device.cpu:
        yield Problem("weight_sync.transport", f"needs GPUs; {CPU_TRANSPORTS} work without")


def sharing_problems(config: Config) -> Iterator[Problem]:
    """Processes share a GPU with gpu_share below 1, and NCCL cannot connect two processes on one GPU."""
    if config.gpu_share >= 1:
        return
    rollout, share = config.rollout, f"gpu_share={config.gpu_share:g}"
    for key, size in (
        ("trainer.num_ranks", config.trainer.num_ranks),
        ("rollout.tensor_parallel_size", rollout.tensor_parallel_size),
        ("rollout.data_parallel_size", rollout.data_parallel_size),
    ):
        if size > 1:
            yield Problem(key, f"at most 1 with {share}: each of several needs a GPU of its own")
    if rollout.kv_cache_mb is None:
        yield Problem("rollout.kv_cache_mb", f"{share} {SHARED_NEEDS_SIZE}")
    if config.weight_sync.transport is Transport.collective:
        yield Problem("weight_sync.transport", f"with {share}, must be cuda_ipc, shared_memory or filesystem")


def ray_problems(config: Config) -> Iterator[Problem]:
    for name in config.ray.forward_env:
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            yield Problem(
                "ray.forward_env", "must have names of environment variables, without their values", NOT_SHOWN
            )
        elif config.ray.address is not None and name not in os.environ:
            yield Problem("ray.forward_env", f"{name} is not set in this shell")


def serve_problems(config: Config) -> Iterator[Problem]:
    serve = config.serve
    if not serve.is_loopback and serve.token_file is None and TOKEN_ENV not in os.environ:
        yield Problem("serve.host", f"is not a loopback address: needs a token, in {TOKEN_ENV} or serve.token_file")
    if serve.token_file is not None and not Path(serve.token_file).expanduser().is_file():
        yield Problem("serve.token_file", "no such file")
    if wrong := sorted(name for name in host_names(serve.allowed_hosts) if not _is_host(name)):
        yield Problem("serve.allowed_hosts", f"{wrong[0]!r} must be a name or an address: no scheme, port or brackets")
    if not serve.is_loopback and not serve.require_token:
        yield Problem("serve.require_token", f"serve.host={serve.host} is not a loopback address: must be true")


def _is_host(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return re.fullmatch(r"[\w.-]+", name) is not None
    return True


def _path_problems(config: Config, key: str, path: str, *, may_be_checkpoint: bool = True) -> Iterator[Problem]:
    """`path`: the value of the key. The folders of a cluster that runs already may not be here."""
    folder = Path(os.path.expanduser(path))
    if folder.is_dir():
        if (folder / "config.json").is_file():
            return
        if not is_checkpoint(folder):
            yield Problem(key, "no Hugging Face model: the folder has no config.json; nor a checkpoint")
        elif not may_be_checkpoint:
            yield Problem(key, "must be a Hugging Face model, not a checkpoint: scripts.export_hf makes one of it")
    elif config.ray.address is None:
        # Where `runs` holds run folders, runs/another is one that does not exist, and no name of the hub.
        is_in_runs = (folder.parent / LATEST).is_symlink()
        if path.startswith(".") or not HUB_NAME.fullmatch(path) or is_in_runs:
            yield Problem(key, NO_FOLDER)
