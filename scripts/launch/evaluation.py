"""What `scripts.evaluate` starts: replicas that serve the policy as version 0, and an evaluator over them."""

import asyncio
import sys
import time
from pathlib import Path

from configs.runtime.deadline import within
from configs.schema import Config
from rollout.agents.worker_group import AgentWorkerGroup
from rollout.evaluation.evaluator import Evaluation
from rollout.failures import FailureBudget
from rollout.replica.replica_group import create_replica
from rollout.router import ReplicaRouter
from scripts.launch.cluster import cluster, output_to
from scripts.launch.data import encode_rows, held_out_rows
from scripts.launch.driver import make_evaluator
from scripts.launch.models import boot_model, engine_spec, policy_model
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
        model_path = await policy_model(config, await boot_model(config, run_dir), console)
        console.stage(f"starting {config.rollout.num_replicas} replica(s) on {model_path}")
        spec, on_start = engine_spec(config, device, model_path), output_to(run_dir)
        names = [f"replica-{index}" for index in range(config.rollout.num_replicas)]
        replicas = [create_replica(name, spec, on_start) for name in names]
        clients = [replica.client for replica in replicas]
        agents = AgentWorkerGroup(config=config, tokenizer_path=model_path, replicas=clients, on_start=on_start)
        async with within(config.rollout.start_timeout_s, "rollout.start_timeout_s", "starting replicas"):
            await asyncio.gather(*(replica.start(spec, config.weight_sync) for replica in replicas))
            await asyncio.gather(*(replica.tag_loaded(0) for replica in replicas))
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
