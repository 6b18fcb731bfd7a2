"""An environment for Harbor that runs commands in a folder of this machine, with bubblewrap. It shares the processes of
this machine, as some of Harbor's own do. For Harbor itself, and for its stand-in."""

import asyncio
import os
import shutil
from pathlib import Path
from typing import Any

from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities


class FolderEnvironment(BaseEnvironment):
    def __init__(self, *args: Any, log: str, fails_at: str = "", hangs_at: str = "", can_cut: bool = True, **kw: Any):
        """`log`: a file that gets a line for each start and stop."""
        self._log, self._fails_at, self._hangs_at, self._can_cut = Path(log), fails_at, hangs_at, can_cut
        super().__init__(*args, **kw)
        self._root = self.trial_paths.trial_dir / "root"

    @staticmethod
    def type() -> str:
        return "folder"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(disable_internet=self._can_cut)

    @classmethod
    def preflight(cls, kwargs: dict[str, Any] | None = None) -> None:
        print("to stdout, where answers go")

    def _validate_definition(self) -> None:
        image, recipe = self.task_env_config.docker_image, self.environment_dir / "Dockerfile"
        if image is None and not recipe.is_file():
            raise FileNotFoundError(f"{recipe}: no such file")

    async def _told(self, what: str) -> None:
        with self._log.open("a") as log:
            log.write(f"{what} {self.task_env_config.docker_image or self.environment_dir}\n")
        if what == self._fails_at:
            raise RuntimeError(f"the service has no room to {what}")
        if what == self._hangs_at:
            await asyncio.sleep(3600)

    async def start(self, force_build: bool) -> None:
        self._root.mkdir()
        for name in ("bin", "lib", "lib64"):
            (self._root / name).symlink_to(f"usr/{name}")
        await self._told("start")

    async def stop(self, delete: bool) -> None:
        shutil.rmtree(self._root, ignore_errors=True)  # a command that has only begun writes into it
        await self._told("stop")

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        if user is None:
            await self._told("exec")
        binds = (("--bind", self._root, "/"), *(("--ro-bind", path, path) for path in ("/usr", "/etc/alternatives")))
        files = [str(word) for bind in (*binds, ("--bind", "/proc", "/proc"), ("--dev", "/dev")) for word in bind]
        argv = ["bwrap", "--unshare-net", "--die-with-parent", *files, "--chdir", cwd or "/", "/bin/sh", "-c", command]
        process = await asyncio.create_subprocess_exec(
            *argv, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        out, err = await asyncio.wait_for(process.communicate(), timeout_sec)
        return ExecResult(stdout=out.decode(), stderr=err.decode(), return_code=process.returncode or 0)

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        shutil.copy(source_path, f"{self._root}{target_path}")

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        shutil.copy(f"{self._root}{source_path}", target_path)

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        raise NotImplementedError(os.fspath(source_dir))

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        raise NotImplementedError(source_dir)
