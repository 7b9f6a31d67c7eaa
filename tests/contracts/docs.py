"""Runs the code blocks of the pages: README.md and all pages under taskd/docs.

taskd/docs/README.md has the rules. The blocks of a page run from the first to the last, in a
directory and on a database of its own. Commands of taskd and Python run in processes that a server
of this module forks, so that they do not import all modules again.
"""

from __future__ import annotations

import ast
import configparser
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
import time
import tomllib
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import click
import psycopg
import yaml

from tests.contracts.blocks import (
    CHECKOUT,
    Block,
    Wrong,
    check_command,
    plain,
    simple,
    taskd_commands,
)
from tests.contracts.docs_processes import FORKS, run_command, run_import, run_python
from tests.system import dockerfile

WITHIN_S = 60.0
# A job without a notification is found by a poll; the machine may be slow.
READY_WITHIN_S = 45.0
ENDED_BY_US = {0, 130, 143, -signal.SIGTERM, -signal.SIGINT, -signal.SIGKILL}


class Page:
    """A reader who does what a page says, from its first block to its last."""

    def __init__(
        self, home: Path, dsn: str, environ: Mapping[str, str], stand_ins: Mapping[str, str]
    ) -> None:
        self.home, self.dsn, self.stand_ins = home, dsn, dict(stand_ins)
        self.environ = dict(environ) | {
            "TASKD_DSN": dsn,
            "HOME": str(home),
            "PYTHONPATH": os.pathsep.join([str(home), *sys.path]),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PATH": f"{self._programs()}{os.pathsep}{os.environ['PATH']}",
            "COLUMNS": "120",
            "TASKD_LOG_FORMAT": "console",  # as on the terminal of a reader
        }
        self.said = ""
        self._prompt: tuple[Any, Connection] | None = None
        self._going_on: list[tuple[Block, subprocess.Popen[str]]] = []

    def _programs(self) -> Path:
        """A directory with `taskd` and `python` as a reader would call them, and psql."""
        place = self.home / ".programs"
        place.mkdir()
        for name, call in (("taskd", f"{sys.executable} -m taskd"), ("python", sys.executable)):
            (place / name).write_text(f'#!/bin/sh\nexec {call} "$@"\n')
            (place / name).chmod(0o755)
        from taskd.config import Settings
        from taskd.embedded.binaries import pg_binary

        (place / "psql").symlink_to(pg_binary("psql", Settings()))
        return place

    def walk(self, block: Block) -> None:
        """Do what a block says.

        Raises:
            Wrong: it does not do what the page says.
        """
        text = block.text
        for shown, real in self.stand_ins.items():
            text = text.replace(shown, real)
        if "from" in block.marks:
            self._is_in_file(block)
        elif "not run" in block.marks:
            self._reads(block)
        elif block.language in {"", "mermaid"}:
            pass  # a picture
        elif block.language == "text":
            self._was_said(block)
        else:
            if block.file:
                self._write(block, text)
            getattr(self, f"_{block.language}")(block, text)

    def close(self) -> None:
        """End what still goes on."""
        for block, process in self._going_on:
            process.terminate()
            code = process.wait(WITHIN_S)
            if code not in ENDED_BY_US:
                raise Wrong(f"{block.place}: what goes on ended with {code}")
        self._leave_prompt()

    # Blocks to read only.

    def _is_in_file(self, block: Block) -> None:
        file = (CHECKOUT / block.marks["from"]).read_text(encoding="utf-8")
        source = block.text.partition("\n")[2] if block.file else block.text
        for part in source.strip().split("\n\n"):
            if not any(textwrap.indent(part, " " * spaces) in file for spaces in (0, 4, 8)):
                raise Wrong(f"{block.place}: this is not in {block.marks['from']}:\n{part}")

    def _reads(self, block: Block) -> None:
        """Check that a block that cannot run is at least valid in its language."""
        try:
            if block.language == "python":
                flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
                compile(block.text, block.place, "exec", flags=flags, dont_inherit=True)
            elif block.language == "sh":
                subprocess.run(["bash", "-n"], input=block.text, text=True, check=True)
                for command in taskd_commands(block.text):
                    check_command(command)
            elif block.language in {"toml", "yaml", "json", "ini", "dockerfile"}:
                getattr(self, f"_{block.language}")(block, block.text)
        except (SyntaxError, subprocess.CalledProcessError, ValueError, click.UsageError) as error:
            raise Wrong(f"{block.place}: {error}") from error

    def _was_said(self, block: Block) -> None:
        """Check that the lines of a text are among the lines that the block before it has
        printed."""
        rest = [plain(line) for line in self.said.splitlines()]
        for line in filter(None, map(plain, block.text.splitlines())):
            wanted = re.compile(".*".join(map(re.escape, line.split("..."))))
            found = next((each for each in rest if wanted.fullmatch(each)), None)
            if found is not None:
                rest.remove(found)
            elif line != "...":
                raise Wrong(f"{block.place}: {line!r} was not said, but\n{self.said}")

    # What a reader does.

    def _write(self, block: Block, text: str) -> None:
        assert block.file
        file = self.home / block.file
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.exists():
            self._leave_prompt()  # it has imported the earlier version of the module
        file.write_text(text, encoding="utf-8")

    def _python(self, block: Block, text: str) -> None:
        if block.file:
            module = block.file.removesuffix(".py").replace("/", ".")
            mine, theirs = FORKS.Pipe()
            args = (module, str(self.home), self.environ, theirs)
            process = FORKS.Process(target=run_import, args=args)
            process.start()
            error = mine.recv() if mine.poll(WITHIN_S) else "no answer"
            process.join()
            self._check(block, error or "")
            return
        if self._prompt is None:
            mine, theirs = FORKS.Pipe()
            process = FORKS.Process(
                target=run_python, args=(str(self.home), self.environ, theirs), daemon=True
            )
            process.start()
            self._prompt = process, mine
        _, pipe = self._prompt
        pipe.send((text, block.place, self.environ))
        if not pipe.poll(WITHIN_S):
            raise Wrong(f"{block.place}: it takes over {WITHIN_S} s")
        self.said, error = pipe.recv()
        self._check(block, error)

    def _leave_prompt(self) -> None:
        if self._prompt is not None:
            process, pipe = self._prompt
            self._prompt = None
            pipe.send(None)
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()

    def _check(self, block: Block, error: str) -> None:
        wanted = block.marks.get("fails")
        if wanted is None and error:
            raise Wrong(f"{block.place}: {error}")
        if wanted is not None and wanted not in error:
            raise Wrong(f"{block.place}: it should fail with {wanted!r}, but: {error or 'it ran'}")

    def _sql(self, block: Block, text: str) -> None:
        error, said = "", []
        try:
            with psycopg.connect(self.dsn, autocommit=True) as connection:
                cursor = connection.execute(text.encode())
                while True:
                    if cursor.description:
                        said.append(" | ".join(column.name for column in cursor.description))
                        said += [" | ".join(_shown(each) for each in row) for row in cursor]
                    if not cursor.nextset():
                        break
        except psycopg.Error as failed:
            error = str(failed)
        self.said = "\n".join(said)
        self._check(block, error)

    def _sh(self, block: Block, text: str) -> None:
        for command in taskd_commands(text):
            try:
                check_command(command)
            except click.UsageError as error:
                if block.marks.get("exit code") != "2":
                    raise Wrong(f"{block.place}: {command}: {error.message}") from error
        if "goes on" in block.marks:
            self._go_on(block, text)
            return
        self.said = ""
        lines = [simple(line) for line in text.splitlines()]
        code = self._one_by_one(lines) if None not in lines else self._bash(text)
        wanted = int(block.marks.get("exit code", "0"))
        if code != wanted:
            raise Wrong(f"{block.place}: exit code {code}, not {wanted}:\n{self.said}")

    def _one_by_one(self, lines: list[list[str] | None]) -> int:
        """Lines that need no shell."""
        for words in filter(None, lines):
            if words[0] == "export":
                name, _, value = words[1].partition("=")
                self.environ[name] = value
                continue
            args = _ending(words[1:])
            out, err = self.home / ".out", self.home / ".err"
            process = FORKS.Process(
                target=run_command, args=(args, str(self.home), self.environ, str(out), str(err))
            )
            process.start()
            process.join(WITHIN_S)
            if process.exitcode is None:
                process.kill()
                process.join()
            self.said += out.read_text() + err.read_text()
            if process.exitcode:
                return process.exitcode
        return 0

    def _bash(self, text: str) -> int:
        state = self.home / ".state"
        # `taskd run` ends when there is nothing left to do, as a reader would end it by Ctrl-C.
        lines = [_ending_line(line) for line in text.splitlines()]
        script = "\n".join(["set -euo pipefail", *lines, f"env -0 > {shlex.quote(str(state))}"])
        ended = subprocess.run(
            ["bash", "-c", script],
            cwd=self.home,
            env=self.environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=WITHIN_S,
            check=False,
        )
        self.said += ended.stdout
        if ended.returncode == 0:
            pairs = (each.partition("=") for each in state.read_text().split("\0") if "=" in each)
            self.environ = {name: value for name, _, value in pairs}
        return ended.returncode

    def _go_on(self, block: Block, text: str) -> None:
        """Start a program that does not end by itself, and wait for the output that the marker
        names."""
        *before, last = text.strip().splitlines()
        # A log of its own, for its pipe would be full at last.
        log = self.home / f".goes-on-{len(self._going_on)}"
        with log.open("w") as output:
            process = subprocess.Popen(
                ["bash", "-c", "\n".join(["set -e", *before, f"exec {last}"])],
                cwd=self.home, env=self.environ, stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, text=True,
            )  # fmt: skip
        self._going_on.append((block, process))
        give_up = time.monotonic() + READY_WITHIN_S
        while block.marks["goes on"] not in log.read_text():
            if process.poll() is not None or time.monotonic() > give_up:
                raise Wrong(
                    f"{block.place}: {block.marks['goes on']!r} was not said:\n{log.read_text()}"
                )
            time.sleep(0.02)
        self.said = log.read_text()

    def _toml(self, block: Block, text: str) -> None:
        read = tomllib.loads(text)
        if block.file in {"taskd.toml", "pyproject.toml"}:
            from taskd import config

            place = self.home / ".settings"
            place.mkdir(exist_ok=True)
            (place / block.file).write_text(text)
            # An unknown or unreadable block is an error.
            config.load(environ={}, directory=place)
            (place / block.file).unlink()
        assert read, block.place

    def _yaml(self, block: Block, text: str) -> None:
        assert list(yaml.safe_load_all(text)), block.place

    def _json(self, block: Block, text: str) -> None:
        for line in text.splitlines() if text.startswith("{") else [text]:
            json.loads(line)

    def _ini(self, block: Block, text: str) -> None:
        configparser.ConfigParser(strict=False, interpolation=None).read_string(text)

    def _dockerfile(self, block: Block, text: str) -> None:
        dockerfile.read(text)


def _shown(value: object) -> str:
    return "" if value is None else str(value)


def _ending(args: list[str]) -> list[str]:
    return [*args, "--until-empty"] if _goes_on(args) else args


def _goes_on(args: list[str]) -> bool:
    return args[:1] == ["run"] and not {"--until-empty", "--help"} & set(args)


def _ending_line(line: str) -> str:
    found = re.match(r"\s*taskd run\b(?!.*--until-empty)", line)
    return line.replace("taskd run", "taskd run --until-empty", 1) if found else line
