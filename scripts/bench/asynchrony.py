"""The question: what is asynchrony worth, and what does the framework cost? Forty minutes on two cores, `simulated`
alone one.

python -m scripts.bench.asynchrony [--repeats 5] [--only PART ...]

- `simulated`: the real scheduling on simulated engines and a virtual clock, for max_staleness 0 (synchronous), 1, 2, 4
  and 8, over equal and over long-tailed (log-normal, sigma 1) responses, and how close each comes to the limit that
  arithmetic sets (simulated_job.py). Repeats exactly, whatever else the machine does.
- `vllm`: whole trainings of the tiny model with Ray, vLLM and a train worker, max_staleness 0 against 2.
- `trainer`: trainings in which the trainer is the bottleneck: it goes on once its weights are published, against one
  that waits until they are live.
- `framework`: tokens per second through rollouter, router, agent worker and replica actor, against vLLM's AsyncLLM
  alone in the same process with the same requests. Nothing is trained meanwhile.

The last line is JSON, with medians over repetitions; a part that is not run leaves its keys out.

    async_over_sync_<lengths>       simulated, equal or longtail: samples/s with max_staleness=2 over max_staleness=0
    <lengths>_limit, <lengths>_share_of_limit
                                    simulated: the highest ratio that max_staleness=2 allows, and the ratio over it
    trainer_idle, replica_idle      simulated, longtail, max_staleness=2: share of time without training; without any
                                    request, mean over replicas
    vllm_async_over_sync_<lengths>, vllm_trainer_idle, vllm_replica_idle
                                    vllm: the same
    trainer_going_on_over_waiting   trainer: samples/s
    framework_over_bare_engine      framework: tokens/s
"""

import asyncio
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from configs.checkpoint import CheckpointConfig
from configs.schema import Config, DataConfig, Layout, ModelConfig, RolloutConfig, TrainerConfig, WeightSyncConfig
from rollout.actors.tasks import run_with_background
from rollout.engines.base import EngineSpec
from rollout.prompts import PromptStream
from rollout.replica.replica_group import ReplicaActor
from rollout.request_ids import RequestId
from rollout.types import GenerationRequest, Prompt, SamplingParams
from scripts.bench.common import COIN_REWARD, ForcedLengths, LengthOf, LogNormalLengths, UniformLengths
from scripts.bench.harness import Figures, Runs, make_parser, run_parts, take_turns
from scripts.bench.simulated_job import Job, limit_ratio, run_job
from scripts.bench.trainings import another_run, started_run, train
from scripts.launch.driver import make_rollouter
from scripts.launch.start import StartedRun
from trainer.ports import WeightUpdater
from weight_sync.protocol import UpdateReport

PARTS = ("simulated", "vllm", "trainer", "framework")
DEFAULT_STALENESS = RolloutConfig().max_staleness
"""The bound that the figures of the last line are for."""
MAX_RESPONSE_TOKENS = 384
LENGTHS: Mapping[str, LengthOf] = {
    "equal": LogNormalLengths(mean=48, sigma=0.0, cap=MAX_RESPONSE_TOKENS),
    "longtail": LogNormalLengths(mean=48, sigma=1.0, cap=MAX_RESPONSE_TOKENS),
    "short": LogNormalLengths(mean=4, sigma=0.0, cap=MAX_RESPONSE_TOKENS),
    "uniform": UniformLengths(low=64, high=200),
}


def main() -> None:
    options = make_parser(__doc__, repeats=5, parts=PARTS).parse_args()
    run_dir = (Path("runs") / f"bench_async-{time.strftime('%Y-%m-%d_%H-%M-%S')}").resolve()
    run_parts(
        options,
        {
            "simulated": lambda: measure_simulated(num_steps=60),
            "vllm": lambda: measure_vllm(run_dir / "vllm", 16, options.repeats),
            "trainer": lambda: measure_trainer(run_dir / "trainer", 20, options.repeats),
            "framework": lambda: measure_framework(run_dir / "framework", 64, options.repeats),
        },
    )


def measure_simulated(num_steps: int) -> Figures:
    """Show a table of all runs. Returns the figures of the last line."""
    by_arm, figures, unbounded = dict[str, Figures](), dict[str, float](), dict[str, float]()
    for name, sigma in (("equal", 0.0), ("longtail", 1.0)):
        job = Job(length_of=LogNormalLengths(mean=200, sigma=sigma, cap=2000), num_steps=num_steps)
        synchronous = run_job(job, 0)
        for max_staleness in (0, 1, DEFAULT_STALENESS, 4, 8):
            outcome = run_job(job, max_staleness)
            ratio, limit = synchronous.seconds / outcome.seconds, limit_ratio(job, max_staleness)
            idle = {"trainer_idle": outcome.trainer_idle, "replica_idle": outcome.replica_idle}
            compared = {"async_over_sync": ratio, "limit": limit, **idle, "share_of_limit": ratio / limit}
            by_arm[f"{name}, {max_staleness}"] = {"samples_per_s": outcome.samples_per_s, **compared}
            if max_staleness == DEFAULT_STALENESS:
                figures |= {f"async_over_sync_{name}": ratio, f"{name}_limit": limit}
                figures |= {f"{name}_share_of_limit": ratio / limit, **idle}
        unbounded[name] = limit_ratio(job, None)
    title = (
        f"simulated: responses, max_staleness; {num_steps} steps of 16 prompts x 8 responses of 200 tokens on average, "
        "10 ms a token; 2 replicas of 64 seats; 2 s of training a step; limits without a bound "
        f"{unbounded['equal']:.2f} and {unbounded['longtail']:.2f}"
    )
    shares = dict.fromkeys(("trainer_idle", "replica_idle", "share_of_limit"), ".0%")
    Runs.exact(by_arm).show(title, {"samples_per_s": ".1f", "async_over_sync": ".2f", "limit": ".2f", **shares})
    return figures


# -- whole trainings ---------------------------------------------------------------------------------------------------


def vllm_config(num_steps: int) -> Config:
    """Return a job of random weights, so that nothing depends on what was learned. A step fills every seat once."""
    return Config(
        model=ModelConfig(warmup_steps=0),
        data=DataConfig(num_train=512, num_val=1),
        rollout=RolloutConfig(max_response_tokens=MAX_RESPONSE_TOKENS, reward=COIN_REWARD),
        checkpoint=CheckpointConfig(every=0),
        trainer=TrainerConfig(total_steps=num_steps, prompts_per_step=8, eval_every=0, layout=Layout.packed),
    )


async def measure_vllm(run_dir: Path, num_steps: int, repeats: int) -> Figures:
    config, figures = vllm_config(num_steps), {}
    async with started_run(config, run_dir, agent_loop=ForcedLengths(LENGTHS)) as parts:
        jobs = {
            f"{lengths}, max_staleness={staleness}": (lengths, staleness)
            for lengths in ("equal", "longtail")
            for staleness in (0, DEFAULT_STALENESS)
        }
        short = replace(config, trainer=replace(config.trainer, total_steps=3))
        await _train_once(short, parts, run_dir, "equal", DEFAULT_STALENESS)  # warms up
        runs = await take_turns(lambda job, _: _train_once(config, parts, run_dir, *job), jobs, repeats)
    columns = {"samples_per_s": ".1f", "trainer_idle": ".0%", "replica_idle": ".0%"}
    runs.show("vLLM: trainings of 8 prompts x 8 responses of 48 tokens on average a step", columns)
    for lengths in ("equal", "longtail"):
        base, arm = f"{lengths}, max_staleness=0", f"{lengths}, max_staleness={DEFAULT_STALENESS}"
        figures[f"vllm_async_over_sync_{lengths}"] = runs.ratio("samples_per_s", arm, over=base)
        figures |= {f"vllm_{figure}": runs.median(figure, arm) for figure in ("trainer_idle", "replica_idle")}
    return figures


async def measure_trainer(run_dir: Path, num_steps: int, repeats: int) -> Figures:
    """Measure 40M parameters and short responses: training a step takes longer than rolling it out, and an update of
    160 MB is a good part of it."""
    config = vllm_config(num_steps)
    config = replace(
        config,
        model=replace(config.model, hidden_size=512, num_layers=12),
        algorithm=replace(config.algorithm, group_size=4),
        trainer=replace(config.trainer, prompts_per_step=1, layout=Layout.tree),
    )
    async with started_run(config, run_dir, agent_loop=ForcedLengths(LENGTHS)) as parts:
        runs = await take_turns(
            lambda waits, _: _train_once(config, parts, run_dir, "short", DEFAULT_STALENESS, waits=waits),
            {"goes on": False, "waits": True},
            repeats,
            warm_ups=1,
        )
    title = "vLLM: 40M parameters, 4 short responses a step; while an update goes live, the trainer ..."
    runs.show(title, {"samples_per_s": ".1f"}, over="waits")
    return {"trainer_going_on_over_waiting": runs.ratio("samples_per_s", "goes on", over="waits")}


class WaitingUpdater:
    """An updater that says that the weights are published when they are live on every replica."""

    def __init__(self, updater: WeightUpdater):
        self._updater = updater
        self.publishing, self.updating = updater.publishing, updater.updating

    async def update_weights(self, global_steps: int, published: asyncio.Event | None = None) -> UpdateReport:
        report = await self._updater.update_weights(global_steps)
        if published is not None:
            published.set()
        return report

    async def catch_up(
        self, names: Collection[str], begins: Callable[[Collection[str]], None] = lambda names: None
    ) -> UpdateReport:
        return await self._updater.catch_up(names, begins)


async def _train_once(
    config: Config, parts: StartedRun, run_dir: Path, lengths: str, max_staleness: int, *, waits: bool = False
) -> Figures:
    """Train on the started replicas. `waits`: every step begins only when the weights before it are live."""
    config = replace(config, rollout=replace(config.rollout, max_staleness=max_staleness))
    parts.workers.global_steps = 0
    started = await another_run(config, parts, parts.workers)
    if waits:
        started = replace(started, manager=WaitingUpdater(started.manager))
    started = replace(started, rows=replace(parts.rows, train=_labelled(parts.rows.train, lengths)))
    curve = await train(config, started, run_dir)
    later = curve.metrics[1:]  # the replicas' first interval includes the evaluation before the training
    seconds, later_s = (sum(step["timing_s/step"] for step in steps) for steps in (curve.metrics, later))
    return {
        "samples_per_s": curve.counts.trajectories / seconds,
        "trainer_idle": 1 - sum(step["perf/trainer_busy_s"] for step in curve.metrics) / seconds,
        "replica_idle": sum(step["perf/replica_idle"] * step["timing_s/step"] for step in later) / later_s,
    }


def _labelled(rows: list[Prompt], lengths: str) -> list[Prompt]:
    """Return rows whose responses get the lengths of that name in LENGTHS."""
    return [replace(row, data_source=lengths) for row in rows]


# -- framework against bare engine -------------------------------------------------------------------------------------


class BareReplicaActor(ReplicaActor):
    """A replica whose engine can also be used without the framework around it."""

    async def start(self, spec: EngineSpec, config: WeightSyncConfig) -> int:
        from rollout.engines.vllm.client import AsyncLLM  # loads vLLM, as in the base class
        from rollout.engines.vllm.engine import VllmEngine

        num_workers = await ReplicaActor.start(self, spec, config)
        engine = self._replica._engine
        assert isinstance(engine, VllmEngine)
        # The same engine without our gate in front: its state under the class of vLLM. Kept, because an AsyncLLM shuts
        # its engine down when it is garbage collected.
        self._bare = AsyncLLM.__new__(AsyncLLM)
        self._bare.__dict__ = engine._llm.__dict__  # pyright: ignore[reportAttributeAccessIssue]
        return num_workers

    async def generate_bare(self, requests: list[GenerationRequest]) -> tuple[int, float]:
        """Give all requests to AsyncLLM at once. Returns response tokens, and the seconds inside this process."""
        from rollout.engines.vllm.engine import _sampling_params

        async def generate(request: GenerationRequest) -> int:
            prompt: Any = {"prompt_token_ids": list(request.prompt_ids)}
            name, num_tokens = str(request.request_id), 0
            async for output in self._bare.generate(prompt, _sampling_params(request.sampling), name):
                num_tokens = len(output.outputs[0].token_ids)
            return num_tokens

        started = time.perf_counter()
        counts = await asyncio.gather(*(generate(request) for request in requests))
        return sum(counts), time.perf_counter() - started


async def measure_framework(run_dir: Path, num_groups: int, repeats: int) -> Figures:
    config = vllm_config(num_steps=1)
    config = replace(
        config,
        trainer=replace(config.trainer, prompts_per_step=num_groups),
        rollout=replace(config.rollout, max_staleness=0),
    )
    loop = ForcedLengths(LENGTHS)
    async with started_run(config, run_dir, actor_class=BareReplicaActor, agent_loop=loop) as parts:
        await parts.manager.update_weights(0)
        arms = {
            "bare": lambda: _generate_bare(config, parts, num_groups),
            "framework": lambda: _generate_by_framework(config, parts),
        }
        runs = await take_turns(lambda arm, _: arm(), arms, repeats, warm_ups=1)  # fills the prefix cache for both
    title = "framework cost: 8 responses of 64 to 200 tokens per prompt, 64 seats"
    runs.show(title, {"tokens_per_s": ",.0f"}, over="bare")
    return {"framework_over_bare_engine": runs.ratio("tokens_per_s", "framework", over="bare")}


async def _generate_bare(config: Config, parts: StartedRun, num_groups: int) -> Figures:
    stream, length_of = PromptStream(parts.rows.train, config.seed), LENGTHS["uniform"]
    requests = [
        GenerationRequest(
            request_id=RequestId(ordinal=prompt.ordinal, episode=index),
            prompt_ids=prompt.token_ids,
            sampling=SamplingParams(max_tokens=length_of(prompt.ordinal, index), ignore_eos=True),
        )
        for prompt in (stream.next() for _ in range(num_groups))
        for index in range(config.algorithm.group_size)
    ]
    tokens, seconds = await parts.replicas[0].actor.generate_bare.remote(requests)
    assert tokens == sum(request.sampling.max_tokens for request in requests)
    return {"tokens_per_s": tokens / seconds}


async def _generate_by_framework(config: Config, parts: StartedRun) -> Figures:
    """Measure from the first claim to the last group in the buffer: one batch of all groups, which is not trained."""
    rollouter = make_rollouter(
        config,
        rows=_labelled(parts.rows.train, "uniform"),
        runner=parts.agents,
        fleet=parts.fleet,
        global_steps=0,
        updating=parts.manager.updating,
    )
    tokens = 0

    async def take_all() -> None:
        nonlocal tokens
        batch = await rollouter.buffer.next_batch(0)
        tokens = sum(group.num_tokens for group in batch.groups)

    started = time.perf_counter()
    await run_with_background(take_all(), background=[rollouter.run()])
    return {"tokens_per_s": tokens / (time.perf_counter() - started)}


if __name__ == "__main__":
    main()
