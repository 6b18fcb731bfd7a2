"""Stands in for the commands docker and podman: understands the arguments that `Container` gives, and runs the image's
program in bubblewrap. With a file `broken` beside it, it fails as docker does without its service."""

import argparse
import os
import sys
from pathlib import Path


def main() -> None:
    here = Path(sys.argv[0]).parent
    (here / "calls").open("a").write(repr(sys.argv[1:]) + "\n")
    if (here / "broken").exists():
        sys.exit("Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?")
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=["run"])
    for flag in ("--rm", "-i", "--read-only"):
        parser.add_argument(flag, action="store_true", required=True)
    for name in ("network", "workdir", "shm-size", "cap-drop", "security-opt", "user", "memory", "memory-swap"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--pids-limit", type=int, required=True)
    parser.add_argument("--tmpfs", action="append", required=True)
    parser.add_argument("--entrypoint", required=True)
    parser.add_argument("image")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    asked = parser.parse_args()
    assert asked.network == "none" and asked.cap_drop == "ALL" and asked.image == "python:3.12-slim"
    links = [word for name in ("bin", "lib", "lib64") for word in ("--symlink", f"usr/{name}", f"/{name}")]
    memory = [word for entry in asked.tmpfs for word in ("--tmpfs", entry.partition(":")[0])]
    files = ["--ro-bind", "/usr", "/usr", *links, "--proc", "/proc", "--dev", "/dev", *memory, "--remount-ro", "/"]
    ends = ["--unshare-all", "--as-pid-1", "--die-with-parent", "--uid", "1000", "--gid", "1000", "--chdir", "/"]
    os.execvp("bwrap", ["bwrap", *ends, *files, asked.entrypoint, *asked.arguments])


main()
