"""Reads as much of the Dockerfile's language as taskd's own uses; anything else is an error."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

CHECKOUT = Path(__file__).parents[2]
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Step(NamedTuple):
    """One instruction: its word, its options (`--from=builder`) and the rest of its text."""

    word: str
    options: Mapping[str, str]
    text: str

    @property
    def argv(self) -> list[str]:
        """The exec form, a JSON list.

        Raises:
            ValueError: it is the shell form, in which a shell would be process 1.
        """
        argv = json.loads(self.text)
        assert isinstance(argv, list)
        return argv


@dataclass(slots=True)
class Stage:
    """One FROM with what follows."""

    base: str
    name: str
    steps: list[Step] = field(default_factory=list)

    def all(self, word: str) -> list[Step]:
        return [step for step in self.steps if step.word == word]

    def the(self, word: str) -> Step:
        [step] = self.all(word)
        return step


@dataclass(slots=True)
class Config:
    """The configuration of an image."""

    env: dict[str, str] = field(default_factory=lambda: {"PATH": PATH})
    labels: dict[str, str] = field(default_factory=dict)
    user: str = "0:0"
    directory: str = "/"
    entrypoint: list[str] = field(default_factory=list)
    cmd: list[str] = field(default_factory=list)
    health: list[str] = field(default_factory=list)
    health_options: Mapping[str, str] = field(default_factory=dict)
    stop_signal: str = "SIGTERM"

    def apply(self, step: Step) -> bool:
        """Take what only describes; False when the instruction must be carried out."""
        match step.word:
            case "ENV":
                self.env |= _pairs(expand(step.text, self.env))
            case "LABEL":
                self.labels |= _pairs(step.text)
            case "USER":
                self.user = step.text
            case "WORKDIR":
                self.directory = step.text
            case "STOPSIGNAL":
                self.stop_signal = step.text
            case "ENTRYPOINT":
                self.entrypoint = step.argv
            case "CMD":
                self.cmd = step.argv
            case "HEALTHCHECK":
                self.health = step.argv
                self.health_options = step.options
            case _:
                return False
        return True


def config_of(stage: Stage) -> Config:
    """The config after all instructions of a stage."""
    made = Config()
    for step in stage.steps:
        made.apply(step)
    return made


def read(text: str) -> list[Stage]:
    """The stages of a Dockerfile."""
    arguments: dict[str, str] = {}
    stages: list[Stage] = []
    for line in _whole_lines(text):
        word, _, rest = line.partition(" ")
        if word == "ARG" and not stages:
            arguments |= _pairs(rest)
        elif word == "FROM":
            base, _, name = expand(rest, arguments).partition(" AS ")
            stages.append(Stage(base, name))
        else:
            stages[-1].steps.append(_step(word, rest.strip()))
    return stages


def _whole_lines(text: str) -> list[str]:
    """Instructions, each on one line: comments are dropped, also between continued lines."""
    kept = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\s*\\\n\s*", " ", "\n".join(kept))
    return [line.strip() for line in joined.splitlines() if line.strip()]


def _step(word: str, rest: str) -> Step:
    options = {}
    while found := re.match(r"--([a-z-]+)=(\S+)\s+", rest):
        options[found[1]] = found[2]
        rest = rest[found.end() :]
    if word == "HEALTHCHECK":
        rest = rest.removeprefix("CMD ")
    if word not in {
        *("RUN", "COPY", "ENV", "LABEL", "USER", "WORKDIR"),
        *("STOPSIGNAL", "ENTRYPOINT", "CMD", "HEALTHCHECK"),
    }:
        raise ValueError(f"{word}: this reader does not know it")
    return Step(word, options, rest)


def _pairs(text: str) -> dict[str, str]:
    return dict(each.split("=", 1) for each in shlex.split(text))


def expand(text: str, values: Mapping[str, str]) -> str:
    """Replace `$NAME` and `${NAME}`; an unknown name is empty, as in docker."""
    return re.sub(r"\$(?:\{(\w+)\}|(\w+))", lambda m: values.get(m[1] or m[2], ""), text)


class Ignore:
    """The rules of a .dockerignore: the last that matches a path, or a parent of it, decides."""

    def __init__(self, text: str) -> None:
        lines = (line.strip() for line in text.splitlines())
        self._rules = [line for line in lines if line and not line.startswith("#")]

    def __call__(self, path: str) -> bool:
        """Whether a path of the context, relative to its top, stays out."""
        ignored = False
        parts = path.split("/")
        for rule in self._rules:
            wanted = rule.removeprefix("!").strip("/")
            if any(_matches("/".join(parts[:end]), wanted) for end in range(1, len(parts) + 1)):
                ignored = not rule.startswith("!")
        return ignored


def _matches(path: str, rule: str) -> bool:
    deep = rule.removeprefix("**/")
    if deep != rule:
        return fnmatchcase(path.rpartition("/")[2], deep)
    return path.count("/") == rule.count("/") and fnmatchcase(path, rule)


def context(top: Path = CHECKOUT) -> list[str]:
    """The files that `docker build` would send, relative to the top."""
    ignored = Ignore((top / ".dockerignore").read_text(encoding="utf-8"))
    return sorted(_walk(top, "", ignored))


def _walk(top: Path, under: str, ignored: Ignore) -> list[str]:
    found = []
    for each in (top / under).iterdir():
        path = f"{under}/{each.name}" if under else each.name
        # An excluded directory contains no included file: our rules name whole directories.
        if not ignored(path):
            found += _walk(top, path, ignored) if each.is_dir() else [path]
    return found


def ours() -> list[Stage]:
    """The stages of taskd's own Dockerfile."""
    return read((CHECKOUT / "Dockerfile").read_text(encoding="utf-8"))
