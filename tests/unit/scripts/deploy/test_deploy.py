"""The files in scripts/deploy do what they say: each is run, with stand-ins for what is not on this machine."""

import json
import re
import shlex
import signal
import socket
import subprocess
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from configs.cli.overrides import check_overrides
from scripts.slipstream import COMMANDS
from tests.support.install_stubs import PYTHON
from tests.support.paths import ROOT

DEPLOY = ROOT / "scripts" / "deploy"
PACKAGES = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"][
    "packages"
]


def run(command: list[str | Path], **keys: Any) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, **keys)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def stand_in(path: Path, script: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(script)
    path.chmod(0o755)


@pytest.mark.parametrize("script", sorted(DEPLOY.glob("*.sh")), ids=lambda script: script.name)
def test_the_scripts_are_shell_and_can_be_run(script: Path) -> None:
    run(["bash", "-n", script])
    assert script.stat().st_mode & 0o111


# -- Docker ------------------------------------------------------------------------------------------------------------


def instructions() -> list[tuple[str, str]]:
    lines = re.sub(r"^#.*\n", "", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in lines.splitlines())]


def test_every_line_of_the_dockerfile_works_in_its_order(tmp_path: Path) -> None:
    """Each RUN is run in a folder that stands for the root, with a pip and an apt-get that install nothing."""
    for name in ("apt-get", "python3"):
        stand_in(tmp_path / "bin" / name, PYTHON.replace(">>calls.txt", f">>{tmp_path}/{name}.txt"))
    (tmp_path / "etc/profile.d").mkdir(parents=True)
    environment = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "BREAKS": ""}
    folder = tmp_path
    for word, rest in instructions():
        match word:
            case "ARG":
                environment |= [rest.split("=")]
            case "WORKDIR":
                folder = tmp_path / rest.lstrip("/")
                folder.mkdir(parents=True)
            case "COPY" if rest != ". .":
                *sources, target = rest.split()
                assert not set(sources) & set((ROOT / ".dockerignore").read_text().split())
                (folder / target).parent.mkdir(parents=True, exist_ok=True)
                run(["cp", *(ROOT / source for source in sources), folder / target])
            case "RUN":
                run(["bash", "-ec", re.sub(r"(?<= )/(?=\w)", f"{tmp_path}/", rest)], cwd=folder, env=environment)
            case _:
                assert word in ("FROM", "COPY", "ENV")
    assert [line.split()[0] for line in (tmp_path / "apt-get.txt").read_text().splitlines()] == ["update", "install"]
    assert " -e .[gpu,cluster]\n" in (tmp_path / "python3.txt").read_text()
    assert any((folder / package / "__init__.py").exists() for package in PACKAGES), "the install sees a package"
    profile = (tmp_path / "etc/profile.d/slipstream.sh").read_text()
    assert ("ENV", profile.strip()) in instructions() and profile.startswith("PATH=/opt/slipstream/.venv/bin:")
    assert ".venv" in (ROOT / ".dockerignore").read_text().split(), "it would replace the one that was installed"


# -- Kubernetes --------------------------------------------------------------------------------------------------------


def only(required: str, **properties: Any) -> dict[str, Any]:
    """An object with these keys and no others, so that a word that is spelled wrongly is an error."""
    keys = {"type": "object", "properties": properties, "additionalProperties": False}
    return keys | {"required": required.split()}


TEXT, COUNT = {"type": "string"}, {"type": "integer", "minimum": 0}
TEXTS = {"type": "object", "additionalProperties": TEXT}
AMOUNTS = {"type": "object", "additionalProperties": {"type": "string", "pattern": r"^\d+([EPTGMk]i?|m)?$"}}
ALL_TEXTS = {"type": "array", "items": TEXT, "minItems": 1}


def listed(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": item, "minItems": 1}


CONTAINER = only(
    "name image",
    name=TEXT,
    image=TEXT,
    lifecycle=only("", preStop=only("exec", exec=only("command", command=ALL_TEXTS))),
    resources=only("", requests=AMOUNTS, limits=AMOUNTS),
    volumeMounts=listed(only("name mountPath", name=TEXT, mountPath=TEXT)),
)
VOLUME = only("name", name=TEXT, persistentVolumeClaim=only("claimName", claimName=TEXT))
POD = only("containers", terminationGracePeriodSeconds=COUNT, containers=listed(CONTAINER), volumes=listed(VOLUME))
GROUP: dict[str, Any] = {"rayStartParams": TEXTS, "template": only("spec", spec=POD)}
COUNTS = {name: COUNT for name in ("replicas", "minReplicas", "maxReplicas")}
WORKERS = only("groupName minReplicas maxReplicas template", groupName=TEXT, **COUNTS, **GROUP)
CLUSTER = only(
    "headGroupSpec", rayVersion=TEXT, headGroupSpec=only("template", **GROUP), workerGroupSpecs=listed(WORKERS)
)
RAY_JOB = only(
    "apiVersion kind metadata spec",
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayJob"},
    metadata=only("name", name={"type": "string", "pattern": "^[a-z][a-z0-9-]{0,46}$"}),
    spec=only(
        "rayClusterSpec",
        entrypoint=TEXT,
        backoffLimit=COUNT,
        shutdownAfterJobFinishes={"type": "boolean"},
        ttlSecondsAfterFinished=COUNT,
        rayClusterSpec=CLUSTER,
    ),
)
"""What the manifest uses of the schema of KubeRay 1.7 (ray.io_rayjobs.yaml), and of that of a pod."""


@pytest.fixture(scope="module")
def job() -> dict[str, Any]:
    return yaml.safe_load((DEPLOY / "rayjob.yaml").read_text())


def test_the_manifest_has_the_keys_and_types_of_a_ray_job(job: dict[str, Any]) -> None:
    jsonschema.validate(job, RAY_JOB)
    wrong = json.loads(json.dumps(job).replace("minReplicas", "minReplica"))
    with pytest.raises(jsonschema.ValidationError, match="minReplica"):
        jsonschema.validate(wrong, RAY_JOB)


def test_the_manifest_names_the_pinned_ray_a_command_and_a_disk_that_all_pods_have(job: dict[str, Any]) -> None:
    cluster = job["spec"]["rayClusterSpec"]
    assert f"ray=={cluster['rayVersion']}\n" in (ROOT / "constraints.txt").read_text()
    program, command, *overrides = shlex.split(job["spec"]["entrypoint"])
    assert program == "slipstream" and command in COMMANDS and "resume=auto" in overrides
    check_overrides([word for word in overrides if not word.startswith("hydra.")])
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    for group in groups:
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"]: "/shared" for volume in pod["volumes"]}
    keys = dict(word.split("=", 1) for word in overrides)
    assert keys["hydra.run.dir"].startswith("/shared/")
    needed = int(keys["trainer.num_ranks"]) + int(keys["rollout.num_replicas"])
    (workers,) = cluster["workerGroupSpecs"]
    (container,) = workers["template"]["spec"]["containers"]
    assert workers["replicas"] * int(container["resources"]["limits"]["nvidia.com/gpu"]) == needed


def test_before_the_head_stops_the_run_is_told_and_waited_for(job: dict[str, Any], tmp_path: Path) -> None:
    pod = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    program, option, script = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    assert "/shared/runs/slipstream/driver.lock" in script and "hydra.run.dir=/shared/runs/slipstream " in (
        job["spec"]["entrypoint"] + " "
    )
    lock = tmp_path / "driver.lock"
    hook = [program, option, script.replace("/shared/runs/slipstream/driver.lock", str(lock))]
    for ends_by in (f": >{lock}", "kill -9 $$"):  # in order, and killed with its name in the lock
        driver = f"trap '{ends_by}; exit' USR1; echo ready; while :; do sleep 0.1; done"
        with subprocess.Popen(["bash", "-c", driver], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            holder = {"boot_id": "", "pid": process.pid, "started": 1.5, "since": "2026"}
            lock.write_text(json.dumps({"host": "another-pod", **holder}))
            run(hook)
            assert process.poll() is None, "the process with this id is not the run"
            lock.write_text(json.dumps({"host": socket.gethostname(), **holder}))
            started = time.monotonic()
            with ThreadPoolExecutor() as pool:  # a process that nobody waits for seems to be there
                hooked = pool.submit(run, hook)
                assert process.wait(30) == (0 if "lock" in ends_by else -signal.SIGKILL)
                hooked.result(30)
            assert time.monotonic() - started < 60
    lock.write_text("")
    run(hook)  # no run, no wait


# -- ssh ---------------------------------------------------------------------------------------------------------------


def test_ray_is_started_on_the_first_host_and_joined_from_the_others(tmp_path: Path) -> None:
    stand_in(tmp_path / "bin/ssh", f'#!/bin/sh\necho "$3" >>{tmp_path}/hosts.txt\nexec sh -c "$4"\n')
    checkout = tmp_path / "a checkout"
    stand_in(checkout / ".venv/bin/ray", f'#!/bin/sh\necho "$@" >>{tmp_path}/ray.txt\n')
    keys: dict[str, Any] = {"cwd": checkout, "env": {"PATH": f"{tmp_path}/bin:/usr/bin:/bin"}}
    run([DEPLOY / "ssh.sh", "10.0.0.1", "10.0.0.2", "10.0.0.3"], **keys)
    run([DEPLOY / "ssh.sh", "stop", "10.0.0.1", "10.0.0.2"], **keys)
    hosts = (tmp_path / "hosts.txt").read_text().split()
    assert [host[-1] for host in hosts] == ["1", "2", "3", "1", "2"]
    assert (tmp_path / "ray.txt").read_text().splitlines() == [
        "start --head --port=6379 --node-ip-address=10.0.0.1 --disable-usage-stats",
        "start --address=10.0.0.1:6379 --node-ip-address=10.0.0.2 --disable-usage-stats",
        "start --address=10.0.0.1:6379 --node-ip-address=10.0.0.3 --disable-usage-stats",
        *("stop", "stop"),
    ]
