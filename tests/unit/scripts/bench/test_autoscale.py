"""A fleet that follows a load costs less than one that is always large enough for it."""

import pytest

from rollout.engines.virtual_clock import run_virtual
from scripts.bench.autoscale import MOST, Scene


@pytest.mark.slow
def test_a_fleet_grows_with_the_load_and_is_smaller_than_the_largest() -> None:
    scene = Scene(num_replicas=2, steps=90, autoscaled=True)
    figures = run_virtual(scene.run())
    sizes = [size for _, size in scene.marks]
    assert max(sizes) > 2 and sizes[25] <= 2, "it grew in the middle"
    assert max(sizes) <= MOST and figures["replicas"] < 5
