"""The kernel's calls that a sandbox of bubblewrap refuses, as a program for its filter (seccomp, classic BPF).

They are those by which a program could take memory that belongs to no process, make namespaces in which it has rights,
or look into other processes. Refused calls fail with EPERM; clone3 with ENOSYS, as on an older kernel: libraries then
use clone, whose flags a filter can see.
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
NEW_CALLS = (425, 428, 429, 430, 431, 432, 438, 442, 447)
"""Calls with one number everywhere: io_uring_setup, open_tree, move_mount, fsopen, fsconfig, fsmount, pidfd_getfd,
mount_setattr, memfd_secret."""
CALLS = {
    # ptrace, shmget, semget, msgget, mq_open, memfd_create, add_key, request_key, keyctl, mount, umount2, pivot_root,
    # unshare, setns, bpf, userfaultfd, perf_event_open, process_vm_readv, process_vm_writev, open_by_handle_at
    "x86_64": (
        *(101, 29, 64, 68, 240, 319, 248, 249, 250, 165, 166, 155),
        *(272, 308, 321, 323, 298, 310, 311, 304),
    ),
    "aarch64": (
        *(117, 194, 190, 186, 180, 279, 217, 218, 219, 40, 39, 41),
        *(97, 268, 280, 282, 241, 270, 271, 265),
    ),
}
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
    code += [(JUMP_EQUAL, 0, 3, CLONE[machine]), (LOAD, 0, 0, ARGUMENT_AT), (JUMP_ANY_BIT, 0, 1, NAMESPACES)]
    code += [(RETURN, 0, 0, ERROR | errno.EPERM), (RETURN, 0, 0, ALLOW)]
    return b"".join(INSTRUCTION.pack(*instruction) for instruction in code)
