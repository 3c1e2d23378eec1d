"""`python without_tiles.py COMMAND …`: as where a filter of system calls refuses a process AMX."""

import ctypes
import os
import struct
import sys

SET_SECCOMP, FILTER, NO_NEW_PRIVILEGES = 22, 2, 38  # of prctl(2)
LOAD, EQUALS, RETURN = 0x20, 0x15, 0x06  # of <linux/bpf_common.h>
NUMBER, ARCHITECTURE, ARGUMENT = 0, 4, 16  # where they are in struct seccomp_data
X86_64, ARCH_PRCTL, REQUEST_PERMISSION = 0xC000003E, 158, 0x1023
ALLOW, FAIL_WITH_EPERM = 0x7FFF0000, 0x00050001
# Code, how many to skip where it is so and where not, and what is compared or returned.
PROGRAM = (
    (LOAD, 0, 0, ARCHITECTURE),
    (EQUALS, 0, 4, X86_64),
    (LOAD, 0, 0, NUMBER),
    (EQUALS, 0, 2, ARCH_PRCTL),
    (LOAD, 0, 0, ARGUMENT),
    (EQUALS, 1, 0, REQUEST_PERMISSION),
    (RETURN, 0, 0, ALLOW),
    (RETURN, 0, 0, FAIL_WITH_EPERM),
)


class Program(ctypes.Structure):
    """struct sock_fprog."""

    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))


def main() -> None:
    """Become the command, under the filter."""
    code = b"".join(struct.pack("HBBI", *instruction) for instruction in PROGRAM)
    program = Program(len(PROGRAM), code)
    prctl = ctypes.CDLL(None).prctl
    assert prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0) == 0
    assert prctl(SET_SECCOMP, FILTER, ctypes.byref(program), 0, 0) == 0
    os.execvp(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
