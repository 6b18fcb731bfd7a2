"""The filter of sandboxes, run on calls as the kernel runs it."""

import errno

import pytest

from rollout.environments.sandbox.seccomp import (
    ALLOW,
    ARCHITECTURES,
    CALLS,
    CLONE,
    CLONE3,
    ERROR,
    INSTRUCTION,
    JUMP_ANY_BIT,
    JUMP_AT_LEAST,
    JUMP_EQUAL,
    KILL,
    LOAD,
    NEW_CALLS,
    RESTRICTED,
    RETURN,
    filter_program,
)

REFUSED = ERROR | errno.EPERM
CLONE_NEWUSER, CLONE_THREAD = 0x10000000, 0x00010000


def judged(machine: str, number: int, *arguments: int, architecture: int | None = None) -> int:
    """Return what the filter says of a call. Arguments that are not named are 0."""
    read = {0: number, 4: ARCHITECTURES[machine] if architecture is None else architecture}
    read |= {16 + 8 * place: value for place, value in enumerate((*arguments, *[0] * (6 - len(arguments))))}
    place, value = 0, 0
    code = list(INSTRUCTION.iter_unpack(filter_program(machine)))
    holds = {
        JUMP_EQUAL: lambda operand: value == operand,
        JUMP_AT_LEAST: lambda operand: value >= operand,
        JUMP_ANY_BIT: lambda operand: bool(value & operand),
    }
    while True:
        kind, if_true, if_false, operand = code[place]
        place += 1
        if kind == RETURN:
            return operand
        if kind == LOAD:
            value = read[operand]
        else:
            place += if_true if holds[kind](operand) else if_false


@pytest.mark.parametrize("machine", CALLS)
def test_only_the_calls_on_the_list_are_refused(machine: str) -> None:
    allowed = {
        number: [min(values) for values in arguments.values()] for number, arguments in RESTRICTED[machine].items()
    }
    answers = {number: judged(machine, number, *allowed.get(number, ())) for number in range(512)}
    assert {number for number in answers if answers[number] == REFUSED} == {*CALLS[machine], *NEW_CALLS}
    assert set(answers.values()) == {REFUSED, ALLOW, ERROR | errno.ENOSYS}
    assert judged(machine, CLONE3) == ERROR | errno.ENOSYS


@pytest.mark.parametrize("machine", CALLS)
def test_calls_that_are_for_itself_are_refused_for_another_process(machine: str) -> None:
    prlimit, setpriority, ioprio_set, socket = {"x86_64": (302, 141, 251, 41), "aarch64": (261, 140, 30, 198)}[machine]
    assert judged(machine, prlimit, 0, 7) == ALLOW and judged(machine, prlimit, 1, 7) == REFUSED
    for call, process in ((setpriority, 0), (ioprio_set, 1)):
        assert judged(machine, call, process, 0, 5) == ALLOW
        assert {judged(machine, call, *other) for other in ((process, 1), (2, 0), (2, 1000))} == {REFUSED}
    internet, netlink, vsock = 2, 16, 40
    assert [judged(machine, socket, family) for family in (1, internet, netlink, vsock)] == [ALLOW] * 3 + [REFUSED]


@pytest.mark.parametrize("machine", CALLS)
def test_a_process_may_be_made_and_a_namespace_not(machine: str) -> None:
    assert judged(machine, CLONE[machine], CLONE_THREAD) == ALLOW
    assert judged(machine, CLONE[machine], CLONE_THREAD | CLONE_NEWUSER) == REFUSED


def test_the_calls_of_another_machine_and_a_second_set_of_calls_are_no_way_around() -> None:
    assert judged("x86_64", 39, architecture=0x40000003) == KILL, "i386"
    assert judged("x86_64", 0x40000000 | 319) == ERROR | errno.ENOSYS, "x32"


def test_a_machine_whose_calls_are_not_known_is_refused() -> None:
    with pytest.raises(OSError, match="is known for x86_64 and aarch64, and not for riscv64"):
        filter_program("riscv64")
