"""The commands that start sandboxes, and what is said where they cannot. None of them is run here."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from configs.sandbox import SandboxBackend, SandboxConfig
from rollout.environments.sandbox.launching import (
    Bubblewrap,
    Container,
    Harbor,
    SandboxUnavailableError,
    check_backend,
    guest_source,
)
from tests.support.paths import ROOT

CONFIG = SandboxConfig(memory_mb=100, disk_mb=8, max_processes=10, cpu_s=3)


def test_a_container_has_no_network_no_rights_and_the_limits_of_the_config() -> None:
    config = replace(CONFIG, backend=SandboxBackend.podman, image="some/image:1")
    with Container(config).launch("some/image:1") as launch:
        words = " ".join(launch.argv[: launch.argv.index("some/image:1")])
    assert words.startswith("podman run --rm -i --network none ") and words.endswith(" --entrypoint python3")
    for option in (
        "--cap-drop ALL",
        "--security-opt no-new-privileges",
        "--user 1000:1000",
        "--read-only",
        "--memory 100m --memory-swap 100m",
        "--pids-limit 11",
        "--tmpfs /work:rw,exec,nosuid,nodev,size=8m,mode=1777",
    ):
        assert f" {option} " in words
    assert launch.argv[-2] == guest_source()
    rlimits = json.loads(launch.argv[-1])["rlimits"]
    assert "RLIMIT_NPROC" not in rlimits, "the kernel counts the user's processes of all containers together"


def test_bubblewrap_shows_an_image_without_what_the_sandbox_has_itself(tmp_path: Path) -> None:
    for name in ("opt", "etc", "tmp", "proc", "dev", "app"):
        (tmp_path / name).mkdir()
    (tmp_path / "bin").symlink_to("usr/bin")
    with Bubblewrap(CONFIG).launch(str(tmp_path)) as launch:
        words = " ".join(launch.argv[: launch.argv.index("python3")])
    shown = f"--symlink usr/bin /bin --ro-bind {tmp_path}/etc /etc --ro-bind {tmp_path}/opt /opt --proc"
    assert shown in words
    assert "--size 8388608 --tmpfs /sandbox" in words and words.index("--tmpfs") < words.index("--remount-ro / ")


def failing(folder: Path, said: str) -> None:
    (folder / "bwrap").write_text(f"#!/bin/sh\necho '{said}' >&2\nexit 1\n")
    (folder / "bwrap").chmod(0o755)
    folder.chmod(0o755)


@pytest.mark.parametrize(
    ("said", "advice"),
    [
        (None, "bwrap is not installed: apt-get install bubblewrap, or set sandbox.backend=docker"),
        ("bwrap: No permissions to create new namespace", "can make no namespaces here: allow it with sysctl user.max"),
        ("bwrap: setting up uid map: Permission denied", "kernel.apparmor_restrict_unprivileged_userns=0"),
        ("bwrap: execvp python3: No such file or directory", "sandbox.image has no python3"),
    ],
)
def test_a_machine_without_sandboxes_says_what_to_install_or_to_set(
    said: str | None, advice: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path_factory.mktemp("bin")
    monkeypatch.setenv("PATH", f"{folder}:/bin" if said else str(folder))
    monkeypatch.setattr("os.geteuid", lambda: 1)  # the folder is ours alone
    if said:
        failing(folder, said)
    with pytest.raises(SandboxUnavailableError) as refusal:
        check_backend(CONFIG)
    assert str(refusal.value).startswith("sandbox.backend=bubblewrap: ") and advice in str(refusal.value)
    assert said is None or said in str(refusal.value)


# -- Harbor ------------------------------------------------------------------------------------------------------------

HARBOR = replace(
    CONFIG,
    backend=SandboxBackend.harbor,
    image="some/image:1",
    harbor_python=sys.executable,
    harbor_environment="folder_environment:FolderEnvironment",
)


@pytest.mark.parametrize(
    ("changes", "version", "said"),
    [
        (
            {"harbor_python": "/no/python"},
            "0.26.0",
            "harbor_python=/no/python must be a Python, 3.12 or later, with",
        ),
        ({}, "", "No module named 'harbor'"),
        ({}, "0.25.9", "Harbor 0.25.9 is too old: 0.26 is needed"),
        ({"harbor_environment": "daytone"}, "0.26.0", "daytone: must be MODULE:CLASS, or one of daytona, docker"),
        ({"harbor_environment": "daytona"}, "1.0.0", "daytona requires DAYTONA_API_KEY to be set"),
        ({"harbor_environment": "no_module:Class"}, "0.26.0", "No module named 'no_module'"),
        ({}, "0.26.0", "missing 1 required keyword-only argument: 'log'"),
        ({"image": "/no/folder", "harbor_args": {"log": "x"}}, "0.26.0", "/no/folder/Dockerfile: no such file"),
    ],
)
def test_harbor_is_refused_with_what_is_wrong_before_any_sandbox_starts(
    changes: dict[str, Any], version: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over a stand-in of Harbor."""
    folders = ("harbor_environment", "harbor_stand_in") if version else ("harbor_environment",)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(str(ROOT / "tests/support" / name) for name in folders))
    monkeypatch.setenv("HARBOR_VERSION", version)
    with pytest.raises(SandboxUnavailableError) as refusal:
        check_backend(replace(HARBOR, **changes))
    assert str(refusal.value).startswith("sandbox.backend=harbor: ") and said in str(refusal.value)


def test_harbors_settings_are_on_no_command_line() -> None:
    with Harbor(replace(HARBOR, harbor_args={"api_key": "secret"})).launch("some/image:1") as launch:
        assert "secret" not in " ".join(launch.argv) and "secret" in launch.options["env"]["SLIPSTREAM_HARBOR"]
