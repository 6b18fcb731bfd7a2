"""The parts of the check, in the order in which they run: what fails early says most."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from scripts.bench.gpu.outcome import Setting

Figures = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    what: str
    run: Callable[[Setting], Figures]
    deadline_s: float
    """Seconds until it is ended. It is begun only when that much is left."""


def tests(setting: Setting) -> Figures:
    from scripts.bench.gpu.gpu_tests import run_gpu_tests

    return run_gpu_tests(setting)


def updates(shape: str, setting: Setting) -> Figures:
    from scripts.bench.gpu.updates import measure_updates  # torch

    return measure_updates(shape, setting)


def adapter(shape: str, setting: Setting) -> Figures:
    from scripts.bench.gpu.updates import measure_updates  # torch

    return measure_updates(shape, setting, with_adapter=True)


def trainer(shape: str, setting: Setting) -> Figures:
    from scripts.bench.gpu.trainer_step import measure_trainer  # torch

    return measure_trainer(shape, setting)


def loading(shape: str, setting: Setting) -> Figures:
    from scripts.bench.gpu.loading import measure_loading  # torch

    return measure_loading(shape, setting)


def attention(shape: str, setting: Setting) -> Figures:
    from scripts.bench.gpu.attention import measure_attention  # torch

    return measure_attention(shape, setting)


def logprobs(setting: Setting) -> Figures:
    from scripts.bench.gpu.logprobs import measure_logprobs  # torch

    return measure_logprobs(setting)


def speculation(shape: str, setting: Setting) -> Figures:
    from scripts.bench.gpu.speculation import measure_speculation  # torch

    return measure_speculation(shape, setting)


def shared_gpu(setting: Setting) -> Figures:
    from scripts.bench.gpu.runs import run_over_cuda_ipc

    return run_over_cuda_ipc(setting)


def asynchrony(setting: Setting) -> Figures:
    from scripts.bench.gpu.asynchrony import compare_staleness

    return compare_staleness(setting)


def recipe(setting: Setting) -> Figures:
    from scripts.bench.gpu.runs import run_default_recipe

    return run_default_recipe(setting)


PARTS: Mapping[str, Part] = {
    "tests": Part(what="tests/gpu", run=tests, deadline_s=90),
    "updates_small": Part(what="updates of 50M parameters", run=partial(updates, "small"), deadline_s=100),
    "shared_gpu": Part(what="a run with trainer and replica on one GPU, CUDA IPC", run=shared_gpu, deadline_s=120),
    "updates_0.5b": Part(what="updates of 0.5B parameters", run=partial(updates, "0.5b"), deadline_s=100),
    "updates_1.5b": Part(what="updates of 1.5B parameters", run=partial(updates, "1.5b"), deadline_s=120),
    "updates_7b": Part(what="updates of 7B parameters", run=partial(updates, "7b"), deadline_s=180),
    "adapter_1.5b": Part(what="an adapter of 1.5B parameters", run=partial(adapter, "1.5b"), deadline_s=100),
    "trainer_0.5b": Part(what="training of 0.5B parameters", run=partial(trainer, "0.5b"), deadline_s=60),
    "trainer_1.5b": Part(what="training of 1.5B parameters", run=partial(trainer, "1.5b"), deadline_s=75),
    "trainer_7b": Part(what="forward and backward of 7B parameters", run=partial(trainer, "7b"), deadline_s=100),
    "attention": Part(what="flex and varlen attention against dense", run=partial(attention, "0.5b"), deadline_s=120),
    "logprobs": Part(what="logprobs at vocabulary 152k", run=logprobs, deadline_s=60),
    "loading_7b": Part(what="a rank's rows of 7B parameters", run=partial(loading, "7b"), deadline_s=150),
    "speculation": Part(what="drafts by n-grams", run=partial(speculation, "1.5b"), deadline_s=180),
    "asynchrony": Part(what="max_staleness=2 over 0", run=asynchrony, deadline_s=240),
    "recipe": Part(what="the default recipe", run=recipe, deadline_s=300),
}
