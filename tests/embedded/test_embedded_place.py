"""Names, lengths, owners, disks: where the server's data is, and under which user it runs."""

import os
import pwd
import shutil
import stat
import subprocess
from pathlib import Path

import pytest
from embedded_helpers import (
    FAST,
    NOBODY,
    as_user,
    can,
    gone,
    postmaster_pid,
    processes,
    root_only,
    until,
)

from taskd import embedded
from taskd.config import Settings, load
from taskd.embedded import data_directory, launch
from taskd.embedded.locks import open_owned
from taskd.errors import EmbeddedError

NAMES = [
    "two words",
    'it\'s "quoted"',
    "$(touch planted)`touch planted`",
    "ünïcödé 名",
    "a,b;c&d|e",
    "back\\slash",
    "#%+?=:@",
    "-D",
]


@pytest.fixture
def moved(home, tmp_path, clean_up):
    """Moves the home to another name below tmp_path."""

    def move(name):
        target = tmp_path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        home.rename(target)
        clean_up(target)
        return target

    return move


@pytest.mark.parametrize("name", NAMES)
def test_odd_names(moved, users, name):
    home = moved(name)
    user = users(home)
    assert user.ask("query") == {"answer": "taskd"}
    dsn = embedded.Server(home, user.hello["host"], 5432, "taskd", 18, False, None).dsn()
    psql = [embedded.pg_binary("psql", Settings()), dsn, "-Atc", "select 2"]
    assert subprocess.run(psql, capture_output=True, check=True).stdout == b"2\n"
    assert not list(Path.cwd().glob("planted"))
    assert not list(home.rglob("planted"))


def name_of_length(parent, length):
    """A path below the parent whose socket path has this many bytes."""
    missing = length - len(os.fsencode(parent)) - len("//.s.PGSQL.5432")
    if missing < 1:
        pytest.skip("the temporary directory has too long a path itself")
    parts = []
    while missing > 200:
        parts.append("x" * 100)
        missing -= 101
    return "/".join([*parts, "x" * missing])


@pytest.mark.parametrize(
    ("length", "short"), [(103, True), (104, False), (107, False), (300, False)]
)
def test_long_names(moved, users, tmp_path, length, short):
    home = moved(name_of_length(tmp_path, length))
    assert len(os.fsencode(home / data_directory.SOCKET)) == length
    first = users(home)
    assert (first.hello["host"] == str(home)) == short
    assert not users(home).hello["started"]
    assert first.ask("query") == {"answer": "taskd"}
    assert stat.S_IMODE(os.lstat(first.hello["host"]).st_mode) == 0o700


def test_a_long_home_is_stopped(moved, tmp_path):
    home = moved(name_of_length(tmp_path, 150))
    embedded.start(home, **FAST).close(wait_s=10)
    assert gone(home)
    server = embedded.start(home, **FAST)
    assert embedded.stop(home)
    server.close()


def test_one_home_under_two_names(moved, tmp_path, users):
    home = moved(name_of_length(tmp_path, 150))
    (tmp_path / "link").symlink_to(home)
    one, two = users(home), users(tmp_path / "link")
    assert one.hello["host"] == two.hello["host"]
    assert one.hello["started"] != two.hello["started"]


@root_only
def test_another_user_cannot_connect_to_a_long_home(moved, tmp_path, users):
    home = moved(name_of_length(tmp_path, 150))
    path = f"{users(home).hello['host']}/{data_directory.SOCKET}"
    code = f"import socket; socket.socket(socket.AF_UNIX).connect({path!r})"
    done = subprocess.run(
        [as_user(NOBODY)["python"], "-c", code], user=NOBODY, group=NOBODY, extra_groups=(),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "PermissionError" in done.stderr


@pytest.mark.parametrize("plant", ["open", "link", "file", "foreign"])
def test_a_planted_socket_directory_is_refused(moved, tmp_path, plant):
    home = moved(name_of_length(tmp_path, 150))
    trap = data_directory.socket_directory(home)
    trap.rmdir()
    try:
        if plant == "file":
            trap.touch(mode=0o700)
        elif plant == "link":
            (tmp_path / "mine").mkdir(mode=0o700)
            trap.symlink_to(tmp_path / "mine")
        else:
            trap.mkdir(mode=0o700)
            if plant == "open":
                trap.chmod(0o777)
            elif os.geteuid() == 0:
                os.chown(trap, NOBODY, NOBODY)
            else:
                pytest.skip("only root can give a directory away")
        with pytest.raises(EmbeddedError, match="is not a private directory"):
            embedded.start(home, **FAST)
    finally:
        trap.rmdir() if trap.is_dir() and not trap.is_symlink() else trap.unlink()


def test_the_environment_of_a_shell_decides_nothing(empty, users):
    odd = {
        "LC_ALL": "xx_YY.UTF-8", "LANG": "POSIX", "TZ": "Asia/Tokyo", "PGDATA": "/nowhere",
        "PGPORT": "1", "PGUSER": "x", "PGHOST": "192.0.2.1", "PGSSLMODE": "verify-full",
        "PGOPTIONS": "-c work_mem=1", "PGTZ": "Asia/Tokyo", "PGPASSFILE": "/nowhere",
        "PGSERVICE": "x", "PGTARGETSESSIONATTRS": "any", "PGDATABASE": "x", "PGPASSWORD": "x",
    }  # fmt: skip
    user = users(empty, env=odd)
    assert user.ask("query") == {"answer": "taskd"}
    line = Path(f"/proc/{postmaster_pid(empty)}/environ").read_bytes()
    assert sorted(v.split(b"=")[0] for v in line.split(b"\0") if v) == [b"LC_ALL", b"PATH", b"TZ"]


def test_control_characters_are_refused(tmp_path):
    with pytest.raises(EmbeddedError, match="control characters"):
        embedded.start(tmp_path / "a\nb")


def test_a_home_that_others_can_write_is_refused(tmp_path):
    (tmp_path / "pg").mkdir()
    (tmp_path / "pg").chmod(0o770)
    with pytest.raises(EmbeddedError, match="can be written by others"):
        embedded.start(tmp_path / "pg")


def test_what_is_no_data_is_not_touched(empty):
    (empty / "data").mkdir(parents=True)
    (empty / "data/precious").write_text("x")
    with pytest.raises(EmbeddedError, match="is not a PostgreSQL data"):
        embedded.start(empty)
    assert (empty / "data/precious").read_text() == "x"


def test_modes_and_owners_of_others_stay(tmp_path, users, monkeypatch, clean_up):
    (tmp_path / "user").mkdir(mode=0o700)
    before = Path("/etc/passwd").read_bytes()
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    user = users(None)
    home = tmp_path / f"user/.local/share/taskd/pg{embedded.default_home(Settings()).name[2:]}"
    clean_up(home)
    assert user.hello["home"] == str(home)
    assert user.ask("query") == {"answer": "taskd"}
    for directory in (home, *home.parents[:5]):
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert Path("/etc/passwd").read_bytes() == before


def test_default_home(monkeypatch, tmp_path):
    monkeypatch.setenv("TASKD_PG_MAJOR", "18")
    monkeypatch.setenv("HOME", "/home/ada")
    assert data_directory._data_directory() in (
        Path("/home/ada/.local/share/taskd"),
        data_directory.ROOT_HOME,
    )
    monkeypatch.setenv("XDG_DATA_HOME", "relative")
    assert embedded.default_home(load().settings).name == "pg18"
    monkeypatch.setenv("XDG_DATA_HOME", "/xdg")
    assert embedded.default_home(load().settings) == Path("/xdg/taskd/pg18")
    monkeypatch.setenv("TASKD_DATA_DIR", str(tmp_path))
    assert embedded.default_home(load().settings) == tmp_path / "pg18"
    monkeypatch.delenv("TASKD_PG_MAJOR")
    for major in ("9", "16"):
        (tmp_path / f"pg{major}/data").mkdir(parents=True)
        (tmp_path / f"pg{major}/data/PG_VERSION").write_text(major)
    assert embedded.default_home(load().settings) == tmp_path / "pg16"


@root_only
def test_root_without_home(monkeypatch):
    monkeypatch.delenv("HOME")
    assert data_directory._data_directory() == Path("/var/lib/taskd")


def test_a_large_log_is_cut_at_a_start(home, start):
    (home / "log").write_bytes(b"x" * (launch.LOG_BYTES_MAX + 1))
    start()
    assert (home / "log").stat().st_size < 10_000


def test_a_link_in_place_of_a_file_is_not_followed(home, tmp_path):
    (tmp_path / "precious").write_text("x")
    (home / "log").symlink_to(tmp_path / "precious")
    with pytest.raises(EmbeddedError, match="symbolic links"):
        embedded.start(home)
    assert (tmp_path / "precious").read_text() == "x"


# A file system of its own for one process and its children.
MOUNTS = ("unshare", "--mount")


def mounted(home, options):
    """The prefix of a command that first mounts an empty tmpfs over the home's parent."""
    script = f'mount -t tmpfs -o {options} none "$0" && exec "$@"'
    return (*MOUNTS, "sh", "-c", script, str(home.parent))


@root_only
@pytest.mark.skipif(not can(*MOUNTS), reason="no mount namespaces here")
@pytest.mark.parametrize(
    ("options", "reason"),
    [("size=12m", "No space left on device"), ("ro", "Read-only file system")],
)
def test_a_disk_that_takes_nothing(empty, users, options, reason):
    said = users(empty, prefix=mounted(empty, options)).hello["error"]
    assert reason in said
    assert len(said.splitlines()) == 1
    assert not [line for line in processes(empty).values() if b"user_process" not in line]


@root_only
@pytest.mark.skipif(not can(*MOUNTS), reason="no mount namespaces here")
def test_a_disk_that_is_full_at_a_restart(home, users):
    full = f"""
        mount -t tmpfs -o size=80m none /mnt && cp -a "{home}" /mnt/pg && dd if=/dev/zero of=/mnt/x
        exec "$@"
    """
    user = users("/mnt/pg", prefix=(*MOUNTS, "sh", "-c", full, "sh"))
    assert "no space " in user.hello["error"].lower()
    until(lambda: not processes("/mnt/pg/data"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_is_closed_to_its_owner(tmp_path):
    (tmp_path / "closed").mkdir(mode=0o500)
    with pytest.raises(EmbeddedError, match="Permission denied"):
        embedded.start(tmp_path / "closed/pg")


@pytest.fixture
def their_home(open_directory, clean_up):
    """A home in the directory of user `nobody`."""
    theirs = open_directory / "nobody"
    theirs.mkdir(mode=0o700)
    os.chown(theirs, NOBODY, NOBODY)
    clean_up(theirs / "data/pg")
    return theirs / "data/pg"


@root_only
def test_an_ordinary_user(their_home, users):
    user = users(their_home, cwd="/", **as_user(NOBODY))
    assert user.ask("query") == {"answer": "taskd"}
    assert not users(their_home).hello["started"]  # root joins
    assert {owner(p) for p in their_home.rglob("*")} == {NOBODY}


@root_only
def test_root_in_the_home_of_a_user(their_home, users):
    root = users(their_home)
    assert root.ask("query") == {"answer": "taskd"}
    user = users(their_home, cwd="/", **as_user(NOBODY))
    assert not user.hello["started"]
    assert {owner(p) for p in (*their_home.rglob("*"), *their_home.parents[:2])} == {NOBODY}
    root.end()
    user.end()
    until(lambda: gone(their_home))
    user = users(their_home, cwd="/", **as_user(NOBODY))
    assert user.hello["started"]
    assert user.ask("query") == {"answer": "taskd"}


@root_only
def test_a_user_without_a_passwd_entry(their_home, users):
    uid = next(u for u in range(54321, 60000) if u not in {p.pw_uid for p in pwd.getpwall()})
    os.chown(their_home.parents[1], uid, uid)
    user = users(their_home, cwd="/", **as_user(uid))
    assert user.ask("query") == {"answer": "taskd"}


@root_only
def test_the_home_of_another_user(their_home, users):
    users(their_home).end()
    other = users(their_home, cwd="/", **as_user(NOBODY - 1))
    assert "Permission denied" in other.hello["error"]


@pytest.fixture
def no_namespaces(open_directory):
    """A PATH on which `unshare` is refused, as under the default profile of Docker."""
    stub = open_directory / "bin"
    stub.mkdir(mode=0o755)
    (stub / "unshare").write_text("#!/bin/sh\necho 'Operation not permitted' >&2\nexit 1\n")
    (stub / "unshare").chmod(0o755)
    return {"PATH": f"{stub}:{os.environ['PATH']}"}


@root_only
def test_root_without_user_namespaces(open_directory, no_namespaces, users, clean_up):
    as_user(NOBODY)  # skips where the binaries are closed to others
    home = open_directory / "data/pg"
    clean_up(home)
    user = users(home, env=no_namespaces)
    assert user.ask("query") == {"answer": "taskd"}
    name = pwd.getpwuid(owner(home / "data")).pw_name
    assert name in ("taskd", "postgres", "nobody")
    assert {owner(p) for p in (home.parent, home, *home.rglob("*"))} == {owner(home)}
    assert owner(open_directory) == 0
    user.end()
    until(lambda: gone(home))
    assert users(home, env=no_namespaces).hello["started"]


@root_only
def test_root_without_user_namespaces_in_a_closed_place(empty, no_namespaces, users):
    said = users(empty, env=no_namespaces).hello["error"]
    assert "is closed" in said
    assert "TASKD_DSN" in said


@root_only
def test_root_without_user_namespaces_where_root_has_data(home, no_namespaces, users):
    said = users(home, env=no_namespaces).hello["error"]
    assert "forbids user namespaces" in said


def owner(path):
    try:
        return path.lstat().st_uid
    except FileNotFoundError:  # a running server removes files
        return path.parent.lstat().st_uid


def test_files_are_private(home, start):
    start()
    modes = {stat.S_IMODE(p.lstat().st_mode) & 0o077 for p in home.iterdir()}
    assert modes == {0}
    fd = open_owned(home / "log", os.O_RDONLY)
    assert not os.get_inheritable(fd)
    os.close(fd)


def test_the_home_may_be_removed_after_use(home, start):
    start().close(wait_s=10)
    until(lambda: not processes(home))
    shutil.rmtree(home)
    assert start().started
