"""What `scripts.evaluate` starts: replicas that serve the policy as version 0, and an evaluator over them."""

import sys
import time
from pathlib import Path

from configs.schema import Config
from rollout.agents.worker_group import AgentWorkerGroup
from rollout.evaluation.evaluator import Evaluation
from rollout.failures import FailureBudget
from rollout.router import ReplicaRouter
from scripts.launch.cluster import cluster, output_to
from scripts.launch.data import encode_rows, held_out_rows
from scripts.launch.driver import make_evaluator
from scripts.launch.serving import start_replicas
from trainer.tracking.console import PlainConsole


async def evaluate_model(config: Config, device: str, run_dir: Path) -> tuple[str, Evaluation, int, float]:
    """Evaluates once. Any error is raised here, after every process has ended.

    Returns:
        The model's path, the evaluation, how many rewards failed, and the seconds that the evaluation took.
    """
    rows = held_out_rows(config)  # malformed data is an error before anything starts
    console = PlainConsole(0, sys.stdout)
    console.stage("starting Ray")
    async with cluster(config, device):
        model_path, replicas = await start_replicas(config, device, run_dir, console)
        agents = AgentWorkerGroup(
            config=config,
            tokenizer_path=model_path,
            replicas=[replica.client for replica in replicas],
            on_start=output_to(run_dir),
        )
        encoded = await encode_rows(config, agents, "held-out", rows, console)
        router = ReplicaRouter([replica.name for replica in replicas], config.rollout.max_num_seqs)
        failures = FailureBudget(
            num_trajectories=len(encoded) * config.evaluation.samples,
            max_failed_rewards=config.rollout.max_failed_rewards,
        )
        evaluator = make_evaluator(
            config, rows=encoded, router=router, runner=agents, failures=failures, on_lost=router.remove
        )
        console.stage(f"{len(encoded)} prompts x {config.evaluation.samples} samples")
        started = time.perf_counter()
        evaluation = await evaluator.evaluate()
        return model_path, evaluation, failures.failed_rewards, time.perf_counter() - started
