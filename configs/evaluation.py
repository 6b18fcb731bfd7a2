"""The keys of the evaluation on the held-out set."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationConfig:
    samples: int = 1
    """Responses per held-out prompt. Of k > 1, avg@k, pass@k and maj@k are reported."""
    temperature: float = 0.0
    """Sampling temperature; 0 is greedy."""
    top_p: float = 1.0
    """As rollout.top_p, for the evaluation."""
    replicas: int = 1
    """Replicas that hold one version and only evaluate while an evaluation beside the training lasts; one is always
    left to the training. 0, or a single replica: evaluation shares the replicas, and updates go on under it."""
    timeout_s: float = 1200.0
    """Deadline of one evaluation; then the run ends."""


def evaluation_problems(evaluation: EvaluationConfig, num_replicas: int) -> list[tuple[str, object, str]]:
    """(key, value, what is allowed) of what cannot work."""
    problems: list[tuple[str, object, str]] = []
    if evaluation.samples > 1 and evaluation.temperature == 0:
        allowed = "greedy samples are all the same: set evaluation.temperature, or samples=1"
        problems.append(("evaluation.samples", evaluation.samples, allowed))
    if evaluation.replicas > max(1, num_replicas - 1):
        allowed = f"must leave one of rollout.num_replicas={num_replicas} to the training"
        problems.append(("evaluation.replicas", evaluation.replicas, allowed))
    return problems
