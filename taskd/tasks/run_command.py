"""The built-in task `run_command`: a program in any language as a handler.

The settings list the allowed commands by name, and a job names one of them. The command reads the
payload of the job as JSON from stdin; its exit code decides the outcome. There is no shell, and no
text of a payload becomes part of a command line.

Each command runs under a small guard process (subprocess_guard.py). The guard ends the command when
the attempt is cancelled or its worker dies, and kills the processes that the command leaves behind.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from taskd.config import Settings, parse_duration_s
from taskd.core.jobs import backoff as backoffs
from taskd.core.jobs.verdicts import Cancel, Fail, Retry, Snooze
from taskd.core.outcomes.results import RESULT_BYTES_MAX, Unstored
from taskd.core.tasks.context import Context
from taskd.core.tasks.task import MAX_ATTEMPTS_DEFAULT, Task
from taskd.errors import ConfigError
from taskd.tasks import command as commands

QUEUE = "commands"
MAX_ATTEMPTS = MAX_ATTEMPTS_DEFAULT
TIMEOUT_S = 3600.0
# How many of the last bytes of stderr become a part of the error. They fit into the reason of a
# job.
ERR_BYTES_MAX = 900
PATH_DEFAULT = "/usr/local/bin:/usr/bin:/bin"
EXIT_DONE, EX_TEMPFAIL = 0, 75
GRACE_S_MAX = 60.0
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,100}")
_VERDICT = re.compile(r"(done|fail|cancel|retry|snooze)(?: (\S+))?")


class CommandFailed(Exception):
    """The command ended with an exit code that means a failure, or by a signal."""


class CommandNotAllowed(Exception):
    """The settings of this worker do not list the command; those of another worker can list it."""


class Command(msgspec.Struct, forbid_unknown_fields=True):
    """An allowed command, as the settings define it.

    Attributes:
        argv: the program and its arguments; no shell parses them.
        cwd: the working directory; by default that of the worker.
        env: additional environment variables.
        pass_env: names of environment variables of the worker that the command receives, too.
        exits: meanings of exit codes: `retry`, `retry 30s`, `snooze 5m`, `cancel`, `fail`, `done`.
            0 means `done`. 75 means `retry` if it is not listed. Any other code that is not listed
            fails the attempt.
        grace: time between SIGTERM and SIGKILL.
    """

    argv: Annotated[list[str], Meta(min_length=1, max_length=1000)]
    cwd: str | None = None
    env: dict[str, str] = {}
    pass_env: list[str] = []
    exits: dict[str, str] = {}
    grace: str | float = 3.0

    def checked(self, name: str) -> Command:
        """Return the command with the full path of its program.

        Raises:
            ConfigError: the command cannot run as configured.
        """
        program = shutil.which(self.argv[0], path=os.environ.get("PATH", PATH_DEFAULT))
        if program is None:
            raise ConfigError(f"commands: {name}: {self.argv[0]!r} is not an executable program")
        if any("\0" in each for each in (*self.argv, *self.env, *self.env.values())):
            raise ConfigError(f"commands: {name}: it contains the character U+0000")
        if self.cwd is not None and not Path(self.cwd).is_dir():
            raise ConfigError(f"commands: {name}: cwd: {self.cwd!r} is not a directory")
        for code, word in self.exits.items():
            self._check_exit(name, code, word)
        if not 0 <= self.grace_s <= GRACE_S_MAX:
            raise ConfigError(f"commands: {name}: grace: write 0s to {GRACE_S_MAX:.0f}s")
        return msgspec.structs.replace(
            self,
            argv=[str(Path(program).absolute()), *self.argv[1:]],
            exits={str(EX_TEMPFAIL): "retry"} | self.exits,
        )

    @property
    def grace_s(self) -> float:
        """Return the grace in seconds."""
        return parse_duration_s(str(self.grace))

    def _check_exit(self, name: str, code: str, word: str) -> None:
        found = _VERDICT.fullmatch(word)
        if not (code.isascii() and code.isdigit() and 1 <= int(code) <= 255) or found is None:
            raise ConfigError(
                f"commands: {name}: exits: {code!r} = {word!r}: write an exit code from 1 to 255 "
                "and done, fail, cancel, retry, `retry 30s` or `snooze 5m`"
            )
        if (found[1] == "snooze") != bool(found[2]) and found[1] != "retry":
            raise ConfigError(
                f"commands: {name}: exits: {word!r}: only snooze and retry have a time, and "
                "snooze needs one"
            )
        if found[2]:
            parse_duration_s(found[2])


def allowed(settings: Settings) -> dict[str, Command]:
    """Return the commands of these settings.

    Raises:
        ConfigError: a command is wrong; the message names it.
    """
    found = {}
    for name, given in (settings.commands or {}).items():
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"commands: {name!r}: use 1 to 100 of the characters a-z A-Z 0-9 _ . -"
            )
        try:
            found[name] = msgspec.convert(given, Command).checked(name)
        except (msgspec.ValidationError, ValueError) as error:
            raise ConfigError(f"commands: {name}: {error}") from None
    return found


def task(
    commands_allowed: Mapping[str, Command], *, backoff: backoffs.Backoff = backoffs.DEFAULT
) -> Task[..., Any]:
    """Return the task that runs these commands."""

    async def run_command(
        ctx: Context,
        command: Annotated[str, Meta(max_length=100)],
        payload: dict[str, Any] | None = None,
    ) -> Any:
        """Run one of the commands that the settings allow.

        Args:
            ctx: the attempt.
            command: the name of the command in the settings.
            payload: JSON object that the command reads from stdin.

        Returns:
            The stdout of the command, decoded from JSON; None if stdout is not JSON.

        Raises:
            Retry, Snooze, Cancel, Fail: the settings give the exit code this meaning.
            CommandFailed: the command ended with another exit code, or by a signal.
            CommandNotAllowed: the settings do not list the command.
        """
        chosen = commands_allowed.get(command)
        if chosen is None:
            listed = ", ".join(sorted(commands_allowed)) or "none"
            raise CommandNotAllowed(
                f"{command[:100]!r} is not a command of this worker; it has {listed}"
            )
        ended = await commands.run(
            chosen.argv,
            stdin=msgspec.json.encode(payload or {}),
            env=environment(chosen, ctx),
            cwd=chosen.cwd,
            grace_s=chosen.grace_s,
            out_bytes_max=RESULT_BYTES_MAX,
            err_bytes_max=ERR_BYTES_MAX,
        )
        return result_of(command, chosen, ended)

    return Task(
        run_command, queue=QUEUE, max_attempts=MAX_ATTEMPTS, timeout_s=TIMEOUT_S, backoff=backoff
    )


def environment(command: Command, ctx: Context) -> dict[str, str]:
    """Return the environment of a command, without other variables of the worker (the DSN)."""
    passed = {name: os.environ[name] for name in command.pass_env if name in os.environ}
    return {
        "PATH": os.environ.get("PATH", PATH_DEFAULT),
        "LANG": "C.UTF-8",
        **passed,
        **command.env,
        "TASKD_JOB_ID": str(ctx.job_id),
        "TASKD_ATTEMPT": str(ctx.attempt),
        "TASKD_MAX_ATTEMPTS": str(ctx.max_attempts),
        "TASKD_IDEMPOTENCY_KEY": ctx.idempotency_key,
    }


def result_of(name: str, command: Command, ended: commands.Ended) -> Any:
    """Return the result of a command that succeeded.

    Raises:
        Retry, Snooze, Cancel, Fail, CommandFailed: the command did not succeed; see run_command().
    """
    stderr = ended.err.decode("utf-8", "replace").strip()
    how = f"exit code {ended.code}" if ended.code >= 0 else f"signal {-ended.code}"
    text = f"{name}: {how}: {stderr}" if stderr else f"{name}: {how}"
    word = "done" if ended.code == EXIT_DONE else command.exits.get(str(ended.code), "")
    found = _VERDICT.fullmatch(word)
    delay_s = parse_duration_s(found[2]) if found and found[2] else None
    match found[1] if found else "":
        case "done":
            return _result(ended)
        case "retry":
            raise Retry(delay_s, text)
        case "snooze":
            raise Snooze(delay_s or 0.0)
        case "cancel":
            raise Cancel(text)
        case "fail":
            raise Fail(text)
    raise CommandFailed(text)


def _result(ended: commands.Ended) -> Any:
    """Return stdout decoded from JSON; Unstored if stdout is too long, None if it is not JSON."""
    if ended.out_bytes > len(ended.out):
        return Unstored(f"stdout has {ended.out_bytes:,} bytes; the limit is {RESULT_BYTES_MAX:,}")
    try:
        return msgspec.json.decode(ended.out)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None
