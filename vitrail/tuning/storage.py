"""Where the processes of a search meet: a folder, a file on a shared disk, or a database."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail import files
from vitrail.decoding import parse_json
from vitrail.display.text import printable
from vitrail.errors import UserError
from vitrail.tuning.locks import JournalLock

if TYPE_CHECKING:
    from optuna.storages import BaseStorage
    from sqlalchemy import Connection

JOURNAL, STUDY_NAME = "study.journal", "vitrail"
SQLITE = "sqlite:///"
# Session locks, which a database releases when the connection of their holder ends.
LOCK, TRY_LOCK, UNLOCK = 0, 1, 2
LOCKS = {
    "postgresql": (
        "SELECT pg_advisory_lock(:key)",
        "SELECT pg_try_advisory_lock(:key)",
        "SELECT pg_advisory_unlock(:key)",
    ),
    "mysql": (
        "SELECT GET_LOCK(CAST(:key AS CHAR), -1)",
        "SELECT GET_LOCK(CAST(:key AS CHAR), 0)",
        "SELECT RELEASE_LOCK(CAST(:key AS CHAR))",
    ),
}
LOCKS["mariadb"] = LOCKS["mysql"]
DRIVERS = {
    "postgresql": "postgresql+psycopg",
    "postgres": "postgresql+psycopg",
    "mysql": "mysql+pymysql",
    "mariadb": "mariadb+pymysql",
}
KINDS = "postgresql://, mysql://, sqlite:///FILE, or the path of a journal file on a shared disk"


class Database:
    """The locks of one study in a database, for processes that share no disk."""

    def __init__(self, url: str, study: str):
        from sqlalchemy import create_engine
        from sqlalchemy.pool import NullPool

        with report_storage_errors(url):
            # a connection for each lock: it is the lock's life
            self.engine = create_engine(url, poolclass=NullPool, isolation_level="AUTOCOMMIT")
            self.study = study
        if self.engine.dialect.name not in LOCKS:
            raise UserError(f"`storage` {hide_password(url)} is not supported; give {KINDS}")

    @contextmanager
    def lock(self, name: str) -> Iterator[None]:
        """Waits for a lock and holds it."""
        with self.engine.connect() as connection:
            self._execute(connection, LOCK, name)
            yield
            self._execute(connection, UNLOCK, name)

    def is_free(self, name: str) -> bool:
        """Whether no process holds a lock."""
        with self.engine.connect() as connection:
            free = self._execute(connection, TRY_LOCK, name)
            if free:
                self._execute(connection, UNLOCK, name)
            return free

    def _execute(self, connection: "Connection", what: int, name: str) -> bool:
        from sqlalchemy import text

        digest = hashlib.sha256(f"vitrail/{self.study}/{name}".encode()).digest()
        key = int.from_bytes(digest[:8], "big", signed=True)
        statement = text(LOCKS[self.engine.dialect.name][what])
        return bool(connection.execute(statement, {"key": key}).scalar())


def name_driver(url: str) -> str:
    """The URL with the driver that Vitrail's extras install, unless it names one."""
    kind, separator, rest = url.partition("://")
    return f"{DRIVERS.get(kind, kind)}{separator}{rest}"


def find_locks(folder: Path, url: str | None) -> Path | Database:
    """Where the locks of a search are: in its folder, beside the file that is shared, or in it."""
    if url is None:
        return folder
    file = shared_file(url)
    if file is None:
        return Database(url, folder.name)
    locks = file.with_name(f".{file.name}.{folder.name}")
    try:
        locks.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"`storage` {file} cannot be written: {files.describe_os_error(error)}"
        ) from error
    return locks


def shared_file(url: str) -> Path | None:
    """The file that `url` names; None for a database server."""
    if url.startswith(SQLITE):
        return Path(url.removeprefix(SQLITE)).absolute()
    return None if "://" in url else files.expand_user(url).absolute()


def open_storage(folder: Path, url: str | None) -> "tuple[BaseStorage, str]":
    """Optuna's storage, and the name of the study in it."""
    if url is None:
        return open_journal(folder / JOURNAL), STUDY_NAME
    if "://" not in url:
        file = files.expand_user(url).absolute()
        if file.is_dir():
            raise UserError(f"`storage` {file} is a folder; give the path of a file")
        return open_journal(file), folder.name
    from optuna.storages import RDBStorage
    from sqlalchemy.pool import NullPool

    with report_storage_errors(url):
        # a new connection each time: trials take minutes, and idle connections get cut
        return RDBStorage(url, engine_kwargs={"poolclass": NullPool}), folder.name


def open_journal(path: Path) -> "BaseStorage":
    """A journal file; a damaged one is an error."""
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    with JournalLock(path):
        check_journal(path)
    lock: Any = JournalLock(path)
    try:
        return JournalStorage(JournalFileBackend(str(path), lock_obj=lock))
    except (KeyError, ValueError, TypeError, AttributeError, AssertionError) as error:
        raise damaged_study_error(path, repr(error)) from error


def check_journal(path: Path) -> None:
    """Raises a UserError for a line that is not a JSON object."""
    if not path.exists():
        return
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            valid = isinstance(parse_json(line), dict)
        except UserError:
            valid = False
        if not valid:
            raise damaged_study_error(path, f"line {number}")


def damaged_study_error(path: Path, why: str) -> UserError:
    return UserError(
        f"{path} is damaged ({why:.100}), but the runs in {path.parent / 'trials'} are not; "
        f"restore it from a copy, or start a new search with another `out`"
    )


@contextmanager
def report_storage_errors(url: str | None) -> Iterator[None]:
    """Turns the errors of a database into one line, without its password."""
    if url is None or "://" not in url:
        yield
        return
    from optuna.exceptions import StorageInternalError
    from sqlalchemy import exc

    try:
        yield
    except (exc.ArgumentError, exc.NoSuchModuleError) as error:
        raise UserError(f"`storage` {hide_password(url)} is unknown; give {KINDS}") from error
    except ImportError as error:
        driver = "vitrail[mysql]" if url.startswith(("mysql", "mariadb")) else "vitrail[postgres]"
        raise UserError(
            f"`storage` {hide_password(url)} needs a driver, which is not installed; "
            f"pip install '{driver}'"
        ) from error
    except (exc.SQLAlchemyError, StorageInternalError) as error:
        raise UserError(
            f"the database {hide_password(url)} cannot be used: {first_line(error)}; all runs are "
            f"kept, so start the same command again once it can"
        ) from error


def first_line(error: BaseException) -> str:
    """The cause of a database error in a few words."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return printable(lines[0])[:200] if lines else type(error).__name__


def hide_password(url: str) -> str:
    from sqlalchemy import exc, make_url

    try:
        return printable(make_url(url).render_as_string(hide_password=True))
    except exc.ArgumentError:
        return printable(url.rpartition("@")[2])
