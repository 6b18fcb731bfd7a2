"""On-policy distillation: the teacher's judgement of each sampled token as its advantage.

The policy samples, and learns for every token a from

    A(a) = log p_teacher(a) - log mu(a)

whose mean over what the policy samples is -KL(mu || p_teacher), the reverse KL of each token given those before it. No
discount: a token is not blamed for what follows it (Agarwal et al., arXiv:2306.13649; Lu, Thinking Machines Lab,
"On-Policy Distillation", 2025).

p_teacher is the teacher at temperature 1, mu what the policy was sampled from: with rollout.temperature and the
truncation of rollout.top_p and rollout.top_k in it. So what comes to equal the teacher is the policy as it is sampled.
"""

import numpy as np

from rollout.types import FloatArray
from trainer.tokens import TokenSignals


def teacher_advantages(tokens: TokenSignals) -> FloatArray:
    """[T]: log p_teacher - log mu. Raises ValueError where no teacher has scored the tokens."""
    if tokens.teacher_logprobs is None:
        raise ValueError("teacher.path is set, and no teacher has scored the tokens of this batch")
    return tokens.teacher_logprobs - tokens.rollout_logprobs


def teacher_metrics(tokens: TokenSignals) -> dict[str, float]:
    """Metrics of the tokens of a step."""
    distances = -teacher_advantages(tokens)
    return {"teacher/kl": float(np.mean(distances))} if len(distances) else {}
