"""Builds the system call filter of the sandbox: a classic BPF program as in seccomp(2), for bwrap's --seccomp.

Namespaces and rlimits do most of the isolation. The filter closes what they leave open: calls into rarely used parts of
the kernel, memory that no rlimit counts (memfd, System V), sockets of families without a namespace (vsock), and new
namespaces.
"""

import errno
import platform
import struct

from services.reward.scorers.base import FailureReason, ScoringError

# linux/audit.h, and the numbers of asm/unistd_64.h and asm-generic/unistd.h.
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_CLONE = {"x86_64": 56, "aarch64": 220}
_CLONE3 = 435
_DENIED = {
    "x86_64": {
        "shmget": 29, "shmat": 30, "socket": 41, "semget": 64, "msgget": 68, "ptrace": 101, "syslog": 103,
        "personality": 135, "modify_ldt": 154, "pivot_root": 155, "chroot": 161, "acct": 163, "mount": 165,
        "umount2": 166, "swapon": 167, "reboot": 169, "init_module": 175, "delete_module": 176, "quotactl": 179,
        "kexec_load": 246, "add_key": 248, "request_key": 249, "keyctl": 250, "vmsplice": 278, "unshare": 272,
        "perf_event_open": 298, "fanotify_init": 300, "name_to_handle_at": 303, "open_by_handle_at": 304,
        "setns": 308, "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312, "finit_module": 313,
        "memfd_create": 319, "kexec_file_load": 320, "bpf": 321, "userfaultfd": 323, "mq_open": 240,
    },
    "aarch64": {
        "shmget": 194, "shmat": 196, "socket": 198, "semget": 190, "msgget": 186, "ptrace": 117, "syslog": 116,
        "personality": 92, "pivot_root": 41, "chroot": 51, "acct": 89, "mount": 40,
        "umount2": 39, "swapon": 224, "reboot": 142, "init_module": 105, "delete_module": 106, "quotactl": 60,
        "kexec_load": 104, "add_key": 217, "request_key": 218, "keyctl": 219, "vmsplice": 75, "unshare": 97,
        "perf_event_open": 241, "fanotify_init": 262, "name_to_handle_at": 264, "open_by_handle_at": 265,
        "setns": 268, "process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272, "finit_module": 273,
        "memfd_create": 279, "kexec_file_load": 294, "bpf": 280, "userfaultfd": 282, "mq_open": 180,
    },
}  # fmt: skip
# Numbers from 424 on are the same on all architectures: io_uring, open_tree to fspick, pidfd_getfd, mount_setattr,
# memfd_secret.
_DENIED_EVERYWHERE = (425, 426, 427, 428, 429, 430, 431, 432, 433, 438, 442, 443, 447)

_CLONE_NEW = 0x7E020000  # every CLONE_NEW* flag of clone: user, pid, net, ipc, uts, cgroup, mount
_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_AT, _ARCHITECTURE_AT, _FIRST_ARGUMENT_AT = 0, 4, 16  # struct seccomp_data
_KILL, _ALLOW, _ERRNO = 0x80000000, 0x7FFF0000, 0x00050000
_X32 = 0x40000000


def filter_program() -> bytes:
    """Returns the filter for this machine.

    Raises:
        ScoringError: There is no filter for the machine's architecture.
    """
    machine = platform.machine()
    if machine not in _DENIED:
        raise ScoringError(FailureReason.ERROR, f"no system call filter for {machine}: use x86_64 or aarch64")
    denied = (*_DENIED[machine].values(), *_DENIED_EVERYWHERE)
    instructions = [
        (_LOAD, 0, 0, _ARCHITECTURE_AT),
        (_JUMP_EQUAL, 1, 0, _AUDIT_ARCH[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER_AT),
        (_JUMP_AT_LEAST, 0, 1, _X32),
        (_RETURN, 0, 0, _KILL),
        # clone3 has its flags in memory, which a filter cannot read. With ENOSYS, libc falls back to clone.
        *_when(_CLONE3, errno.ENOSYS),
        *(step for number in denied for step in _when(number, errno.EPERM)),
        (_JUMP_EQUAL, 0, 3, _CLONE[machine]),
        (_LOAD, 0, 0, _FIRST_ARGUMENT_AT),
        (_JUMP_ANY_BIT, 0, 1, _CLONE_NEW),
        (_RETURN, 0, 0, _ERRNO | errno.EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in instructions)


def _when(number: int, error: int) -> list[tuple[int, int, int, int]]:
    return [(_JUMP_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERRNO | error)]
