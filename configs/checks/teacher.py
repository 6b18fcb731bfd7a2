"""Values of `teacher.*`, and of `algorithm.*` where it learns from a teacher, that contradict one another."""

from collections.abc import Iterator

from configs.algorithm import DISTILLATION
from configs.checks.model_paths import path_problems
from configs.checks.problem import Problem
from configs.schema import Config, Device


def teacher_problems(config: Config) -> Iterator[Problem]:
    teacher, algorithm, share = config.teacher, config.algorithm, config.gpu_share
    if teacher.path is None:
        if algorithm.advantage == DISTILLATION:
            yield Problem("algorithm.advantage", "needs teacher.path, the model to learn from")
        elif algorithm.teacher_coef != 1:
            yield Problem("algorithm.teacher_coef", "needs teacher.path, the model to learn from")
        return
    yield from path_problems(config, "teacher.path", teacher.path)
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
    if teacher.gpu_memory_utilization > share:
        allowed = f"at most gpu_share={share:g}: the rest of the GPU belongs to the processes that share it"
        yield Problem("teacher.gpu_memory_utilization", allowed)


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
