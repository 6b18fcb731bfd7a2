# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""The program that stands in for process 1 of a sandbox which an environment of Harbor makes. It runs with the Python
that has Harbor, and imports nothing of this package.

It hands each request that it reads from stdin to the sandbox as a file, runs `guest.py` there once, and writes the
answer, which comes back as a file, to stdout. So a request means the same in every sandbox. The sandbox starts with the
first request. It is stopped when stdin ends, which it also does when the run is killed, or on SIGTERM.
"""

import asyncio
import json
import math
import os
import shlex
import signal
import struct
import sys
import tempfile
import threading
import uuid
from pathlib import Path

HEADER = struct.Struct("!I")
SETTINGS = "SLIPSTREAM_HARBOR"
"""The environment variable with the settings: others can read a command line."""
OLDEST = (0, 26)
"""The oldest version of Harbor with all that is used here."""
FOLDER = "/slipstream"
"""The folder of a sandbox for what is ours."""
GUEST, REQUEST, ANSWER = (f"{FOLDER}/{name}" for name in ("guest.py", "request", "answer"))
TAMPERED = json.dumps({"exit_code": None, "limit": "tampered", "sizes": [0, 0], "is_cut": False, "size": 0}).encode()


def make_environment(settings, folder):
    """Return an environment of Harbor that has not started. It is refused here where it lacks credentials or packages,
    or cannot do without a network."""
    import harbor
    from harbor.environments.factory import EnvironmentFactory
    from harbor.models.task.config import EnvironmentConfig as TaskEnvironment
    from harbor.models.task.config import NetworkMode, NetworkPolicy
    from harbor.models.trial.config import EnvironmentConfig
    from harbor.models.trial.paths import TrialPaths

    name, image, args = settings["environment"], settings["image"], settings["args"]
    if tuple(map(int, harbor.__version__.split(".")[:2])) < OLDEST:
        sys.exit(f"Harbor {harbor.__version__} is too old: {'.'.join(map(str, OLDEST))} is needed")
    sys.stderr.write(f"Harbor {harbor.__version__} on Python {sys.version.split()[0]}: {name}\n")
    names = EnvironmentFactory.registered_names()
    if ":" not in name and name not in names:
        sys.exit(f"sandbox.harbor_environment={name}: must be MODULE:CLASS, or one of {', '.join(names)}")
    fields = {key: value for key, value in args.items() if key in EnvironmentConfig.model_fields}
    kwargs = {key: value for key, value in args.items() if key not in fields}
    config = EnvironmentConfig(**{"import_path" if ":" in name else "type": name}, **fields, kwargs=kwargs)
    EnvironmentFactory.run_preflight(type=config.type, import_path=config.import_path, kwargs=config.kwargs)
    empty, paths, is_folder = folder / "empty", TrialPaths(trial_dir=folder / "trial"), os.path.isabs(image)
    empty.mkdir()
    paths.mkdir()
    return EnvironmentFactory.create_environment_from_config(
        config=config,
        environment_dir=Path(image) if is_folder else empty,
        environment_name="slipstream",
        session_id=f"slipstream-{uuid.uuid4().hex}",
        trial_paths=paths,
        task_env_config=TaskEnvironment(docker_image=None if is_folder else image),
        network_policy=NetworkPolicy(network_mode=NetworkMode.NO_NETWORK),
    )


class Relay:
    """Hands requests to a sandbox, one at a time."""

    def __init__(self, environment, settings, folder):
        self.environment, self.settings, self.folder = environment, settings, folder
        self.has_begun = False
        self.is_tampered = False
        guest = json.dumps({**settings["guest"], "once": [REQUEST, ANSWER]})
        self.command = f"rm -f {ANSWER}; exec python3 -I -S {GUEST} {shlex.quote(guest)}"

    async def start(self):
        self.has_begun = True
        await self.environment.start(force_build=False)
        made = await self.environment.ensure_dirs([FOLDER, *self.settings["guest"]["folders"]])
        if made.return_code != 0:
            raise RuntimeError(f"no folders can be made at the top of the sandbox: {made.stderr or made.stdout}")
        await self.upload(self.settings["source"].encode(), GUEST)

    async def answer(self, frame):
        """Return the sandbox's answer to a request, each with its header."""
        request = json.loads(frame[HEADER.size : HEADER.size + HEADER.unpack(frame[: HEADER.size])[0]])
        if not self.has_begun:
            await self.start()
        if self.is_tampered and request["do"] == "exec":
            return HEADER.pack(len(TAMPERED)) + TAMPERED
        await self.upload(frame, REQUEST)
        timeout_s = request.get("timeout_s", 0) + self.settings["answer_timeout_s"]
        done = await self.environment.exec(self.command, cwd="/", timeout_sec=math.ceil(timeout_s))
        if done.return_code == 0:
            file = self.folder / "answer"
            file.unlink(missing_ok=True)
            await self.environment.download_file(ANSWER, file)
            return file.read_bytes()
        if request["do"] != "exec" or done.return_code == 127:
            said = (done.stderr or done.stdout or "").strip()
            raise RuntimeError(f"the sandbox does not answer (exit code {done.return_code}): {said}")
        self.is_tampered = True  # a command has ended the program that looks after it
        return await self.answer(frame)

    async def upload(self, content, path):
        file = self.folder / "upload"
        file.write_bytes(content)
        file.chmod(0o644)  # its mode may go with it, and commands may be another user's
        await self.environment.upload_file(file, path)

    async def stop(self):
        if not self.has_begun:
            return
        seconds = self.settings["answer_timeout_s"]
        try:
            async with asyncio.timeout(seconds):
                await self.environment.stop(delete=True)
        except TimeoutError as error:
            raise TimeoutError(f"the environment did not stop within sandbox.answer_timeout_s={seconds:g}") from error


def read_exactly(size):
    """Return so many bytes of stdin; fewer at its end."""
    parts = bytearray()
    while len(parts) < size and (part := os.read(0, min(65536, size - len(parts)))):
        parts += part
    return bytes(parts)


def read_frame():
    """Return a request with its header and content; None at the end of stdin."""
    header = read_exactly(HEADER.size)
    body = read_exactly(HEADER.unpack(header)[0]) if len(header) == HEADER.size else b""
    return header + body + read_exactly(json.loads(body)["size"]) if body else None


async def serve(relay, answers):
    """Answer requests until stdin ends, whatever is under way then."""
    loop, frames = asyncio.get_running_loop(), asyncio.Queue()

    def read():
        while frame := read_frame():
            loop.call_soon_threadsafe(frames.put_nowait, frame)
        loop.call_soon_threadsafe(frames.put_nowait, None)

    loop.add_signal_handler(signal.SIGTERM, frames.put_nowait, None)
    threading.Thread(target=read, daemon=True).start()
    frame = await frames.get()
    try:
        while frame is not None:
            answering, following = asyncio.ensure_future(relay.answer(frame)), asyncio.ensure_future(frames.get())
            await asyncio.wait({answering, following}, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():  # a request follows only after an answer, so this is the end
                answering.cancel()
                await asyncio.wait({answering}, timeout=relay.settings["answer_timeout_s"])
                return
            answers.write(answering.result())
            answers.flush()
            frame = await following
    finally:
        await relay.stop()


def main():
    settings = json.loads(os.environ.pop(SETTINGS))
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no answer
    with tempfile.TemporaryDirectory(prefix="slipstream-harbor-") as name:
        try:
            asyncio.run(serve(Relay(make_environment(settings, Path(name)), settings, Path(name)), answers))
        except Exception as error:
            sys.exit(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
