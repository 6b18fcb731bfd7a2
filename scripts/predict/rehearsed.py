"""A profile of a run that nobody has run: from a rehearsal, the data sheet of a GPU, and what of it is reached."""

from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from configs.mixture import longest_source
from configs.schema import Config
from scripts.plan.machine import Machine, refusals
from scripts.plan.model_shape import ModelShape
from scripts.plan.rehearsal.cards import Card, Reach
from scripts.plan.rehearsal.rehearsal import Rehearsal
from scripts.plan.rehearsal.roofline import replica_time, step_time
from scripts.simulate.profile import Profile
from scripts.simulate.quantiles import Quantiles
from scripts.simulate.setup import KEYS, Setup

MEAN_SHARE, SIGMA = 0.5, 0.6
"""The mean of a response over the longest one that is allowed, and the deviation of its logarithm, where nothing is
known."""
STEPS = 6
"""The steps that are simulated, besides those that fill the slots before and empty them after."""


def profile_of(config: Config, shape: ModelShape, rehearsal: Rehearsal, card: Card, reach: Reach) -> Profile:
    """Return the times of the run on this GPU. What is taken for granted is said in it."""
    longest = longest_source(config)
    rollout, data, trainer = longest.rollout, longest.data, config.trainer
    step, replica = step_time(rehearsal, card, config), replica_time(config, shape, rehearsal, card)
    responses = Quantiles.lognormal(MEAN_SHARE * rollout.max_response_tokens, SIGMA, rollout.max_response_tokens)
    prompt = MEAN_SHARE * data.max_prompt_tokens
    context = prompt + responses.mean / 2
    training, decoding, transfers = reach.training.value, reach.decoding.value, reach.transfers.value
    sources = ", ".join(config.data.sources)
    alike = f"the sources {sources} are alike: prompts and responses are of the one with the longest"
    return Profile(
        step_s=replica.step_s / decoding,
        step_s_per_request=context * replica.step_s_per_token / decoding + replica.step_s_per_request / training,
        prefill_s_per_token=replica.prefill_s_per_token / training,
        turn_tokens=responses,
        uncached_tokens=Quantiles((prompt / config.algorithm.group_size,)),
        train_s=trainer.optimizer_steps_per_batch * step.fixed_s / training,
        train_s_per_token=trainer.epochs * step.micro_batch_s / training * trainer.sequence_parallel / step.tokens,
        computed_per_sampled=1 + prompt / responses.mean,
        stage_s=replica.stage_s / transfers,
        swap_s=replica.swap_s / transfers,
        assumed=(
            f"responses have {responses.mean:,.0f} tokens on average and at most {rollout.max_response_tokens:,}, and "
            f"prompts {prompt:,.0f}: profile.turn_tokens=... and profile.computed_per_sampled=... say better",
            "one turn, without tools and with a reward that takes no time: profile.turns, tool_s, reward_s",
            "n ranks train a batch in 1/n of the time that depends on its tokens",
            "an engine's own time between two steps, and messages between the GPUs of a replica, take nothing",
            *([alike] if sources else []),
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """A way to divide the GPUs between trainer and replicas, and how long each side takes for the work of a step."""

    num_replicas: int
    num_ranks: int
    trainer_s: float
    replicas_s: float

    @property
    def step_s(self) -> float:
        """The slower side decides."""
        return max(self.trainer_s, self.replicas_s)

    @property
    def change(self) -> dict[str, int]:
        """The split as fields of a `Setup`."""
        return {"num_replicas": self.num_replicas, "num_ranks": self.num_ranks}


def splits(config: Config, shape: ModelShape, card: Card, profile: Profile) -> list[Split]:
    """Return the ways to divide the run's GPUs that fit into their memory by formula, by arithmetic alone: a simulation
    of each would take minutes."""
    rollout, trainer, setup = config.rollout, config.trainer, setup_of(config)
    per_replica = rollout.tensor_parallel_size * rollout.data_parallel_size
    num_gpus = trainer.num_ranks + rollout.num_replicas * per_replica
    machine, possible = Machine(gpu=card.memory, host=None, shared=None), list[Split]()
    tokens = setup.samples_per_step * profile.turn_tokens.mean
    prompts_s = setup.samples_per_step * profile.uncached_tokens.mean * profile.prefill_s_per_token
    in_flight = (setup.max_staleness + 1) * setup.interval * setup.samples_per_step
    for ranks in range(trainer.sequence_parallel, num_gpus - per_replica + 1, trainer.sequence_parallel):
        replicas, left_over = divmod(num_gpus - ranks, per_replica)
        changed = replace(
            config, trainer=replace(trainer, num_ranks=ranks), rollout=replace(rollout, num_replicas=replicas)
        )
        if left_over or refusals(changed, shape, "cuda", machine):
            continue
        at_once = min(setup.max_num_seqs, max(1, in_flight // replicas))
        step_s = profile.step_s / at_once + profile.step_s_per_request  # of a token
        computed = tokens * profile.computed_per_sampled / ranks
        possible.append(
            Split(
                num_replicas=replicas,
                num_ranks=ranks,
                trainer_s=profile.train_s + profile.train_s_per_token * computed,
                replicas_s=(tokens * step_s + prompts_s) / replicas,
            )
        )
    return possible


def setup_of(config: Config) -> Setup:
    """Return the setup of the run, without what happens from time to time: evaluations and checkpoints."""
    values: dict[str, Any] = {name: attrgetter(key)(config) for name, key in KEYS.items()}
    values["stale_policy"] = config.rollout.stale_policy.value
    values["eval_every"] = values["checkpoint_every"] = 0
    values["steps"] = -(-STEPS // config.weight_sync.interval) * config.weight_sync.interval
    return Setup(**values)
