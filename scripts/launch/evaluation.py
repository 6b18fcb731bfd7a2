"""Starts what `scripts.evaluate` needs: replicas that serve the policy as version 0, and an evaluator over them."""

import sys
import time
from contextlib import AsyncExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from configs.mixture import sources_of
from configs.schema import Config
from rollout.evaluation.evaluator import Evaluation
from rollout.evaluation.scores import scores_by_source
from rollout.failures import FailureBudget
from rollout.router import ReplicaRouter
from scripts.launch.agents import start_agents
from scripts.launch.cluster import cluster, set_up_in
from scripts.launch.data import encode_sources, held_out_sources
from scripts.launch.driver import make_evaluator
from scripts.launch.serving import start_replicas
from trainer.tracking.console import PlainConsole
from trainer.tracking.sinks import write_atomically
from trainer.tracking.trajectories import sample_records, to_lines

SAMPLES_FILE = "samples.jsonl"


async def evaluate_model(config: Config, device: str, run_dir: Path) -> dict[str, Any]:
    """Evaluate once. Returns the content of evaluation.json. Any error is raised after every process has ended."""
    rows = held_out_sources(config)  # malformed data is an error before anything starts
    console = PlainConsole(0, sys.stdout)
    console.stage("starting Ray")
    async with cluster(config, device), AsyncExitStack() as stack:
        model_path, replicas = await start_replicas(config, device, run_dir, console)
        agents = start_agents(
            config,
            model_path,
            [replica.client for replica in replicas],
            set_up_in(run_dir, config.ray),
        )
        stack.push_async_callback(agents.close)
        encoded = await encode_sources(config, agents, "held-out", rows, console)
        router = ReplicaRouter([replica.name for replica in replicas], config.rollout.max_num_seqs)
        failures = FailureBudget(
            num_trajectories=len(encoded) * config.evaluation.samples,
            max_failed_rewards=config.rollout.max_failed_rewards,
        )
        evaluator = make_evaluator(
            config, rows=encoded, router=router, ask=agents.evaluate, failures=failures, on_lost=router.remove
        )
        console.stage(f"{len(encoded)} prompts x {config.evaluation.samples} samples")
        started = time.perf_counter()
        evaluation = await evaluator.evaluate()
        seconds = time.perf_counter() - started
        write_atomically(run_dir / SAMPLES_FILE, to_lines(sample_records(evaluation.prompts)))
        return make_report(config, model_path, evaluation, failures.failed_rewards, seconds)


def make_report(
    config: Config, model_path: str, evaluation: Evaluation, num_failed: int, seconds: float
) -> dict[str, Any]:
    return {
        "model": model_path,
        **_what_is_asked(config),
        "evaluation": asdict(config.evaluation),
        "num_prompts": evaluation.num_prompts,
        "mean_response_tokens": evaluation.mean_response_tokens,
        "agent": evaluation.agent_metrics,
        "failed_rewards": num_failed,
        "seconds": round(seconds, 3),
        "samples": SAMPLES_FILE,
        "scores": scores_by_source(evaluation.prompts, powers_of_two(config.evaluation.samples)),
        "prompts": [
            {
                "ordinal": prompt.ordinal,
                "data_source": prompt.reported_as[-1],
                "accuracies": [sample.accuracy for sample in prompt.samples],
                "answers": [sample.answer for sample in prompt.samples],
            }
            for prompt in evaluation.prompts
        ],
    }


def _what_is_asked(config: Config) -> dict[str, Any]:
    """Return the held-out set and the reward, or those of each source of data.sources."""
    every = {
        source.name: {
            "val_files": source.config.data.val_files or source.config.data.held_out_part,
            "reward": source.config.rollout.reward,
        }
        for source in sources_of(config)
    }
    return {"sources": every} if config.data.sources else every[""]


def powers_of_two(limit: int) -> list[int]:
    """Return the powers of two below `limit`, and `limit`."""
    return [*(2**exponent for exponent in range((limit - 1).bit_length())), limit]
