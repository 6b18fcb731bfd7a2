"""DAPO's soft punishment of responses that come near their limit."""


def overlong_penalty(num_tokens: int, max_tokens: int, buffer_tokens: int, factor: float) -> float:
    """To be added to the reward: 0 up to `max_tokens - buffer_tokens`, then linear down to -factor at `max_tokens`
    (DAPO, arXiv:2503.14476, eq. 13, where factor is 1). buffer_tokens=0 is no punishment.

    Example: overlong_penalty(90, 100, 20, 1.0) == -0.5
    """
    excess = num_tokens - (max_tokens - buffer_tokens)
    if buffer_tokens == 0 or excess <= 0:
        return 0.0
    return -factor * min(1.0, excess / buffer_tokens)
