"""Makes Python on Linux resemble Python on Windows or macOS, from the import of vitrail on.

Python imports this module at its start if the folder is on PYTHONPATH, in worker processes too.
VITRAIL_TEST_SYSTEM says which system: "windows" or "macos". Each process that was changed adds a
line to the file VITRAIL_TEST_PROCESSES.
"""

import builtins
import errno
import io
import os
import stat
import sys
from contextlib import suppress
from importlib.abc import MetaPathFinder

LINUX_FOLDERS = ("/proc", "/sys", "/dev/shm")
LINUX_CALLS = "sched_getaffinity sched_setaffinity posix_fadvise posix_fallocate memfd_create"
POSIX_MODULES = "fcntl resource pwd grp termios tty pty syslog"
POSIX_CALLS = (
    "fork forkpty getuid geteuid getgid getegid getgroups getpgid getpgrp getsid setsid killpg "
    "nice getpriority getloadavg pread preadv pwrite pwritev readv writev sendfile posix_spawn "
    "chown fchown lchown chroot fchdir fdatasync sync statvfs fstatvfs pathconf sysconf confstr "
    "mkfifo mknod uname lockf wait wait3 wait4 waitid register_at_fork O_DIRECTORY O_NOFOLLOW "
    "O_CLOEXEC O_SYNC O_DSYNC O_NOCTTY O_PATH O_TMPFILE"
)
SIGNAL_CALLS = "pthread_kill pthread_sigmask sigwait sigpending alarm setitimer pause SIG_BLOCK"
WINDOWS_SIGNALS = "SIGINT SIGTERM SIGABRT SIGFPE SIGILL SIGSEGV"
RESERVED = set('<>:"|?*')  # characters that no file name has on Windows


class BeforeVitrail(MetaPathFinder):
    """Hides what the system lacks as soon as a program imports vitrail."""

    def find_spec(self, name, path, target=None):
        if name == "vitrail":
            sys.meta_path.remove(self)
            hide(os.environ["VITRAIL_TEST_SYSTEM"])
            with open(os.environ["VITRAIL_TEST_PROCESSES"], "a", encoding="ascii") as file:
                file.write(f"{os.getpid()}\n")


def hide(system):
    import_libraries()
    hide_linux()
    {"windows": hide_posix, "macos": hide_fork_default}[system]()


def import_libraries():
    """Imports what chooses its own code for a system, and would choose that of Linux."""
    import multiprocessing.heap
    import multiprocessing.popen_spawn_posix
    import multiprocessing.resource_tracker
    import platform
    import shutil
    import subprocess
    import sysconfig
    import tempfile

    import filelock
    import torch

    platform.uname(), sysconfig.get_config_vars()  # cached
    return multiprocessing, shutil, subprocess, tempfile, filelock, torch


def hide_linux():
    """What neither macOS nor Windows has."""
    import mmap
    import multiprocessing.heap

    remove(os, LINUX_CALLS)
    remove(mmap, "MADV_DONTFORK MADV_DOFORK")
    multiprocessing.heap.Arena._dir_candidates = []  # /dev/shm
    sys.addaudithook(refuse_linux_folders)
    for name in ("stat", "lstat", "access"):
        setattr(os, name, refusing_linux_folders(getattr(os, name)))


def hide_fork_default():
    """macOS can fork, but its Python starts processes by spawn."""
    from multiprocessing import context

    sys.platform = "darwin"
    context._default_context._default_context = context._concrete_contexts["spawn"]


def hide_posix():
    """What Windows lacks, and where its files behave differently."""
    import mmap
    import multiprocessing
    import select
    import signal

    replace_library_calls()
    os.fsync = with_write_access(os.fsync)
    for name in POSIX_MODULES.split():
        sys.modules[name] = None  # the import raises ImportError
    remove(os, POSIX_CALLS)
    remove(select, "poll epoll")
    remove(
        mmap, " ".join(name for name in dir(mmap) if name.startswith(("MAP_", "PROT_", "MADV_")))
    )
    names = [name for name in dir(signal) if name.startswith("SIG") and name[3] != "_"]
    remove(signal, " ".join(set(names) - {*WINDOWS_SIGNALS.split()}) + " " + SIGNAL_CALLS)
    contexts = multiprocessing.context._concrete_contexts
    contexts.pop("fork")
    contexts.pop("forkserver")
    multiprocessing.context._default_context._default_context = contexts["spawn"]
    multiprocessing.context._default_context.get_all_start_methods = lambda: ["spawn"]
    multiprocessing.get_all_start_methods = lambda: ["spawn"]
    sys.addaudithook(refuse_as_windows)
    builtins.open = io.open = with_windows_text(io.open)
    for name in ("replace", "rename", "unlink", "remove", "rmdir"):
        setattr(os, name, refusing_open_files(getattr(os, name)))


def replace_library_calls():
    """Python's own code for POSIX, which still runs, keeps what it needs."""
    import multiprocessing.popen_fork
    import multiprocessing.resource_tracker
    import shutil
    import signal
    import subprocess

    kill, statvfs = signal.SIGKILL, os.statvfs

    def disk_usage(path):
        status = statvfs(path)
        sizes = (status.f_blocks, status.f_blocks - status.f_bfree, status.f_bavail)
        return shutil._ntuple_diskusage(*(size * status.f_frsize for size in sizes))

    shutil.disk_usage = disk_usage
    shutil._use_fd_functions = shutil._USE_CP_SENDFILE = False
    multiprocessing.popen_fork.Popen.kill = lambda self: self._send_signal(kill)
    subprocess.Popen.kill = lambda self: self.send_signal(kill)
    multiprocessing.resource_tracker._HAVE_SIGMASK = False


def remove(module, names):
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)


def is_hidden(path):
    text = os.fsdecode(path) if isinstance(path, (str, bytes, os.PathLike)) else ""
    return any(text == folder or text.startswith(f"{folder}/") for folder in LINUX_FOLDERS)


def refuse_linux_folders(event, arguments):
    if event in ("open", "os.listdir", "os.scandir") and not PEEKING and is_hidden(arguments[0]):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), arguments[0])


def refusing_linux_folders(call):
    def checked(path, *arguments, **options):
        if is_hidden(path):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return call(path, *arguments, **options)

    return checked


def refuse_as_windows(event, arguments):
    """A folder cannot be opened, and some characters are reserved."""
    if event not in ("open", "os.mkdir", "os.rename") or PEEKING:
        return
    path = arguments[1 if event == "os.rename" else 0]
    if not isinstance(path, (str, bytes, os.PathLike)):
        return  # a file descriptor
    if RESERVED & set(os.fsdecode(path)):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
    if event == "open" and os.path.isdir(path):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)


def with_windows_text(opener):
    """Text files in the code page of Western Europe, and lines that end with CR LF."""

    def open_as_windows(file, mode="r", buffering=-1, encoding=None, *rest, **options):
        if "b" not in mode:
            encoding = "cp1252" if encoding in (None, "locale") else encoding
            if mode[0] in "wax" and len(rest) < 2:  # errors, newline
                options.setdefault("newline", "\r\n")
            elif mode[0] in "wax" and rest[1] is None:
                rest = (rest[0], "\r\n", *rest[2:])
        return opener(file, mode, buffering, encoding, *rest, **options)

    return open_as_windows


def with_write_access(fsync):
    import fcntl

    def checked(handle):
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        if fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return fsync(handle)

    return checked


PEEKING = []  # not empty while this module itself reads /proc


def open_files():
    """The paths of the files that this process has open or mapped."""
    PEEKING.append(True)
    try:
        found = set()
        for handle in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                found.add(os.readlink(f"/proc/self/fd/{handle}"))
        with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
            found.update(line.split(None, 5)[5].rstrip("\n") for line in maps if "/" in line)
        return found
    finally:
        PEEKING.pop()


def refusing_open_files(call):
    """Windows does not rename, replace or delete an open file, or a folder that holds one."""

    def checked(path, *arguments, **options):
        paths = [path, *(one for one in arguments if isinstance(one, (str, os.PathLike)))]
        in_use = open_files()
        for one in map(os.fsdecode, paths):
            full = os.path.realpath(one)
            if "/pymp-" in full:  # the temporary folder of multiprocessing, which POSIX uses
                continue
            if full in in_use or any(other.startswith(f"{full}/") for other in in_use):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), one)
        return call(path, *arguments, **options)

    return checked


sys.meta_path.insert(0, BeforeVitrail())
