"""The program that runs as process 1 of a sandbox: it runs commands, and reads and writes files, for the run outside.

It is sent to the sandbox as text, so it imports only what every Python since 3.9 has, and little of that: it is loaded
at each start. The policy's programs run as the same user. They cannot end process 1, because the kernel keeps signals
of its own sandbox from it, nor look into it, because it is not dumpable. Where they change its limits, which
bubblewrap's filter refuses, no command runs any more.

A request and an answer are each a JSON object after its size, and then so many bytes as the object's "size" says.

For an agent that is a command it takes no requests: it runs this command, with its own streams, and ends with it.

In an environment of Harbor, whose process 1 is another, it runs once for each request (`harbor_guest.py`): it looks
after the processes that it has started itself, and ends all of them with the request.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import stat
import struct
import sys
import time

HEADER = struct.Struct("!I")
LOOK_S = 0.1
"""The seconds between two looks at what the processes use."""
DRAIN_S = 0.2
"""The time for which the output of an ended command is read on, where something that it left behind holds it open."""
END_S = 5.0
PR_SET_DUMPABLE = 4
PR_SET_CHILD_SUBREAPER = 36
CHUNK = 65536
NUM_LIMITS = 16
"""RLIM_NLIMITS, which Python does not have."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE, signal.SIGXFSZ)


class Guest:
    def __init__(self, settings):
        self.settings = settings
        self.statuses = {}
        """The exit statuses of processes that have ended, by their ids."""
        self.broken = None
        """The limit that processes in the background have reached since the last answer."""
        self.files = {}
        """The files in each folder when the command began. More than may be are no reason to end what removes them."""
        self.begun = own_limits()

    # -- requests ------------------------------------------------------------------------------------------------------

    def serve(self):
        incoming = select.poll()
        incoming.register(0, select.POLLIN)
        while True:
            while not incoming.poll(1000 * LOOK_S if processes() else None):
                self.reap()
                limit = self.reached()
                if limit is not None:
                    self.end_processes()
                    self.broken = limit
            self.reap()
            write_all(*self.answer())

    def serve_once(self, request, answer):
        """Answer the request in a file with another file."""
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # no daemon gets away
        for number, path, flags in ((0, request, os.O_RDONLY), (1, answer, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)):
            os.dup2(os.open(path, flags, 0o644), number)
        answered = self.answer()
        self.end_processes()  # which could write another answer
        write_all(*answered)

    def answer(self):
        """Read a request, and return the answer to it."""
        request = json.loads(read_exactly(HEADER.unpack(read_exactly(HEADER.size))[0]))
        content = read_exactly(request.get("size", 0))
        try:
            answer, payload = getattr(self, "do_" + request["do"])(request, content)
        except OSError as error:
            answer, payload = {"error": error.strerror or str(error)}, b""
        return json.dumps({**answer, "size": len(payload)}).encode(), payload

    def do_read(self, request, content):
        # Never a link, and not a pipe, whose other end might never come.
        file = os.open(request["path"], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode):
                return {"error": "is no plain file"}, b""
            if status.st_size > request["most"]:
                return {"error": f"has {status.st_size} bytes, and at most {request['most']} are read"}, b""
            parts = []
            while sum(map(len, parts)) < request["most"]:
                part = os.read(file, CHUNK)
                if not part:
                    break
                parts.append(part)
            return {}, b"".join(parts)
        finally:
            os.close(file)

    def do_write(self, request, content):
        path = request["path"]
        os.makedirs(os.path.dirname(path) or "/", exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        file = os.open(path, flags, request["mode"])
        try:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                return {"error": "is no plain file"}, b""
            os.fchmod(file, request["mode"])
            left = memoryview(content)
            while left:
                left = left[os.write(file, left) :]
        finally:
            os.close(file)
        return {}, b""

    def do_hello(self, request, content):
        return {}, b""

    def do_renew(self, request, content):
        """End all processes and remove all files."""
        if own_limits() != self.begun:
            os._exit(1)  # the next episode gets another sandbox
        self.end_processes()
        self.broken, self.files = None, {}
        for folder in self.settings["writable"]:
            empty(folder)
        self.make_folders()
        return {}, b""

    def do_clear(self, request, content):
        """End all processes, and make some of the folders anew, whatever is in their places."""
        self.end_processes()
        self.broken = None
        for folder in self.settings["folders"]:
            if os.path.basename(folder) in request["names"]:
                if os.path.islink(folder) or os.path.isfile(folder):
                    os.unlink(folder)
                elif os.path.isdir(folder):
                    empty(folder)
        self.make_folders()
        return {}, b""

    def make_folders(self):
        for folder in self.settings["folders"]:
            os.makedirs(folder, exist_ok=True)

    # -- commands ------------------------------------------------------------------------------------------------------

    def do_exec(self, request, content):
        limit, self.broken = self.broken, None
        if own_limits() != self.begun:
            limit = "tampered"
        if limit is not None:
            return {"exit_code": None, "limit": limit, "sizes": [0, 0], "is_cut": False}, b""
        self.statuses.clear()  # of others, which may have had the number that the command gets
        self.files = {folder: num_files(folder) for folder in self.settings["writable"]}
        command = Command(request, content, self.settings)
        try:
            limit = self.watch(command, time.monotonic() + request["timeout_s"])
            command.read()
        finally:
            command.close()
        exit_code = None if limit else self.statuses.get(command.pid)
        self.statuses.clear()
        if exit_code is not None:
            exit_code, limit = ending(exit_code)
        out, err = (bytes(kept) for kept in command.kept.values())
        sizes = [len(out), len(err)]
        return {"exit_code": exit_code, "limit": limit, "sizes": sizes, "is_cut": command.is_cut}, out + err

    def watch(self, command, deadline):
        """Wait for a command to end. Return the limit that it reached; all processes are then ended."""
        drained_by, look_at = None, 0.0
        while True:
            now = time.monotonic()
            if now >= look_at:
                limit = "time" if now >= deadline else self.reached()
                if limit is not None:
                    self.end_processes()
                    return limit
                look_at = min(now + LOOK_S, deadline)
            if command.wait(max(0.0, look_at - now)):
                os._exit(0)  # the run outside is gone
            self.reap()
            if command.pid in self.statuses:
                drained_by = drained_by or time.monotonic() + DRAIN_S
                if not command.open or time.monotonic() >= drained_by:
                    limit = self.reached()
                    if limit is not None:
                        self.end_processes()
                    return limit

    def reached(self):
        """Return the limit that the processes of the sandbox have reached together; None for none."""
        settings = self.settings
        running = processes()
        if len(running) >= settings["max_processes"]:
            return "processes"
        if sum(map(memory, running)) > settings["memory_bytes"]:
            return "memory"
        for folder in settings["writable"]:
            if num_files(folder) > max(settings["max_files"], self.files.get(folder, 0)):
                return "files"
        return None

    def reap(self):
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self.statuses[pid] = status

    def end_processes(self):
        """End every process but this one."""
        until = time.monotonic() + END_S
        while running := processes():
            for process in [-1] if os.getpid() == 1 else map(int, running):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            self.reap()
            if time.monotonic() > until:
                os._exit(1)  # with it, the kernel ends all others
            time.sleep(0.001)


class Command:
    """A command under way, with its input and output."""

    def __init__(self, request, content, settings):
        theirs_in, self.input = os.pipe()
        self.output, theirs_out = os.pipe()
        self.errors, theirs_err = os.pipe()
        self.kept = {self.output: bytearray(), self.errors: bytearray()}
        self.most = request["most"]
        self.is_cut = False
        self.left = memoryview(content)
        self.pid = os.fork()
        if self.pid == 0:
            become(request, (theirs_in, theirs_out, theirs_err), settings)
        for end in (theirs_in, theirs_out, theirs_err):
            os.close(end)
        for end in (self.input, self.output, self.errors):
            os.set_blocking(end, False)
        self.ended = os.pidfd_open(self.pid)
        self.events = select.poll()
        self.open = {self.output, self.errors}
        for end in (*self.open, self.ended):
            self.events.register(end, select.POLLIN)
        self.events.register(self.input, select.POLLOUT)
        self.events.register(0, 0)  # tells of its end only

    def wait(self, seconds):
        """Pass input and output on until the command ends or the time is over. Return whether the run is gone."""
        for end, event in self.events.poll(1000 * seconds):
            if end == 0 and event & (select.POLLHUP | select.POLLERR):
                return True
            if end == self.input:
                self.write()
            elif end == self.ended:
                self.events.unregister(end)
            elif end in self.open:
                self.read_from(end)
        return False

    def write(self):
        try:
            self.left = self.left[os.write(self.input, self.left[:CHUNK]) :] if self.left else self.left
        except BlockingIOError:
            return
        except BrokenPipeError:
            self.left = memoryview(b"")
        if not self.left:
            self.events.unregister(self.input)
            os.close(self.input)
            self.input = -1

    def read_from(self, end):
        """Read what is there, and return whether there was any."""
        try:
            part = os.read(end, CHUNK)
        except BlockingIOError:
            return False
        if not part:
            self.open.discard(end)
            self.events.unregister(end)
            return False
        kept = self.kept[end]
        room = self.most - len(kept)
        self.is_cut = self.is_cut or len(part) > room
        kept += part[: max(0, room)]
        return True

    def read(self):
        """Read what is still in the pipes, which is not more than they hold."""
        for end in tuple(self.open):
            for _ in range(16):
                if not self.read_from(end):
                    break

    def close(self):
        for end in (self.input, self.output, self.errors, self.ended):
            if end >= 0:
                os.close(end)


def become(request, ends, settings):
    """Turn the forked process into the command. Never returns."""
    try:
        os.setsid()
        for number, end in enumerate(ends):
            os.dup2(end, number)
        os.closerange(3, 256)
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        for name, value in settings["rlimits"].items():
            resource.setrlimit(getattr(resource, name), (value, value + 1 if name == "RLIMIT_CPU" else value))
        os.chdir(request["cwd"])
        os.execvpe(request["argv"][0], request["argv"], request["env"])
    except BaseException as error:
        os.write(2, f"{request['argv'][0]}: {error}\n".encode(errors="replace"))
    os._exit(127)


def run_agent(guest, script, argument):
    """Run a command of the shell with the streams of process 1, and end with it: the kernel then ends all that it has
    started. It also ends when the other end of the settings' "control" is closed, since the run outside is gone."""
    agent = guest.settings["agent"]
    os.set_inheritable(agent["control"], False)  # the command may not have it
    send_listener(agent["control"], *agent["address"])
    guest.files = {folder: num_files(folder) for folder in guest.settings["writable"]}
    argv = ["/bin/sh", "-c", script, "sh", argument]
    shell = os.fork()
    if shell == 0:
        become(
            {"argv": argv, "cwd": agent["cwd"], "env": {**os.environ, "PATH": agent["path"]}}, (0, 1, 2), guest.settings
        )
    for stream in (0, 1):  # the command's own are to end with it
        os.dup2(os.open(os.devnull, os.O_RDWR), stream)
    events = select.poll()
    for end in (agent["control"], os.pidfd_open(shell)):
        events.register(end, select.POLLIN)
    limit = None
    while limit is None and shell not in guest.statuses:
        if any(end == agent["control"] for end, _ in events.poll(1000 * LOOK_S)):
            os._exit(1)
        guest.reap()
        limit = guest.reached()
    code = 1
    if limit is None:
        code, limit = ending(guest.statuses[shell])
    if limit is not None:
        guest.end_processes()  # so that these are the last words
        os.write(2, f"[ended: {agent['limits'][limit]}]\n".encode())
    os._exit(1 if code is None else code)


def send_listener(control, host, port):
    """Listen on an address of the sandbox's own loopback, and hand the listener out: the run outside serves it."""
    import socket

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family) as listener, socket.socket(fileno=os.dup(control)) as out:
        socket.send_fds(out, [b"!"], [listener.fileno()])


def ending(status):
    """Return the exit code of a shell for a process that ended so, and the limit that ended it."""
    code = 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
    if code == 128 + signal.SIGXCPU:
        return None, "cpu"
    return code, None


def processes():
    """Return the processes of the sandbox: all but process 1, or, where that is another's, all below this one."""
    names = [name for name in os.listdir("/proc") if name.isdigit() and name != "1"]
    if os.getpid() == 1:
        return names
    children = {}
    for name in names:
        children.setdefault(parent(name), []).append(name)
    below = list(children.get(str(os.getpid()), ()))
    for name in below:  # which grows meanwhile
        below += children.get(name, ())
    return below


def parent(process):
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[1].decode()  # after the name, which may be anything
    except OSError:
        return None


def num_files(folder):
    files = os.statvfs(folder)
    return files.f_files - files.f_ffree


def own_limits():
    """Return what a process of the same user can change of this one."""
    limits = [resource.getrlimit(number) for number in range(NUM_LIMITS)]
    return limits, os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0), os.sched_getaffinity(0)


def memory(process):
    """Return the bytes of a process that are its own, or shared but in no file of the image."""
    try:
        with open(f"/proc/{process}/status", "rb") as file:
            lines = file.read().split(b"\n")
    except OSError:
        return 0
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith((b"RssAnon", b"RssShmem")))


def empty(folder):
    """Remove what is in a folder, and follow no link. Depth is no matter: folders are emptied from a list."""
    folders = [folder]
    with contextlib.suppress(PermissionError):  # in a container it is root's, and open to all
        os.chmod(folder, 0o700)
    while folders:
        inside = []
        for entry in list(os.scandir(folders[-1])):
            if entry.is_dir(follow_symlinks=False):
                inside.append(entry.path)
            else:
                os.unlink(entry.path)
        if inside:
            for path in inside:
                os.chmod(path, 0o700)
            folders += inside
        elif len(folders) > 1:
            os.rmdir(folders.pop())
        else:
            return


def read_exactly(size):
    parts = bytearray()
    while len(parts) < size:
        part = os.read(0, min(CHUNK, size - len(parts)))
        if not part:
            os._exit(0)  # the run outside is gone
        parts += part
    return bytes(parts)


def write_all(answer, payload):
    left = memoryview(HEADER.pack(len(answer)) + answer + payload)
    while left:
        left = left[os.write(1, left) :]


def main():
    settings = json.loads(sys.argv[1])
    if os.getpid() != 1 and "once" not in settings:
        sys.exit("guest.py ends all processes that it sees, so it must be process 1 of a sandbox")
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")  # where memory runs out, sandboxes end first
    except OSError:
        pass
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    guest = Guest(settings)
    guest.make_folders()
    if "agent" in guest.settings:
        run_agent(guest, *sys.argv[2:])
    if "once" in settings:
        guest.serve_once(*settings["once"])
    else:
        guest.serve()


if __name__ == "__main__":
    main()
