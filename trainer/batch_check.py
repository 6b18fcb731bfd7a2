"""Refuses a batch that breaks a rule of the run, before anything is trained on it.

Every rule holds by construction elsewhere: the buffer bounds staleness, the stream hands out prompts once, agent loops
set masks. Here they are checked on the trajectories themselves, whatever was meant to make them hold.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from configs.mixture import sources_of
from configs.schema import Config
from rollout.types import TokenSequence, TrajectoryGroup, staleness


class BrokenBatchError(RuntimeError):
    """A batch must not be trained. The message names step, prompt, trajectory and token."""


class BatchCheck:
    """Checks the batches of one process of a run, each before it is trained.

    Example:
        check = BatchCheck(config)
        check.refuse(groups, global_steps=7)  # raises where one of them was in an earlier batch
    """

    def __init__(self, config: Config):
        self._max_staleness, self._interval = config.rollout.max_staleness, config.weight_sync.interval
        self._learns_all = {source.name: _learns_all(source.config) for source in sources_of(config)}
        self._trained: set[int] = set()

    def refuse(self, groups: Sequence[TrajectoryGroup], global_steps: int) -> None:
        """Raise BrokenBatchError for the first rule that is broken. `global_steps`: steps taken before this one."""
        for problem in self._problems(groups, global_steps):
            raise BrokenBatchError(f"step {global_steps + 1} is not trained: {problem}")
        self._trained.update(group.prompt.ordinal for group in groups)

    def _problems(self, groups: Sequence[TrajectoryGroup], global_steps: int) -> Iterator[str]:
        ordinals = [group.prompt.ordinal for group in groups]
        if again := self._trained.intersection(ordinals):
            yield f"prompt {min(again)} was trained before"
        if len(set(ordinals)) < len(ordinals):
            yield f"prompt {max(ordinals, key=ordinals.count)} is in the batch twice"
        for group in groups:
            for index, trajectory in enumerate(group.trajectories):
                for sequence in trajectory.sequences:
                    problem = self._problem(sequence, global_steps, self._learns_all[group.prompt.source])
                    if problem is not None:
                        yield f"prompt {group.prompt.ordinal}, trajectory {index}, {problem}"

    def _problem(self, sequence: TokenSequence, global_steps: int, learns_all: bool) -> str | None:
        versions, loss_mask = sequence.token_versions(), sequence.loss_mask
        sampled = versions >= 0
        if (nobody := loss_mask & ~sampled).any():
            return f"token {int(nobody.argmax())} is in the loss, and nobody sampled it"
        of_spans = [span.global_steps for span in sequence.spans]
        if of_spans != sorted(of_spans):
            return f"its versions descend: {of_spans}"
        if of_spans and of_spans[-1] > global_steps:
            return f"a token is of version {of_spans[-1]}, which no step has made yet"
        is_stale = staleness(versions, global_steps, self._interval) > self._max_staleness
        if (too_old := loss_mask & is_stale).any():
            token = int(too_old.argmax())
            age = staleness(int(versions[token]), global_steps, self._interval)
            return f"token {token} is {age} versions old, rollout.max_staleness={self._max_staleness}"
        is_known = True if sequence.kept is None else sequence.kept.is_known  # what it was drawn from
        if learns_all and (left_out := sampled & ~loss_mask & ~is_stale & is_known).any():
            return f"token {int(np.argmax(left_out))} was sampled, and is not in the loss"
        return None


def _learns_all(config: Config) -> bool:
    """Return false for loops that may leave a part of what they sampled out of the loss, on purpose."""
    is_harness = config.rollout.agent is not None or config.rollout.agent_command is not None
    return config.rollout.agent_loop == "single_turn" and not is_harness
