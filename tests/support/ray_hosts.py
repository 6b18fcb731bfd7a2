"""Ray and runs on the hosts of a bed."""

import contextlib
import re
import time
from collections.abc import Iterator
from pathlib import Path

from tests.support.bed import SHARED, Bed, Host
from tests.support.whole_runs import RAYS_OWN_AGENTS, SIZES, Run, command_of
from trainer.tiny.model import build_tokenizer, save_tiny_model

PORT, JOBS_PORT = 6379, 8265
OF_A_RUN = re.compile(r"^(ray::(?!IDLE)[A-Za-z]|VLLM::|wandb)")
"""The command lines of processes that a run starts."""
LEAN = {
    "RAY_enable_metrics_collection": "0",
    "RAY_task_events_report_interval_ms": "0",
    "RAY_prestart_worker_first_driver": "0",
}
"""What Ray leaves out: three nodes of it share the cores of one machine."""
START_DEADLINE_S = 900
"""Ray on three hosts, and two engines that load beside it on cores that others may use."""
LEFT_DEADLINE_S = 90.0
"""Ray ends an actor whose driver is gone a while after it has noticed."""


def start_ray(host: Host, head: Host, num_cpus: int, *, takes_jobs: bool = False, **environment: str) -> None:
    """Start Ray as a user does, on the head itself first, where `takes_jobs` starts its job server."""
    where = ["--head", f"--port={PORT}", f"--include-dashboard={'true' if takes_jobs else 'false'}"]
    if host is not head:
        where = [f"--address={head.address}:{PORT}"]
    if takes_jobs:
        where += ["--dashboard-host=0.0.0.0", f"--dashboard-port={JOBS_PORT}"]
    host.run(
        *("ray", "start", *where, f"--node-ip-address={host.address}", f"--num-cpus={num_cpus}"),
        *("--object-store-memory=100000000", "--disable-usage-stats"),
        timeout_s=300,
        **(LEAN | environment),
    )


@contextlib.contextmanager
def training(made: Bed, host: Host, folder: Path, *overrides: str, **environment: str) -> Iterator[Run]:
    """Train with the driver on this host and the run in the folder that all hosts share. `folder`: takes the output."""
    with running(made, host, folder, *train_command(made, *overrides), **environment) as run:
        yield run


@contextlib.contextmanager
def submitted(made: Bed, head: Host, folder: Path, working_dir: Path, *overrides: str) -> Iterator[Run]:
    """Submit the same as a job, with what is in a folder of the head's own disk. The process ends with the job."""
    submit = ("python", "-m", "ray.scripts.scripts", "job", "submit", f"--address=http://{head.address}:{JOBS_PORT}")
    command = (*submit, f"--working-dir={working_dir}", "--", *train_command(made, *overrides))
    with running(made, head, folder, *command) as run:
        yield run


@contextlib.contextmanager
def running(made: Bed, host: Host, folder: Path, *command: str, **environment: str) -> Iterator[Run]:
    output = folder / "output.txt"
    with host.running(output, *command, **environment) as process:
        yield Run(process, made.shared / "run", output, {}, {})


def train_command(made: Bed, *overrides: str) -> list[str]:
    """Return the command that trains the model that all hosts share, an untrained one where there is none yet."""
    model = made.shared / "model"
    if not model.exists():
        corpus = ["Question: Tom has 3 pens and buys 4 more.\nAnswer: 3+4=7\n#### 7"] * 4
        save_tiny_model(model, build_tokenizer(corpus), seed=0)
    return [
        *("python", "-m", "scripts.train", "model=tiny", *SIZES, "model.kind=hf", f"model.path={SHARED}/model"),
        *("ray.address=auto", "trainer.eval_every=0", "wandb.mode=disabled"),
        *("plain_console=true", f"hydra.run.dir={SHARED}/run", *overrides),
    ]


def places(run_dir: Path) -> dict[str, str]:
    """Return the host of each process of a run, by its name."""
    logs = {path.stem: path.read_text(errors="replace") for path in (run_dir / "logs").glob("*.log")}
    found = {name: re.search(rf"^{name} is process \d+ on (\S+)", text, re.MULTILINE) for name, text in logs.items()}
    return {name: match[1] for name, match in found.items() if match is not None}


def hosts_of_agent_workers(run_dir: Path) -> set[str]:
    """Return the names of the hosts."""
    return {host for name, host in places(run_dir).items() if name.startswith("agent-worker")}


def left_behind(host: Host) -> list[str]:
    """Return what a run left on the host when Ray has had its time: processes, weights and sockets."""
    ends = time.monotonic() + LEFT_DEADLINE_S
    while left := _left(host):
        if time.monotonic() > ends:
            break
        time.sleep(0.5)
    return left


def _left(host: Host) -> list[str]:
    lines = [line for process in host.processes() if OF_A_RUN.match(line := command_of(process))]
    files = [*host.path("/dev/shm").glob("slipstream-*"), *host.path("/tmp").glob("slipstream-*")]
    return [line for line in lines if not line.startswith(RAYS_OWN_AGENTS)] + [str(path) for path in files]
