"""What lending could give at most: nothing where both sides are busy, and half of what one side idles."""

import pytest

from scripts.bench.lending import lent_step_s
from scripts.predict.rehearsed import Split


@pytest.mark.parametrize(("trainer_s", "replicas_s"), [(4.0, 10.0), (10.0, 4.0)])
def test_the_side_that_waits_helps_for_as_long_as_it_waits_but_for_the_switches(
    trainer_s: float, replicas_s: float
) -> None:
    split = Split(num_replicas=2, num_ranks=2, trainer_s=trainer_s, replicas_s=replicas_s)
    assert lent_step_s(split, 0.0) == 7.0, "all GPUs are busy all the time"
    assert lent_step_s(split, 2.0) == 8.0, "4 s of its own, 2 s of switches, 2 s for the others"
    assert lent_step_s(split, 7.0) == 10.0, "it does not pay"
