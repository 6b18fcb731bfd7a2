"""The driver beside simulated replicas: the rack that is cut off is given up, and its groups go on elsewhere."""

from rollout.engines.virtual_clock import run_virtual
from scripts.bench.scale import TIMEOUT_S, Scene


def test_the_groups_of_a_rack_that_is_cut_off_run_elsewhere_and_only_the_driver_is_timed() -> None:
    scene = Scene(num_replicas=16, seconds=20.0)
    run_virtual(scene.run())
    figures = scene.figures
    assert TIMEOUT_S <= figures["recovery_s"] <= 3 * TIMEOUT_S
    assert figures["driver"] > 0 and figures["us_per_replica_s"] > 0
    assert figures["update_us_per_replica"] > 0, "weights were updated meanwhile"
    assert 0 < scene.meter.driver() < sum(scene.meter.seconds.values())
