"""What Ray makes of the actor of a replica."""

from typing import Any

import ray

from rollout.replica.replica_group import ReplicaActor

CONTROL = ("tag_loaded", "pause", "resume", "abort", "status", "stage", "commit", "receive", "progress", "stats")


def test_ray_runs_every_control_call_in_a_group_of_its_own() -> None:
    remote_class: Any = ray.remote(concurrency_groups={"control": 2})(ReplicaActor)
    methods = remote_class.__ray_metadata__.method_meta
    assert methods.concurrency_group_for_methods == dict.fromkeys((*CONTROL, "wait_dead"), "control")
    assert {"generate_group", "start", "serve"} < methods.methods.keys()
