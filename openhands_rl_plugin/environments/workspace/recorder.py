"""Records the files of a workspace in a separate git repository, compares them with that record, and restores them.

The sandbox executes what this file was compiled to, by the standard library alone, with few modules, because they take
longer to load than git runs. It is asked
``{"do": "remember" | "changes" | "restore", "root", "protected": [pattern], "tree"}`` with the most ``files``
and ``bytes``, and bytes of ``names`` and ``patch``. The variables ``GIT_DIR`` and ``GIT_INDEX_FILE`` name the record.

Git gets the names of files and links one by one, so that repositories in the workspace are folders like any other. What
nobody may read is opened to its owner.
"""

from __future__ import annotations

import contextlib
import fnmatch
import json
import os
import signal
import stat
import sys

# A larger file is no text that anybody wrote: it is named, and not read.
LARGEST = 64 * 1024**2
ATTRIBUTES = "* !diff !filter !text !eol !ident !working-tree-encoding\n"


def git(*words: str, names: list[bytes] | None = None, codes: tuple[int, ...] = (0,), most: int = -1) -> bytes:
    """Run git with ``names`` as input, and return its output, or the first bytes of it."""
    printed, into = os.pipe()
    with open(os.memfd_create("names"), "w+b") as given:
        given.writelines(name + b"\0" for name in names or ())
        given.seek(0)
        places = [(os.POSIX_SPAWN_DUP2, given.fileno(), 0), (os.POSIX_SPAWN_DUP2, into, 1)]
        options = {"file_actions": places, "setsigdef": [signal.SIGPIPE, signal.SIGXFSZ]}
        started = os.posix_spawnp("git", ["git", *words], os.environ, **options)
    os.close(into)
    with open(printed, "rb") as answer:
        found = answer.read(most)
    code = os.waitstatus_to_exitcode(os.waitpid(started, 0)[1])
    if code not in codes:
        sys.exit(code if code > 0 else 1)
    return found


def beginning(most: int, *words: str) -> str:
    """The first bytes of what git prints, as Latin-1, with one more where there are more."""
    return git(*words, codes=(0, -signal.SIGPIPE), most=most + 1).decode("latin-1")


class Files:
    """The workspace's files and links."""

    def __init__(self, most: int) -> None:
        self.found: dict[bytes, os.stat_result] = {}
        pending = [b""]
        while pending:
            folder = pending.pop()
            if not os.access(folder or b".", os.R_OK | os.W_OK | os.X_OK):
                add_rights(folder or b".", stat.S_IRWXU)
            with contextlib.suppress(OSError), os.scandir(folder or b".") as entries:
                for entry in entries:
                    name = os.path.join(folder, entry.name)
                    if entry.name == b".git":
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(name)
                    elif entry.is_file(follow_symlinks=False) or entry.is_symlink():
                        self.found[name] = entry.stat(follow_symlinks=False)
                        if not entry.is_symlink() and not os.access(name, os.R_OK):
                            add_rights(name, stat.S_IRUSR)
                    elif entry.name == b".gitignore":
                        sys.exit("a .gitignore is no file")
            if len(self.found) > most:
                sys.exit(f"the workspace has more than {most} files")

    def seen(self, known: set[bytes], protected: list[str]) -> list[bytes]:
        """The names that git does not ignore, that are ``known``, or that are protected."""
        # A name that begins with a colon would have another meaning.
        names = [b"./" + name for name in self.found]
        printed = git("check-ignore", "--no-index", "-z", "--stdin", names=names, codes=(0, 1))
        ignored = {name[2:] for name in printed.split(b"\0")}
        left = {name for name in ignored - known if not matches(name, protected)}
        return [name for name in self.found if name not in left]


def add_rights(name: bytes, rights: int) -> None:
    with contextlib.suppress(OSError):
        os.chmod(name, stat.S_IMODE(os.lstat(name).st_mode) | rights)


def matches(name: bytes, patterns: list[str]) -> bool:
    """Whether a file or a folder above it matches; the last pattern that does decides, one after ``!`` against it."""
    parts = os.fsdecode(name).split("/")
    above = ["/".join(parts[: at + 1]) for at in range(len(parts))]
    for pattern in reversed(patterns):
        plain = pattern.removeprefix("!").removeprefix("/").rstrip("/")
        forms = {plain, plain.removeprefix("**/"), plain.removesuffix("/**")}
        if any(fnmatch.fnmatchcase(path, form) for path in above for form in forms):
            return not pattern.startswith("!")
    return False


def recorded() -> list[bytes]:
    return git("ls-files", "-z").split(b"\0")[:-1]


def remember(asked: dict) -> dict:
    """Record all files, also those that an index of the workspace's repository names and git would ignore."""
    own, index, record = ".git/index", os.environ["GIT_INDEX_FILE"], os.environ["GIT_DIR"]
    root = os.environ.pop("GIT_WORK_TREE")
    git("init", "--quiet", "--bare", "--object-format=sha1")
    os.environ["GIT_WORK_TREE"] = root
    with open(f"{record}/info/attributes", "w") as file:
        file.write(ATTRIBUTES)
    known: set[bytes] = set()
    if os.path.isfile(own):
        os.environ["GIT_INDEX_FILE"] = os.path.abspath(own)
        known = {*git("ls-files", "-z", codes=(0, 128)).split(b"\0")}
        os.environ["GIT_INDEX_FILE"] = index
    files = Files(asked["files"])
    names = [name for name in files.seen(known, asked["protected"]) if files.found[name].st_size <= LARGEST]
    if sum(files.found[name].st_size for name in names) > asked["bytes"]:
        if not os.path.isdir(b".git/objects"):
            sys.exit(f"the workspace has more than {asked['bytes'] >> 20} MiB, and is no git repository")
        with open(f"{record}/objects/info/alternates", "w") as file:
            file.write(os.path.abspath(".git/objects") + "\n")
    git("update-index", "--add", "-z", "--stdin", names=names)
    return {"tree": git("write-tree").decode().strip()}


def changes(asked: dict) -> dict:
    """The names of what differs from the record, and a patch."""
    known, files = {*recorded()}, Files(asked["files"])
    began = os.stat(os.environ["GIT_DIR"] + "/info/attributes").st_ctime
    names = {*files.seen(known, asked["protected"])}
    large = {name for name in names if files.found[name].st_size > LARGEST}
    new = [files.found[name] for name in names - large]
    if sum(status.st_size for status in new if status.st_ctime > began) > asked["bytes"]:
        sys.exit(f"more than {asked['bytes'] >> 20} MiB were written")
    git("update-index", "--force-remove", "-z", "--stdin", names=sorted(known - names))
    git("update-index", "--add", "--replace", "-z", "--stdin", names=sorted(names - large))
    trees = asked["tree"], git("write-tree").decode().strip()
    # With an index git would read a file of the workspace again, as it is now, in the place of what was recorded.
    os.environ["GIT_INDEX_FILE"] += "-none"
    compare = ("diff", "--no-renames")
    return {
        "names": beginning(asked["names"], *compare, "--name-status", "-z", *trees),
        "patch": beginning(asked["patch"], *compare, "--no-color", "--no-ext-diff", "--no-textconv", *trees),
        "large": [name.decode("utf-8", "replace") for name in sorted(large) if files.found[name].st_ctime > began],
    }


def restore(asked: dict) -> dict:
    """Put protected files back as they were recorded, and remove those that were not there."""
    wanted = [name for name in recorded() if matches(name, asked["protected"])]
    files = Files(asked["files"])
    for name in files.found:
        if matches(name, asked["protected"]):
            os.unlink(name)
    # What stands in the place of a folder or file is removed.
    git("checkout-index", "--force", "-z", "--stdin", names=wanted)
    return {"restored": len(wanted)}


def main(request: dict) -> None:
    root = os.environ["GIT_WORK_TREE"] = request["root"]
    print("began", flush=True)
    with contextlib.suppress(OSError):
        os.chmod(root, stat.S_IMODE(os.stat(root).st_mode) | stat.S_IRUSR | stat.S_IXUSR)
    os.chdir(root)
    print(json.dumps({"remember": remember, "changes": changes, "restore": restore}[request["do"]](request)))
