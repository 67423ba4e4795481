"""Ways out of a sandbox, as programs. Each prints ESCAPED where it gets somewhere, and is shown to be able to.

Names between @ stand for what attempts.py puts up outside: secrets, listeners, a process to be hit. `NUMBERS` are the system
calls of this machine. A program that cannot show itself outside of a sandbox says why in `not_bare`; then another process
watches for what it would do.
"""

from __future__ import annotations

from dataclasses import dataclass

PRELUDE = """
import ctypes, errno, os, resource, signal, socket, sys, time
libc = ctypes.CDLL(None, use_errno=True)
NUMBERS = @NUMBERS@
def call(name, *words):
    ctypes.set_errno(0)
    number = NUMBERS[name] if isinstance(name, str) else name
    return libc.syscall(ctypes.c_long(number), *(w if isinstance(w, bytes) else ctypes.c_long(w) for w in words))
def out(what=""):
    print("ESCAPED", what, flush=True)
def tried(action, *words):
    try:
        found = action(*words)
    except (OSError, ValueError) as error:
        print(type(error).__name__, error)
    else:
        out(f"{getattr(action, '__name__', action)}{words}: {found!r}"[:300])
"""

# Without control groups somebody looks at the memory, many times a second, but later on a busy machine.
KEPT = "time.sleep(6)\n"


@dataclass(frozen=True)
class Escape:
    """One way out. ends: how it may end. timeout_s: of those that have to be stopped. not_bare: see above."""

    name: str
    code: str
    ends: tuple[str, ...] = ("ok", "error")
    timeout_s: float = 30.0
    not_bare: str = ""


READING = (
    Escape("the environment", "for name, value in os.environ.items():\n    if '@SECRET@' in value: out(name)"),
    Escape("the recipe's keys", "tried(lambda: open('@SECRET_FILE@').read())"),
    Escape("up and down again", "tried(lambda: open('../' * 40 + '@SECRET_FILE@'.lstrip('/')).read())"),
    Escape("a symlink out", "os.symlink('@SECRET_FILE@', 'link')\ntried(lambda: open('link').read())"),
    Escape("a symlink to the root", "os.symlink('/', 'root')\ntried(lambda: os.listdir('root/etc'))"),
    Escape("a hard link out", "tried(os.link, '@SECRET_FILE@', 'link')"),
    Escape(
        "folders of others",
        "for place in ('/home', '/root', '/work', '/etc', '/var', '/run', '/proc', '/sys', '/opt', '/mnt', '/usr/bin', '/srv'):\n"
        "    if os.path.exists(place): out(place)",
    ),
    Escape(
        "the environment of others",
        "for pid in (1, 2, os.getppid(), @VICTIM@): tried(lambda: open(f'/proc/{pid}/environ').read())",
    ),
    Escape("the memory of this process by a file", "tried(lambda: open('/proc/self/mem', 'rb'))"),
    Escape(
        "open files that it inherited",
        "for fd in range(3, 64):\n    try: os.fstat(fd)\n    except OSError: continue\n    out(fd)",
    ),
    Escape(
        "devices",
        "for name in ('mem', 'kmem', 'port', 'kmsg', 'sda', 'vda', 'fuse', 'kvm', 'tty', 'ptmx', 'net/tun', 'loop0'):\n"
        "    tried(lambda: os.close(os.open('/dev/' + name, os.O_RDWR)))",
    ),
    Escape("a device of its own", "tried(os.mknod, 'disk', 0o600 | 0o060000, os.makedev(254, 0))"),
    Escape("the machine's name", "if os.uname().nodename == '@HOST@': out(os.uname().nodename)"),
)

RIGHTS = (
    Escape(
        "being root", "if os.getuid() == 0 or os.geteuid() == 0: out()\nfor uid in (0, 1, 1000): tried(os.setuid, uid)"
    ),
    Escape("groups", "tried(os.setgroups, [0])\nif set(os.getgroups()) - {65534}: out(os.getgroups())"),
    Escape(
        "setuid programs",
        "if libc.prctl(39, 0, 0, 0, 0) != 1: out('new privileges are allowed')\n"
        "for place in ('/', '/tmp', '/usr/lib'):\n"
        "    if not os.statvfs(place).f_flag & os.ST_NOSUID: out(place)",
    ),
    Escape(
        "capabilities",
        "head = (ctypes.c_uint32 * 2)(0x20080522, 0); sets = (ctypes.c_uint32 * 6)()\n"
        "libc.capget(head, sets)\n"
        "if any(sets): out(list(sets))",
    ),
    Escape(
        "higher limits",
        "for kind in (resource.RLIMIT_NPROC, resource.RLIMIT_FSIZE, resource.RLIMIT_AS):\n"
        "    hard = resource.getrlimit(kind)[1]\n"
        "    tried(resource.setrlimit, kind, (hard, resource.RLIM_INFINITY))",
    ),
    Escape(
        "before all others", "tried(os.nice, -5)\ntried(os.sched_setscheduler, 0, os.SCHED_FIFO, os.sched_param(1))"
    ),
    Escape(
        "memory that is never swapped",
        "area = ctypes.create_string_buffer(2**20)\nif libc.mlock(area, 2**20) == 0: out()",
    ),
    Escape(
        "writing where nobody may",
        "for place in ('/', '/usr/lib', '/lib', '/python', '/python/lib', '/dev'):\n"
        "    file = os.path.join(place, 'megarl-escape')\n"
        "    tried(lambda: open(file, 'w').close())\n"
        "    if os.path.exists(file): os.remove(file)",
    ),
    Escape(
        "changing the library",
        "import json\ntried(lambda: os.close(os.open(json.__file__, os.O_RDWR)))\ntried(os.utime, json.__file__)",
    ),
    Escape("a mount", "if libc.mount(b'none', b'/tmp', b'tmpfs', 0, None) == 0: out()\nprint(ctypes.get_errno())"),
    Escape("the root made writable", "if libc.mount(None, b'/', None, 32 | 4096, None) == 0: out()"),
    Escape("another root", "tried(os.chroot, '.')"),
    Escape("a new user namespace", "if libc.unshare(0x10000000) == 0: out()"),
    Escape("a new mount namespace", "if libc.unshare(0x00020000) == 0: out()"),
    Escape(
        "a process in new namespaces",
        "pid = call(@CLONE@, 0x10000000 | 17, 0, 0, 0, 0)\nif pid == 0: os._exit(0)\nif pid > 0: out()",
    ),
    Escape(
        "a process in new namespaces, asked for otherwise",
        "words = (ctypes.c_uint64 * 8)(0x10000000, 0, 0, 0, 17, 0, 0, 0)\n"
        "pid = call(435, ctypes.addressof(words), 64)\n"
        "if pid == 0: os._exit(0)\n"
        "if pid > 0 or ctypes.get_errno() != errno.ENOSYS: out(ctypes.get_errno())",
    ),
)

OTHERS = (
    Escape(
        "signals to others",
        "for pid in range(2, 33000):\n"
        "    if pid in (os.getpid(), os.getppid()): continue\n"
        "    try: os.kill(pid, 0)\n"
        "    except ProcessLookupError: continue\n"
        "    except PermissionError: pass\n"
        "    out(pid)",
    ),
    Escape("signals to all", "tried(os.kill, -1, 0)"),
    Escape("killing one outside", "tried(os.kill, @VICTIM@, 9)", not_bare="it would hit; the one outside is watched"),
    Escape(
        "killing the first process",
        "os.kill(1, 9)\ntime.sleep(0.2)\nos.kill(1, 15)\nprint('still here')",
        not_bare="it is the first",
    ),
    Escape("tracing", "if libc.ptrace(0, 0, 0, 0) == 0: out()"),
    Escape(
        "memory of others",
        "text = ctypes.create_string_buffer(8)\n"
        "vector = (ctypes.c_uint64 * 2)(ctypes.addressof(text), 8)\n"
        "at = ctypes.addressof(vector)\n"
        "if call('process_vm_readv', os.getpid(), at, 1, at, 1, 0) >= 0: out()",
    ),
    Escape(
        "the kernel's keyrings",
        "if call('add_key', b'user\\0', b'megarl\\0', b'x', 1, -2) >= 0: out()\nif call('keyctl', 0, -3, 0) >= 0: out()",
    ),
    Escape(
        "every refused call",
        "for name in NUMBERS:\n"
        "    if call(name, -1, -1, -1, -1, -1) != -1 or ctypes.get_errno() != errno.EPERM: out(f'{name} {ctypes.get_errno()}')",
    ),
    Escape(
        "io_uring",
        "area = ctypes.create_string_buffer(256)\nif call('io_uring_setup', 4, ctypes.addressof(area)) >= 0: out()",
    ),
)

NETWORK = (
    Escape("IPv4", "tried(lambda: socket.create_connection(('127.0.0.1', @PORT@), 2))"),
    Escape("IPv6", "tried(lambda: socket.create_connection(('::1', @PORT6@), 2))"),
    Escape(
        "UDP",
        "s = lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'out', ('127.0.0.1', @PORT@))\ntried(s)",
    ),
    Escape("the loopback of its own", "tried(lambda: socket.socket().bind(('127.0.0.1', 0)))"),
    Escape("raw sockets", "tried(lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW))"),
    Escape("the kernel's sockets", "tried(lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW))"),
    Escape("a unix socket", "s = socket.socket(socket.AF_UNIX)\ntried(s.connect, '@UNIX@')"),
    Escape("an abstract socket", "s = socket.socket(socket.AF_UNIX)\ntried(s.connect, chr(0) + '@ABSTRACT@')"),
)

EATING = (
    Escape(
        "a fork bomb",
        "made = 0\n"
        "try:\n"
        "    while made < 60:\n"
        "        if os.fork() == 0: time.sleep(60); os._exit(0)\n"
        "        made += 1\n"
        "except OSError as error: print(error)\n"
        "print(made)\n"
        "if made > 16: out(made)",
    ),
    Escape(
        "a bomb of threads",
        "import threading\n"
        "threading.stack_size(2**16)\n"
        "made = 0\n"
        "try:\n"
        "    while made < 60: threading.Thread(target=time.sleep, args=(1,), daemon=True).start(); made += 1\n"
        "except RuntimeError as error: print(error)\n"
        "if made > 16: out(made)",
    ),
    Escape(
        "memory, at once",
        "area = bytearray(3 * 2**30)\nout(len(area))",
        not_bare="this machine may not have it to spare",
    ),
    Escape(
        "memory, bit by bit",
        "held = [bytearray(2**22) for _ in range(60)]\n" + KEPT + "out(len(held))",
        ends=("memory", "error"),
    ),
    Escape(
        "memory of many processes",
        "read, write = os.pipe()\n"
        "for _ in range(8):\n"
        "    if os.fork() == 0:\n"
        "        held = bytearray(24 * 2**20)\n"
        "        os.write(write, b'x')\n"
        "        time.sleep(60)\n"
        "for _ in range(8): os.read(read, 1)\n" + KEPT + "out()",
        ends=("memory",),
    ),
    Escape(
        "memory that is shared",
        "import mmap\n"
        "held = mmap.mmap(-1, 200 * 2**20)\n"
        "for at in range(0, len(held), 4096): held[at] = 1\n" + KEPT + "out()",
        ends=("memory", "error"),
    ),
    Escape("memory in a file without a name", "tried(os.memfd_create, 'held')"),
    Escape("memory in segments", "if libc.shmget(0, 2**20, 0o1600) >= 0: out()"),
    Escape(
        "filling the disk",
        "total = 0\n"
        "try:\n"
        "    for number in range(20):\n"
        "        with open(f'file{number}', 'wb') as file: total += file.write(bytes(2**21))\n"
        "except OSError as error: print(error)\n"
        "print(total)\n"
        "if total > 16 * 2**20: out(total)",
        ends=("ok", "memory"),
    ),
    Escape(
        "filling it with nothing",
        "for number in range(@FILES@): os.mknod(f'f{number}')\nout()",
        ends=("memory", "error", "cpu"),
    ),
    Escape(
        "one large file",
        "with open('large', 'wb') as file:\n"
        "    try:\n"
        "        for _ in range(12): file.write(bytes(2**20)); file.flush()\n"
        "    except OSError as error: print(error)\n"
        "    if os.fstat(file.fileno()).st_size > 8 * 2**20: out()",
    ),
    Escape("a file that is all hole", "tried(os.truncate, open('hole', 'w').name, 2**40)"),
    Escape(
        "many open files",
        "held = []\ntry:\n    while len(held) < 100: held.append(os.open('/dev/null', 0))\n"
        "except OSError as error: print(error)\nif len(held) > 64: out(len(held))",
    ),
    Escape(
        "long output",
        "while True: os.write(1, b'x' * 65536)",
        ends=("output",),
        not_bare="it never ends; what is kept is measured",
    ),
    Escape(
        "long errors",
        "while True: os.write(2, b'x' * 65536)",
        ends=("output",),
        not_bare="it never ends; what is kept is measured",
    ),
    Escape(
        "CPU seconds of many",
        "for _ in range(3): os.fork()\nwhile True: pass",
        ends=("cpu",),
        not_bare="it never ends",
    ),
)

STAYING = (
    Escape(
        "a daemon",
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        "        for number in range(1, 65):\n"
        "            try: signal.signal(number, signal.SIG_IGN)\n"
        "            except (OSError, ValueError): pass\n"
        "        os.closerange(0, 64)\n"
        "        os.execv(sys.executable or '/python/bin/python3', ['python3', '-c', 'import time; time.sleep(600) # @MARK@'])\n"
        "    os._exit(0)\n"
        "time.sleep(0.2)",
        not_bare="it would stay; processes outside are looked through for its mark",
    ),
    Escape(
        "zombies",
        "for _ in range(10):\n    if os.fork() == 0: os._exit(0)\ntime.sleep(0.1)",
        not_bare="their parent ends with them",
    ),
    Escape("stopping itself", "os.kill(os.getpid(), signal.SIGSTOP)", ("timeout",), 1.0, "it never ends"),
    Escape(
        "hearing no signal",
        "for number in range(1, 65):\n"
        "    try: signal.signal(number, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\n"
        "time.sleep(600)",
        ("timeout",),
        1.0,
        "it never ends",
    ),
    Escape(
        "another program in its place",
        "os.execv('/python/bin/python3', ['python3', '-c', 'import time; time.sleep(600) # @MARK@'])",
        ("timeout",),
        1.0,
        "it never ends",
    ),
    Escape("closing all it has", "os.closerange(0, 64)\nwhile True: time.sleep(1)", ("timeout",), 1.0, "it never ends"),
    Escape("waiting at the end", "import atexit\natexit.register(time.sleep, 600)", ("timeout",), 1.0, "it never ends"),
    Escape("a second interface of the kernel", "call(0x40000000 | 39)\nout()", not_bare="only some machines have it"),
    Escape(
        "huge names",
        "for name in ('x' * 5000, 'd/' * 5000, chr(0)):\n"
        "    try: open(name, 'w')\n"
        "    except (OSError, ValueError) as error: print(type(error).__name__)\n"
        "try:\n"
        "    for _ in range(3000): os.mkdir('d' * 200); os.chdir('d' * 200)\n"
        "except OSError as error: print(error)\n"
        "try: os.execv('/python/bin/python3', ['x' * 2**22] * 4)\n"
        "except OSError as error: print(error)",
        ends=("ok", "error", "memory"),
        not_bare="it leaves folders that are hard to remove; the pool goes on",
    ),
)

# The longest first: the others go beside them.
ESCAPES = EATING + STAYING + READING + RIGHTS + OTHERS + NETWORK
