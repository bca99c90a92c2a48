"""The second wall: system calls that no command needs are refused in every sandbox, before the kernel looks at them.

The list is Flatpak's for programs under development (debuggers work), with io_uring, bpf and userfaultfd. What is
missing in older kernels too is "not implemented", so that programs take their other way; the rest is "not permitted".
In a session nothing becomes setuid or setgid: outside of it, another user could execute a file of the workspace.
Folders may well be setgid, and programs give them that mode (git, tar, cp, chmod in a folder that has it), but a filter
cannot tell them from files: a change to such a mode is ignored, because refused it would end those programs.
"""

from __future__ import annotations

import errno
import functools
import os
import platform
import struct

from openhands_rl_plugin.core.files import temporary_folder

# By machine: the kernel's number of its calls, and the column below. Others have no filter.
_MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
_REFUSED = {
    **{"acct": (163, 89), "add_key": (248, 217), "bpf": (321, 280), "delete_module": (176, 106), "uselib": (134, None)},
    **{"fanotify_init": (300, 262), "finit_module": (313, 273), "get_mempolicy": (239, 236), "init_module": (175, 105)},
    **{"ioperm": (173, None), "iopl": (172, None), "kexec_file_load": (320, 294), "kexec_load": (246, 104)},
    **{"keyctl": (250, 219), "lookup_dcookie": (212, 18), "mbind": (237, 235), "migrate_pages": (256, 238)},
    **{"modify_ldt": (154, None), "mount": (165, 40), "move_pages": (279, 239), "open_by_handle_at": (304, 265)},
    **{"perf_event_open": (298, 241), "pivot_root": (155, 41), "quotactl": (179, 60), "quotactl_fd": (443, 443)},
    **{"reboot": (169, 142), "request_key": (249, 218), "set_mempolicy": (238, 237), "setns": (308, 268)},
    **{"settimeofday": (164, 170), "swapoff": (168, 225), "swapon": (167, 224), "syslog": (103, 116)},
    **{"umount2": (166, 39), "unshare": (272, 97), "userfaultfd": (323, 282), "vhangup": (153, 58)},
}
_MISSING = {
    # Their flags and modes lie in memory, where a filter cannot look.
    **{"clone3": (435, 435), "openat2": (437, 437)},
    **{"fsconfig": (431, 431), "fsmount": (432, 432), "fsopen": (430, 430), "fspick": (433, 433)},
    **{"io_uring_enter": (426, 426), "io_uring_register": (427, 427), "io_uring_setup": (425, 425)},
    **{"mount_setattr": (442, 442), "move_mount": (429, 429), "open_tree": (428, 428)},
}
_CLONE, _IOCTL, _SOCKET = (56, 220), (16, 29), (41, 198)
# By which argument is a mode; those that open have it behind their flags, which say whether it counts.
_MODES = {1: {"chmod": (90, None), "fchmod": (91, 52)}, 2: {"fchmodat": (268, 53), "fchmodat2": (452, 452)}}
_MAKES = {1: {"creat": (85, None), "mknod": (133, None)}, 2: {"mknodat": (259, 33)}}
_OPENS = {2: {"open": (2, None)}, 3: {"openat": (257, 56)}}
_SETUID, _SETGID = 0o4000, 0o2000
_CREATES = 0o100 | 0o20000000  # O_CREAT, O_TMPFILE
_NEW_USER_NAMESPACE = 0x10000000
# They type into the terminal that a sandbox was started from.
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C
_FAMILIES = (0, 1, 2, 10, 16)  # none, Unix, IPv4, IPv6, netlink; AF_VSOCK reaches the host of a virtual machine
_OF_X32 = 0x40000000

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERROR = 0x7FFF0000, 0x00050000
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16

Line = tuple[int, int, str, str]
"""An instruction, its value, and where to go on if it holds and if not; an empty name is the next line."""


def filtering(command: list[str], *, setuid: bool = True) -> list[str]:
    """``bwrap`` and its options with the filter; unchanged on machines of another kind. ``setuid``: whether files may
    become setuid or setgid, as packages of a system do."""
    file = _filter_file(os.getpid(), setuid)
    if file and not os.path.exists(file):  # folders of temporary files are swept
        _filter_file.cache_clear()
        file = _filter_file(os.getpid(), setuid)
    if not file:
        return command
    opened = 'exec 9<"$0" && shift && exec "$@"'
    return ["/bin/sh", "-c", opened, file, "--", command[0], "--seccomp", "9", *command[1:]]


def program(machine: str, *, setuid: bool = True) -> bytes:
    """The filter for the kernel, as in ``filtering``; empty for a machine that is not known."""
    if machine not in _MACHINES:
        return b""
    architecture, column = _MACHINES[machine]
    lines: list[Line] = [(_LOAD, _ARCHITECTURE, "", ""), (_EQUAL, architecture, "", "missing")]
    lines += [(_LOAD, _NUMBER, "", ""), (_AT_LEAST, _OF_X32, "missing", "")]
    for calls, goal in ((_REFUSED, "refused"), (_MISSING, "missing")):
        lines += [(_EQUAL, number, goal, "") for each in calls.values() if (number := each[column]) is not None]
    checked = {"clone": _CLONE, "ioctl": _IOCTL, "socket": _SOCKET}
    lines += [(_EQUAL, numbers[column], name, "") for name, numbers in checked.items()]
    for kind, places_of_modes in () if setuid else (("mode", _MODES), ("make", _MAKES), ("open", _OPENS)):
        for at, calls in places_of_modes.items():
            numbers = [number for each in calls.values() if (number := each[column]) is not None]
            lines += [(_EQUAL, number, f"{kind}{at}", "") for number in numbers]
    blocks: dict[str, list[Line]] = {
        "clone": [_argument(0), (_ANY_BIT, _NEW_USER_NAMESPACE, "refused", "allowed")],
        "ioctl": [*(_argument(1), (_EQUAL, _TIOCSTI, "refused", "")), (_EQUAL, _TIOCLINUX, "refused", "allowed")],
        "socket": [
            _argument(0),
            *((_EQUAL, family, "allowed", "") for family in _FAMILIES),
            (_RETURN, _ERROR | errno.EAFNOSUPPORT, "", ""),
        ],
        **({} if setuid else _blocks_of_modes()),
        "refused": [(_RETURN, _ERROR | errno.EPERM, "", "")],
        "missing": [(_RETURN, _ERROR | errno.ENOSYS, "", "")],
        "ignored": [(_RETURN, _ERROR, "", "")],
    }
    # Jumps lead forwards only.
    blocks["allowed"] = [(_RETURN, _ALLOW, "", "")]
    lines.append((_AT_LEAST, 0, "allowed", ""))
    places = {}
    for name, block in blocks.items():
        places[name] = len(lines)
        lines += block
    return b"".join(_encoded(at, line, places) for at, line in enumerate(lines))


def _blocks_of_modes() -> dict[str, list[Line]]:
    opens = {f"open{at}": [_argument(at - 1), (_ANY_BIT, _CREATES, f"make{at}", "allowed")] for at in _OPENS}
    makes = {f"make{at}": [_argument(at), (_ANY_BIT, _SETUID | _SETGID, "refused", "allowed")] for at in (1, 2, 3)}
    modes = {
        f"mode{at}": [*(_argument(at), (_ANY_BIT, _SETUID, "refused", "")), (_ANY_BIT, _SETGID, "ignored", "allowed")]
        for at in _MODES
    }
    return {**opens, **makes, **modes}


def _argument(at: int) -> Line:
    return _LOAD, _ARGUMENTS + 8 * at, "", ""


def _encoded(at: int, line: Line, places: dict[str, int]) -> bytes:
    instruction, value, then, otherwise = line
    steps = [places[name] - at - 1 if name else 0 for name in (then, otherwise)]
    return struct.pack("=HBBI", instruction, *steps, value)


@functools.cache
def _filter_file(pid: int, setuid: bool) -> str:
    """The path of a file with the filter, which ends with this process; empty without one."""
    code = program(platform.machine(), setuid=setuid)
    if not code:
        return ""
    path = temporary_folder("seccomp") / "filter"
    path.write_bytes(code)
    return str(path)
