"""The kernel's calls that a sandbox of bubblewrap refuses, as a program for its filter (seccomp, classic BPF).

They are those by which a program could take memory that belongs to no process, make namespaces in which it has rights,
look into other processes, change their limits and priorities, those of process 1 among them, or reach a network that is
not in a namespace. Refused calls fail with EPERM; clone3 with ENOSYS, as on an older kernel: libraries then use clone,
whose flags a filter can see.
"""

import errno
import platform
import struct
from functools import cache

INSTRUCTION = struct.Struct("=HBBI")
LOAD, JUMP_EQUAL, JUMP_AT_LEAST, JUMP_ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER_AT, ARCHITECTURE_AT, ARGUMENT_AT = 0, 4, 16
"""Places in what the filter reads of a call. The flags of clone are the lower half of its first argument."""
ALLOW, ERROR, KILL = 0x7FFF0000, 0x00050000, 0x80000000
NAMESPACES = 0x7E020080
"""The flags of clone that make a namespace (CLONE_NEW*)."""
X32 = 0x40000000
"""The numbers of a second, obsolete set of calls on x86_64 begin here."""
CLONE3 = 435
AF_UNIX, AF_INET, AF_INET6, AF_NETLINK = 1, 2, 10, 16
NEW_CALLS = (425, 428, 429, 430, 431, 432, 438, 442, 447)
"""Calls with one number everywhere: io_uring_setup, open_tree, move_mount, fsopen, fsconfig, fsmount, pidfd_getfd,
mount_setattr, memfd_secret."""
CALLS = {
    # ptrace, shmget, semget, msgget, mq_open, memfd_create, add_key, request_key, keyctl, mount, umount2, pivot_root,
    # unshare, setns, bpf, userfaultfd, perf_event_open, process_vm_readv, process_vm_writev, open_by_handle_at,
    # migrate_pages, move_pages
    "x86_64": (
        *(101, 29, 64, 68, 240, 319, 248, 249, 250, 165, 166, 155),
        *(272, 308, 321, 323, 298, 310, 311, 304, 256, 279),
    ),
    "aarch64": (
        *(117, 194, 190, 186, 180, 279, 217, 218, 219, 40, 39, 41),
        *(97, 268, 280, 282, 241, 270, 271, 265, 238, 239),
    ),
}
OF_ITSELF = {0: (0,)}
"""A call whose first argument is a process, which must be the caller. 0 stands for it."""
RESTRICTED: dict[str, dict[int, dict[int, tuple[int, ...]]]] = {
    # prlimit64, sched_setparam, sched_setscheduler, sched_setaffinity, sched_setattr; then setpriority (PRIO_PROCESS),
    # ioprio_set (IOPRIO_WHO_PROCESS) and socket
    "x86_64": {
        **dict.fromkeys((302, 142, 144, 203, 314), OF_ITSELF),
        **{141: {0: (0,), 1: (0,)}, 251: {0: (1,), 1: (0,)}, 41: {0: (AF_UNIX, AF_INET, AF_INET6, AF_NETLINK)}},
    },
    "aarch64": {
        **dict.fromkeys((261, 118, 119, 122, 274), OF_ITSELF),
        **{140: {0: (0,), 1: (0,)}, 30: {0: (1,), 1: (0,)}, 198: {0: (AF_UNIX, AF_INET, AF_INET6, AF_NETLINK)}},
    },
}
"""The values that arguments of calls may have, by the calls and the places of the arguments."""
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
CLONE = {"x86_64": 56, "aarch64": 220}


@cache
def filter_program(machine: str = platform.machine()) -> bytes:
    """Return the program for a machine. Raises OSError for one whose calls are not known here."""
    if machine not in CALLS:
        raise OSError(errno.ENOSYS, f"bubblewrap's filter is known for {' and '.join(CALLS)}, and not for {machine}")
    code = [(LOAD, 0, 0, ARCHITECTURE_AT), (JUMP_EQUAL, 1, 0, ARCHITECTURES[machine]), (RETURN, 0, 0, KILL)]
    code += [(LOAD, 0, 0, NUMBER_AT), (JUMP_AT_LEAST, 0, 1, X32), (RETURN, 0, 0, ERROR | errno.ENOSYS)]
    code += [(JUMP_EQUAL, 0, 1, CLONE3), (RETURN, 0, 0, ERROR | errno.ENOSYS)]
    for number in (*CALLS[machine], *NEW_CALLS):
        code += [(JUMP_EQUAL, 0, 1, number), (RETURN, 0, 0, ERROR | errno.EPERM)]
    for number, arguments in RESTRICTED[machine].items():
        checks = [instruction for place, values in arguments.items() for instruction in _one_of(place, values)]
        code += [(JUMP_EQUAL, 0, len(checks) + 1, number), *checks, (RETURN, 0, 0, ALLOW)]
    code += [(JUMP_EQUAL, 0, 3, CLONE[machine]), (LOAD, 0, 0, ARGUMENT_AT), (JUMP_ANY_BIT, 0, 1, NAMESPACES)]
    code += [(RETURN, 0, 0, ERROR | errno.EPERM), (RETURN, 0, 0, ALLOW)]
    return b"".join(INSTRUCTION.pack(*instruction) for instruction in code)


def _one_of(place: int, values: tuple[int, ...]) -> list[tuple[int, int, int, int]]:
    """Return the instructions that refuse a call whose argument has none of the values. The lower half of it counts:
    all these arguments have 32 bits."""
    jumps = [(JUMP_EQUAL, len(values) - number, 0, value) for number, value in enumerate(values)]
    return [(LOAD, 0, 0, ARGUMENT_AT + 8 * place), *jumps, (RETURN, 0, 0, ERROR | errno.EPERM)]
