"""The system calls that code in a sandbox may make: an allowlist, as a program for seccomp.

What is not in the table fails with EPERM, and what a newer kernel may have with ENOSYS, so that
libraries fall back. Left out: namespaces, mounts, tracing, other processes' memory, keys, modules,
BPF, performance counters, io_uring, NUMA policy, clocks and changes of identity. clone3 answers
ENOSYS, so that libc falls back to clone, whose flags can be read here.

Sources: seccomp(2), the kernel's syscall tables of x86_64 and aarch64, and Docker's profile for
what ordinary programs need. Standard library alone: the zygote runs this file.
"""

from __future__ import annotations

import errno
import platform
import struct
from collections.abc import Iterator

_LOAD, _JEQ, _JGT, _JGE, _JSET, _AND, _RET = 0x20, 0x15, 0x25, 0x35, 0x45, 0x54, 0x06
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NUMBER, _ARCH, _ARGUMENT = 0, 4, 16
"""Offsets in struct seccomp_data."""
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_NEWEST = 449
"""futex_waitv; numbers are the same everywhere from 424 on."""
_CLONE3 = 435
_X32_BIT = 0x40000000
_NAMESPACES = 0x7E020000
"""All CLONE_NEW flags that clone can take."""
_TERMINAL_INPUT = (0x5412, 0x541C)
"""TIOCSTI and TIOCLINUX: both type into a terminal."""
_AF_UNIX, _AF_INET, _SOCK_STREAM = 1, 2, 1
_FILTERED = ("clone", "socket", "socketpair", "ioctl", "prlimit64")
SHARED = (
    *("semctl", "semget", "semop", "semtimedop", "shmat", "shmctl", "shmdt", "shmget"),
    *("msgctl", "msgget", "msgrcv", "msgsnd", "ioprio_set", "sched_setaffinity"),
    *("sched_setattr", "sched_setparam", "sched_setscheduler", "setpriority"),
)
"""Calls that reach past the process where it has no namespaces of its own."""
_TABLE = """
read:0:63 write:1:64 open:2:- close:3:57 stat:4:- fstat:5:80 lstat:6:- poll:7:- lseek:8:62
mmap:9:222 mprotect:10:226 munmap:11:215 brk:12:214 rt_sigaction:13:134 rt_sigprocmask:14:135
rt_sigreturn:15:139 ioctl:16:29 pread64:17:67 pwrite64:18:68 readv:19:65 writev:20:66 access:21:-
pipe:22:- select:23:- sched_yield:24:124 mremap:25:216 msync:26:227 mincore:27:232 madvise:28:233
shmget:29:194 shmat:30:196 shmctl:31:195 dup:32:23 dup2:33:- pause:34:- nanosleep:35:101
getitimer:36:102 alarm:37:- setitimer:38:103 getpid:39:172 sendfile:40:71 socket:41:198
connect:42:203 accept:43:202 sendto:44:206 recvfrom:45:207 sendmsg:46:211 recvmsg:47:212
shutdown:48:210 bind:49:200 listen:50:201 getsockname:51:204 getpeername:52:205 socketpair:53:199
setsockopt:54:208 getsockopt:55:209 clone:56:220 fork:57:- vfork:58:- execve:59:221 exit:60:93
wait4:61:260 kill:62:129 uname:63:160 semget:64:190 semop:65:193 semctl:66:191 shmdt:67:197
msgget:68:186 msgsnd:69:189 msgrcv:70:188 msgctl:71:187 fcntl:72:25 flock:73:32 fsync:74:82
fdatasync:75:83 truncate:76:45 ftruncate:77:46 getdents:78:- getcwd:79:17 chdir:80:49 fchdir:81:50
rename:82:- mkdir:83:- rmdir:84:- creat:85:- link:86:- unlink:87:- symlink:88:- readlink:89:-
chmod:90:- fchmod:91:52 chown:92:- fchown:93:55 lchown:94:- umask:95:166 gettimeofday:96:169
getrlimit:97:163 getrusage:98:165 sysinfo:99:179 times:100:153 getuid:102:174 getgid:104:176
geteuid:107:175 getegid:108:177 setpgid:109:154 getppid:110:173 getpgrp:111:- setsid:112:157
getgroups:115:158 getresuid:118:148 getresgid:120:150 getpgid:121:155 getsid:124:156 capget:125:90
rt_sigpending:127:136 rt_sigtimedwait:128:137 rt_sigqueueinfo:129:138 rt_sigsuspend:130:133
sigaltstack:131:132 utime:132:- mknod:133:- statfs:137:43 fstatfs:138:44 getpriority:140:141
setpriority:141:140 sched_setparam:142:118 sched_getparam:143:121 sched_setscheduler:144:119
sched_getscheduler:145:120 sched_get_priority_max:146:125 sched_get_priority_min:147:126
sched_rr_get_interval:148:127 mlock:149:228 munlock:150:229 mlockall:151:230 munlockall:152:231
prctl:157:167 arch_prctl:158:- setrlimit:160:164 sync:162:81 gettid:186:178 readahead:187:213
setxattr:188:5 lsetxattr:189:6 fsetxattr:190:7 getxattr:191:8 lgetxattr:192:9 fgetxattr:193:10
listxattr:194:11 llistxattr:195:12 flistxattr:196:13 removexattr:197:14 lremovexattr:198:15
fremovexattr:199:16 tkill:200:130 time:201:- futex:202:98 sched_setaffinity:203:122
sched_getaffinity:204:123 epoll_create:213:- getdents64:217:61 set_tid_address:218:96
restart_syscall:219:128 semtimedop:220:192 fadvise64:221:223 timer_create:222:107
timer_settime:223:110 timer_gettime:224:108 timer_getoverrun:225:109 timer_delete:226:111
clock_gettime:228:113 clock_getres:229:114 clock_nanosleep:230:115 exit_group:231:94
epoll_wait:232:- epoll_ctl:233:21 tgkill:234:131 utimes:235:- waitid:247:95 ioprio_set:251:30
ioprio_get:252:31 inotify_init:253:- inotify_add_watch:254:27 inotify_rm_watch:255:28
openat:257:56 mkdirat:258:34 mknodat:259:33 fchownat:260:54 futimesat:261:- newfstatat:262:79
unlinkat:263:35 renameat:264:38 linkat:265:37 symlinkat:266:36 readlinkat:267:78 fchmodat:268:53
faccessat:269:48 pselect6:270:72 ppoll:271:73 set_robust_list:273:99 get_robust_list:274:100
splice:275:76 tee:276:77 sync_file_range:277:84 utimensat:280:88 epoll_pwait:281:22 signalfd:282:-
timerfd_create:283:85 eventfd:284:- fallocate:285:47 timerfd_settime:286:86 timerfd_gettime:287:87
accept4:288:242 signalfd4:289:74 eventfd2:290:19 epoll_create1:291:20 dup3:292:24 pipe2:293:59
inotify_init1:294:26 preadv:295:69 pwritev:296:70 rt_tgsigqueueinfo:297:240 recvmmsg:299:243
prlimit64:302:261 syncfs:306:267 sendmmsg:307:269 getcpu:309:168 sched_setattr:314:274
sched_getattr:315:275 renameat2:316:276 getrandom:318:278 memfd_create:319:279 execveat:322:281
membarrier:324:283 mlock2:325:284 copy_file_range:326:285 preadv2:327:286 pwritev2:328:287
pkey_mprotect:329:288 pkey_alloc:330:289 pkey_free:331:290 statx:332:291 rseq:334:293
pidfd_send_signal:424:424 pidfd_open:434:434 close_range:436:436 openat2:437:437
faccessat2:439:439 epoll_pwait2:441:441 futex_waitv:449:449
"""
"""name:x86_64:aarch64"""


def program(*, has_namespaces: bool = True, has_proxy: bool = False, machine: str = "") -> bytes:
    """The filter, as an array of struct sock_filter. has_namespaces: False denies also what only a
    namespace keeps from the rest of the machine: sockets, System V IPC, priorities. has_proxy:
    loopback is up in there, for a proxy that is asked over IPv4.

    Raises OSError for a machine without a table.
    """
    machine = machine or platform.machine()
    if machine not in _ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"no table of system calls for {machine}")
    number = numbers(machine)
    denied = set() if has_namespaces else {*SHARED, "socket"}
    plain = sorted(n for name, n in number.items() if name not in {*_FILTERED, *denied})
    code = [
        (_LOAD, 0, 0, _ARCH),
        (_JEQ, 1, 0, _ARCHITECTURES[machine]),
        (_RET, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
    ]
    if machine == "x86_64":
        code += [(_JGE, 0, 1, _X32_BIT), (_RET, 0, 0, _KILL)]
    code += _when(number["clone"], 0, [(_JSET, 0, 1, _NAMESPACES), _fail(errno.EPERM)])
    if "socket" not in denied:
        # Without a proxy loopback is down: other families would be the kernel's surface, no more.
        known = [(_JEQ, 2, 0, _AF_INET)] if has_proxy else []
        known.append((_JEQ, 1, 0, _AF_UNIX))
        code += _when(number["socket"], 0, [*known, _fail(errno.EAFNOSUPPORT)])
    # A datagram pair could be sent from to any socket of the machine by its path.
    code += _when(
        number["socketpair"],
        1,
        [(_AND, 0, 0, 0xF), (_JEQ, 1, 0, _SOCK_STREAM), _fail(errno.EPERM)],
    )
    first, second = _TERMINAL_INPUT
    code += _when(
        number["ioctl"], 1, [(_JEQ, 1, 0, first), (_JEQ, 0, 1, second), _fail(errno.EPERM)]
    )
    code += _when(number["prlimit64"], 0, [(_JEQ, 1, 0, 0), _fail(errno.EPERM)])
    code += [(_JEQ, 0, 1, _CLONE3), _fail(errno.ENOSYS)]
    for low, high in _ranges(plain):
        code += [(_JGT, 2, 0, high), (_JGE, 0, 1, low), (_RET, 0, 0, _ALLOW)]
    code += [(_JGT, 0, 1, _NEWEST), _fail(errno.ENOSYS), _fail(errno.EPERM)]
    return b"".join(struct.pack("=HBBI", *each) for each in code)


def numbers(machine: str) -> dict[str, int]:
    """Of all calls in the table, on one kind of machine."""
    column = 1 + list(_ARCHITECTURES).index(machine)
    rows = (entry.split(":") for entry in _TABLE.split())
    return {row[0]: int(row[column]) for row in rows if row[column] != "-"}


_Step = tuple[int, int, int, int]


def _when(number: int, argument: int, checks: list[_Step]) -> list[_Step]:
    """Where the call is this one: look at an argument's lower half; allow what passes the checks,
    which skip the failure at their end.
    """
    body = [(_LOAD, 0, 0, _ARGUMENT + 8 * argument), *checks, (_RET, 0, 0, _ALLOW)]
    return [(_JEQ, 0, len(body), number), *body]


def _fail(number: int) -> _Step:
    return _RET, 0, 0, _ERRNO | number


def _ranges(ordered: list[int]) -> Iterator[tuple[int, int]]:
    low = high = ordered[0]
    for number in ordered[1:]:
        if number != high + 1:
            yield low, high
            low = number
        high = number
    yield low, high
