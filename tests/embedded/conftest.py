import shutil
import tempfile
from pathlib import Path

import pytest
from embedded_helpers import FAST, PRIVATE, User, gone, processes, until

from taskd import embedded
from taskd.embedded import data_directory
from taskd.errors import EmbeddedError


@pytest.fixture
def users(clean_up):  # ends them before that checks what is left
    """Makes user processes; each ends with the test."""
    made = []

    def make(*args, **kwargs):
        made.append(User(*args, **kwargs))
        return made[-1]

    yield make
    for user in made:
        user.end()


@pytest.fixture(autouse=True)
def no_settings(monkeypatch):
    for name in PRIVATE:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def template(tmp_path_factory):
    """A data directory, made once: a copy takes less than initdb."""
    with pytest.MonkeyPatch.context() as patch:
        for name in PRIVATE:
            patch.delenv(name, raising=False)
        home = tmp_path_factory.mktemp("template") / "pg"
        try:
            server = embedded.start(home, durable=False)
        except EmbeddedError as error:
            pytest.skip(f"no embedded PostgreSQL here: {error}")
        server.close(wait_s=20)
        assert gone(home)
        return home / "data"


@pytest.fixture
def clean_up():
    """Call it with a home: the test fails if anything still runs in it at the end."""
    homes = []
    yield homes.append
    for home in homes:
        embedded.stop(home)
        until(lambda home=home: not processes(home))
        assert gone(home)
        if home.exists() and (directory := data_directory.socket_directory(home)) != home:
            directory.rmdir()
        shutil.rmtree(home, ignore_errors=True)  # 64 MB each


@pytest.fixture
def empty(tmp_path, clean_up, users):
    """A home in which nothing is yet."""
    home = tmp_path / "pg"
    clean_up(home)
    return home


@pytest.fixture
def home(empty, template):
    """A home with data, not running."""
    empty.mkdir(mode=0o700)
    shutil.copytree(template, empty / "data")
    return empty


@pytest.fixture
def start(home):
    """Start or join in this process; every handle is closed at the end."""
    made = []

    def run(where=home, **options):
        made.append(embedded.start(where, **{**FAST, **options}))
        return made[-1]

    yield run
    for server in made:
        server.close()


@pytest.fixture
def open_directory():
    """A directory that other users may enter, which pytest's own are not."""
    directory = Path(tempfile.mkdtemp(prefix="taskd-test-", dir="/tmp"))
    directory.chmod(0o755)
    yield directory
    shutil.rmtree(directory)
