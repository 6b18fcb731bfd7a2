"""Every metric that a run records in metrics.jsonl and wandb. `make docs` writes this list to docs/metrics.md.

Tests hold it against the code and against a real run: a new metric needs an entry here, and an entry needs a metric.
"""

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MetricEntry:
    """One metric, or a family of them.

    Example: MetricEntry("reward/<name>", "reward", "...", when="...") stands for reward/format.
    """

    name: str
    """A part in angle brackets stands for any text, also for none."""
    unit: str
    """What it is measured in. A share is between 0 and 1; docs/metrics.md explains count and total."""
    meaning: str
    when: str = ""
    """In which records it is; empty for those of every step, or of every evaluation."""

    def matches(self, key: str) -> bool:
        """Whether it describes the metric `key`."""
        literal = re.split(r"<[^>]*>", self.name)
        return re.fullmatch(".*".join(map(re.escape, literal)), key) is not None


def describe(key: str) -> MetricEntry | None:
    """The entry of a recorded metric; None where it has none."""
    return next((entry for entry in CATALOG if entry.matches(key)), None)


_GAE = "with `algorithm.advantage=gae`"
_UPDATE = "steps with a weight update"
_REJECTION = "with a correction that rejects"
_SAMPLES = "evaluations with `evaluation.samples=k` above 1"
_SAVED = "after the first checkpoint"

REWARDS = (
    MetricEntry("critic/score/mean", "reward", "mean of what the reward function gave"),
    MetricEntry(
        "critic/rewards/mean",
        "reward",
        "mean of what is learned: the score less the penalty of long responses, before a KL penalty",
    ),
    MetricEntry("critic/rewards/max", "reward", "largest of them"),
    MetricEntry("critic/rewards/min", "reward", "smallest of them"),
    MetricEntry(
        "critic/advantages/mean",
        "advantage",
        "mean over trajectories, by `algorithm.advantage`; grpo: (r - mean) / (std + 1e-6); gae: mean over tokens",
    ),
    MetricEntry("critic/advantages/max", "advantage", "largest of them"),
    MetricEntry("critic/advantages/min", "advantage", "smallest of them"),
    MetricEntry(
        "reward/<name>",
        "reward",
        "mean of a further number that the reward reports, such as `reward/format`",
        when="with rewards that report one",
    ),
    MetricEntry("rollout/zero_variance_groups", "share", "groups whose advantages are all 0"),
    MetricEntry("rollout/solve_all", "share", "groups whose rewards are all 1"),
    MetricEntry(
        "rollout/solve_none", "share", "groups whose rewards are all 0; always 0 with `dapo`, where wrong is -1"
    ),
    MetricEntry("response_length/mean", "tokens", "mean over trajectories"),
    MetricEntry("response_length/max", "tokens", "longest response"),
    MetricEntry("response_length/clip_ratio", "share", "responses that were cut off at a limit"),
    MetricEntry("prompt_length/mean", "tokens", "mean over trajectories"),
)

EVALUATION = (
    MetricEntry(
        "eval/accuracy",
        "share",
        "mean accuracy over held-out prompts and samples: the reward, unless it reports an accuracy; 0 where it failed",
    ),
    MetricEntry("eval/response_length", "tokens", "mean length of the responses"),
    MetricEntry("eval/num_prompts", "prompts", "held-out prompts"),
    MetricEntry("eval/pinned", "0 or 1", "1: the replicas were held at one version; 0: updates went on meanwhile"),
    MetricEntry("eval/num_versions", "versions", "how many versions sampled its tokens"),
    MetricEntry("eval/min_version", "global_steps", "oldest of them; the record is under this step"),
    MetricEntry("eval/max_version", "global_steps", "newest of them"),
    MetricEntry("val/<data source/>avg@<k>", "share", "mean accuracy over k samples, by data source", when=_SAMPLES),
    MetricEntry("val/<data source/>pass@<k>", "share", "at least one of k samples is right, unbiased", when=_SAMPLES),
    MetricEntry(
        "val/<data source/>maj@<k>",
        "share",
        "accuracy of the most frequent answer of k",
        when=f"{_SAMPLES}, for rewards that read an answer",
    ),
)

LEARNING = (
    MetricEntry("actor/pg_loss", "loss", "policy loss, corrected, aggregated by `algorithm.loss_aggregation`"),
    MetricEntry(
        "actor/kl_loss",
        "nats",
        "KL to the reference, aggregated as the loss is, before the coefficient",
        when="with `algorithm.kl_loss_coef`",
    ),
    MetricEntry(
        "actor/reward_kl_penalty",
        "nats",
        "mean over tokens of the KL that is taken off rewards, before the coefficient",
        when="with `algorithm.kl_reward_coef`",
    ),
    MetricEntry("actor/pg_clipfrac", "share", "tokens whose clip was active, or which the loss held otherwise"),
    MetricEntry("actor/ppo_kl", "nats", "mean of log pi_old - log pi, pi_old the proximal policy"),
    MetricEntry("actor/rollout_kl", "nats", "mean of log mu - log pi, mu the policy that sampled the token"),
    MetricEntry("actor/rollout_logprob_diff_max", "nats", "largest of |log mu - log pi|"),
    MetricEntry("actor/importance_weight", "ratio", "mean of the weights that were applied to the policy loss"),
    MetricEntry("actor/ess", "share", "effective sample size (sum r)^2 / (T sum r^2), r = pi / mu"),
    MetricEntry("actor/entropy", "nats", "mean entropy of pi"),
    MetricEntry("actor/grad_norm", "norm", "global gradient norm before clipping"),
    MetricEntry("actor/lr", "1", "learning rate of the step"),
    MetricEntry("actor/skipped_steps", "total of the run", "steps that were skipped for NaN or infinity"),
    MetricEntry("correction/k3_kl", "nats", "mean of r - 1 - log r"),
    MetricEntry("correction/ppl_ratio", "ratio", "mean over trajectories of perplexity of pi / perplexity of mu"),
    MetricEntry("correction/ratio_fraction_high", "share", "tokens whose r is above `algorithm.importance_cap`"),
    MetricEntry("correction/ratio_fraction_low", "share", "tokens whose r is below 1 / `algorithm.importance_cap`"),
    MetricEntry("correction/rejected_fraction", "share", "tokens left out of the policy loss", when=_REJECTION),
    MetricEntry("correction/rejected_trajectories", "share", "trajectories that lost any token", when=_REJECTION),
    MetricEntry("critic/values/mean", "reward", "mean of the critic's values before the step", when=_GAE),
    MetricEntry("critic/returns/mean", "reward", "mean of what the critic learns", when=_GAE),
    MetricEntry("critic/vf_explained_var", "1", "1 - var(return - value) / var(return)", when=_GAE),
    MetricEntry("critic/vf_loss", "loss", "clipped squared error / 2, aggregated as the policy loss is", when=_GAE),
    MetricEntry("critic/vf_clipfrac", "share", "clipped values; 0 with one optimizer step per batch", when=_GAE),
    MetricEntry("critic/grad_norm", "norm", "as `actor/grad_norm`", when=_GAE),
    MetricEntry("critic/lr", "1", "as `actor/lr`", when=_GAE),
)

STALENESS = (
    MetricEntry("staleness/mean", "versions", "mean over trained tokens: how many versions old they are"),
    MetricEntry("staleness/max", "versions", "of the stalest token; at most `rollout.max_staleness`"),
    MetricEntry("staleness/min", "versions", "of the freshest token"),
    MetricEntry("staleness/spanning_trajectories", "share", "trajectories that two or more versions sampled"),
    MetricEntry("staleness/versions_per_trajectory_max", "versions", "most versions in one trajectory"),
    MetricEntry("staleness/dropped_groups", "total of the run", "groups that `rollout.stale_policy=drop` threw away"),
    MetricEntry("staleness/masked_tokens", "count", "tokens that `rollout.stale_policy=mask` left out of this step"),
)

ROLLOUT = (
    MetricEntry("rollout/inflight_groups", "groups", "slots whose group is being sampled"),
    MetricEntry("rollout/ready_groups", "groups", "slots whose group waits to be trained"),
    MetricEntry("rollout/free_slots", "groups", "slots that a prompt may claim"),
    MetricEntry("rollout/inflight_trajectories", "trajectories", "trajectories at replicas"),
    MetricEntry("rollout/prefix_cached_tokens", "tokens", "mean prompt tokens that came from the prefix cache"),
    MetricEntry("rollout/prefix_hit_rate", "share", "prompt tokens of the whole run that came from the prefix cache"),
    MetricEntry("rollout/engine_requests", "total", "requests that engines have started"),
    MetricEntry("rollout/aborted", "total", "requests aborted by a client, or left by an agent worker that was lost"),
    MetricEntry(
        "rollout/continued",
        "total",
        "requests that continue a trajectory which an update aborted (`weight_sync.pause_mode=abort`)",
    ),
    MetricEntry(
        "rollout/filtered_groups",
        "total of the run",
        "groups replaced because their rewards are equal (`algorithm.filter_groups`) or because a client aborted them",
    ),
    MetricEntry("rollout/failed_rewards", "total of the run", "rewards that failed, those of evaluations included"),
    MetricEntry("rollout/failed_groups", "total of the run", "groups that were given up"),
    MetricEntry("rollout/retried_groups", "total", "groups that were tried again"),
    MetricEntry("rollout/replicas_ready", "replicas", "replicas that get work now"),
    MetricEntry("rollout/replicas_lost", "total", "replicas that were lost"),
    MetricEntry("rollout/replicas_replaced", "total", "lost replicas whose replacement has served"),
    MetricEntry("rollout/recovery_s", "seconds", "from the last replaced loss until its replacement served; 0 before"),
)

UPDATES = (
    MetricEntry(
        "weight_sync/pause_ms",
        "ms",
        "how long the slowest replica was frozen, by its own clock: from the order to stop to the resume",
        when=_UPDATE,
    ),
    MetricEntry("weight_sync/stage_ms", "ms", "staging on the slowest replica, while it generates", when=_UPDATE),
    MetricEntry("weight_sync/swap_ms", "ms", "the swap on the slowest replica", when=_UPDATE),
    MetricEntry("weight_sync/publish_ms", "ms", "what the train workers took to publish the weights", when=_UPDATE),
    MetricEntry("weight_sync/total_ms", "ms", "the whole update", when=_UPDATE),
    MetricEntry("weight_sync/megabytes", "MB", "what was sent", when=_UPDATE),
    MetricEntry("weight_sync/failures", "count", "failed attempts to bring a replica to this version", when=_UPDATE),
)

TIME = (
    MetricEntry("timing_s/step", "seconds", "the whole step"),
    MetricEntry("timing_s/wait_batch", "seconds", "waiting for a batch of groups"),
    MetricEntry("timing_s/assemble", "seconds", "advantages, layout and packing"),
    MetricEntry("timing_s/score", "seconds", "values or reference logprobs of the batch", when=f"{_GAE} or a KL"),
    MetricEntry("timing_s/train_step", "seconds", "forward, backward and optimizer"),
    MetricEntry("timing_s/update_weights", "seconds", "the weight update", when=_UPDATE),
    MetricEntry("timing_s/checkpoint", "seconds", "what training waited for a save", when="steps with a checkpoint"),
    MetricEntry("timing_s/elapsed", "seconds", "since the first step began"),
    MetricEntry("perf/tokens", "tokens", "prompt and response tokens of the batch"),
    MetricEntry("perf/padded_tokens", "tokens", "tokens computed, padding included"),
    MetricEntry("perf/throughput", "tokens/s", "`perf/tokens` per second of the step"),
    MetricEntry("perf/groups_per_second", "groups/s", "groups trained per second of the step"),
    MetricEntry("perf/trainer_busy_s", "seconds", "the optimizer step on the slowest rank"),
    MetricEntry("perf/trainer_idle", "share", "of the step in which no optimizer step ran; scoring counts as idle"),
    MetricEntry(
        "perf/replica_idle", "share", "of the time since the last step in which a replica had no request; the mean"
    ),
)

HEALTH = (
    MetricEntry("trainer/restarts", "total", "times that the train workers have started again"),
    MetricEntry("checkpoint/failures", "total", "saves that failed"),
    MetricEntry("checkpoint/seconds", "seconds", "the last good save, from its start until it counted", when=_SAVED),
    MetricEntry("checkpoint/megabytes", "MB", "size of the last good save", when=_SAVED),
    MetricEntry("eval/skipped", "total", "evaluations that were due while another was running"),
    MetricEntry("tracking/failed_writes", "total", "records and files that could not be written"),
)

SECTIONS = {
    "Rewards and lengths": REWARDS,
    "Evaluation": EVALUATION,
    "Learning": LEARNING,
    "Staleness": STALENESS,
    "Rollouts and replicas": ROLLOUT,
    "Weight updates": UPDATES,
    "Time": TIME,
    "Health": HEALTH,
}
CATALOG = tuple(entry for entries in SECTIONS.values() for entry in entries)
