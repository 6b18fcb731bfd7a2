"""The actor of a replica, as Ray sees it."""

from typing import Any

import ray

from rollout.replica.replica_group import ReplicaActor


def test_ray_runs_every_control_call_in_a_group_of_its_own() -> None:
    remote_class: Any = ray.remote(concurrency_groups={"control": 2})(ReplicaActor)
    methods = remote_class.__ray_metadata__.method_meta
    assert methods.concurrency_group_for_methods == {"control": "control"}
    assert {"generate_group", "start", "serve"} < methods.methods.keys()
