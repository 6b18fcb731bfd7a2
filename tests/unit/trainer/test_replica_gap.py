"""A replica that computes another model than the trainer is found by the logprobs of the same tokens."""

from dataclasses import replace

import numpy as np
import pytest

from configs.schema import Config, DType
from configs.validate import ConfigError
from rollout.types import FloatArray, Trajectory, TrajectoryGroup, VersionSpan
from tests.support.compose import changed
from tests.support.reference import make_group, make_trajectory
from trainer.replica_gap import ReplicaGap, refuse_other_replicas, replica_gaps, tolerance


def sampled(replica: str, *logprobs: float, spans: tuple[VersionSpan, ...] = ()) -> Trajectory:
    length = len(logprobs)
    versions = spans or (VersionSpan(0, length, 3),)
    trajectory = make_trajectory([1, 2], [5] * length, rollout_logprobs=list(logprobs), spans=versions)
    return replace(trajectory, replica=replica)


def floats(*values: float) -> FloatArray:
    return np.array(values, np.float32)


def groups(*trajectories: Trajectory) -> list[TrajectoryGroup]:
    return [make_group(ordinal, [trajectory]) for ordinal, trajectory in enumerate(trajectories)]


def test_each_replica_is_judged_by_the_tokens_that_it_sampled_under_the_trainers_version() -> None:
    """A sequence of another version, and one that spans an update, say nothing."""
    spanning = sampled("b", -1, -1, spans=(VersionSpan(0, 1, 2), VersionSpan(1, 2, 3)))
    older = sampled("a", -1, spans=(VersionSpan(0, 1, 2),))
    batch = groups(sampled("a", -1, -2), spanning, sampled("b", -3), older, sampled("a", -4))
    gaps = replica_gaps(batch, floats(-1.5, -2, -9, -9, -3.25, -9, -3), 3)
    assert gaps == [ReplicaGap("a", 3, 0.5, 1.0), ReplicaGap("b", 1, 0.25, 0.25)]
    assert replica_gaps(batch, np.zeros(7, np.float32), 4) == [] == replica_gaps([], floats(), 3)
    with pytest.raises(ValueError, match="logprobs of 2 loss tokens, but the groups have 1"):
        replica_gaps(groups(sampled("a", -1)), floats(-1, -1), 3)


def test_tokens_that_the_policy_did_not_sample_are_no_tokens_of_the_replica() -> None:
    observed = make_trajectory([1], [5, 6, 7], loss_mask=[True, False, True], rollout_logprobs=[-1, 0, -2])
    observed = replace(observed, sequences=(replace(observed.sequences[0], spans=(VersionSpan(0, 3, 0),)),))
    assert replica_gaps(groups(observed), floats(-1, -2), 0) == [ReplicaGap("replica-0", 2, 0.0, 0.0)]


def test_a_token_whose_logprob_is_nan_makes_the_mean_nan() -> None:
    batch, computed = groups(sampled("a", -1, -2), sampled("b", -1)), floats(np.nan, -2, np.nan)
    assert all(np.isnan(gap.mean) for gap in replica_gaps(batch, computed, 3))


@pytest.mark.parametrize(
    ("trainer", "rollout", "own", "allowed"),
    [
        (DType.float32, DType.float32, None, 1e-3),
        (DType.bfloat16, DType.float32, None, 0.1),
        (DType.float32, DType.bfloat16, None, 0.1),
        (DType.bfloat16, DType.bfloat16, 0.25, 0.25),
    ],
)
def test_the_tolerance_follows_from_the_number_formats(
    trainer: DType, rollout: DType, own: float | None, allowed: float
) -> None:
    config = changed(Config(), trainer__dtype=trainer, rollout__dtype=rollout, trainer__max_logprob_diff=own)
    assert tolerance(config) == tolerance(changed(config, rollout__temperature=2.0)) == allowed
    assert tolerance(changed(config, rollout__temperature=0.5)) == (2 * allowed if own is None else own)
    fine, wrong = ReplicaGap("replica-0", 64, allowed, 1.0), ReplicaGap("replica-1", 64, allowed * 1.25, 2.5)
    refuse_other_replicas([fine], config, 4)
    with pytest.raises(ConfigError) as refusal:
        refuse_other_replicas([fine, wrong], config, 4)
    text = str(refusal.value)
    assert text.startswith(f"trainer.max_logprob_diff={own}: replica and trainer compute two models")
    assert "replica-1 is off by" in text and "2.5 at most, over 64 tokens" in text and "replica-0" not in text
    assert f"at most {allowed:g} on average" in text and "version 4" in text


def test_nan_is_no_agreement() -> None:
    with pytest.raises(ConfigError, match="replica-0 is off by nan"):
        refuse_other_replicas([ReplicaGap("replica-0", 1, float("nan"), float("nan"))], Config(), 0)
