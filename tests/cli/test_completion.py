"""`taskd completion`: what a shell makes of the script, where that shell is."""

import os
import pty
import select
import shutil
import subprocess
import sys
import time

import pytest

from .conftest import ROOT

WITHIN_S = 30.0


@pytest.fixture
def environ(home):
    """A shell's environment in which `taskd` is a command."""
    command = home / "bin/taskd"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m taskd "$@"\n')
    command.chmod(0o755)
    kept = {"HOME": str(home), "TERM": "dumb", "PYTHONPATH": str(ROOT)}
    return kept | {"PATH": f"{command.parent}:{os.environ['PATH']}"}


class Terminal:
    """An interactive shell, and what is on its screen."""

    def __init__(self, command, environ):
        self.end, inner = pty.openpty()
        self.screen = ""
        self.shell = subprocess.Popen(
            command, env=environ, stdin=inner, stdout=inner, stderr=inner, start_new_session=True
        )
        os.close(inner)

    def type(self, keys, shows):
        """Press keys; wait until the new text on the screen contains `shows`."""
        self.screen = ""
        os.write(self.end, keys.encode())
        deadline = time.monotonic() + WITHIN_S
        while shows not in self.screen:
            ready, _, _ = select.select([self.end], [], [], deadline - time.monotonic())
            assert ready, self.screen
            self.screen += os.read(self.end, 4096).decode(errors="replace")

    def close(self):
        self.shell.kill()
        self.shell.wait()
        os.close(self.end)


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_bash_completes_commands_options_and_choices(environ):
    terminal = Terminal(["bash", "--norc", "--noprofile", "-i"], environ)
    try:
        terminal.type('eval "$(taskd completion bash)"; echo re""ady\n', shows="\nready")
        terminal.type("taskd jo\t", shows="jobs ")
        terminal.type("sh\t", shows="show ")
        terminal.type("--js\t", shows="--json ")
        terminal.type("\x15taskd run --log-format c\t", shows="console ")
    finally:
        terminal.close()


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_another_shell_accepts_its_script(taskd, environ, shell):
    script = taskd("completion", shell).stdout
    assert f"_TASKD_COMPLETE={shell}_complete" in script
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    subprocess.run([shell, "--no-execute", "-c", script], check=True, env=environ)


def test_completing_needs_no_database(environ):
    asked = {"_TASKD_COMPLETE": "bash_complete", "COMP_WORDS": "taskd queues pa", "COMP_CWORD": "2"}
    nowhere = {"TASKD_DSN": "postgresql://nobody@127.0.0.1:1/nowhere"}
    done = subprocess.run(
        ["taskd"],
        env=environ | asked | nowhere,
        capture_output=True,
        text=True,
        check=True,
        timeout=WITHIN_S,
    )
    assert (done.stdout, done.stderr) == ("plain,pause\n", "")


def test_another_shell_is_a_wrong_command_line(nowhere):
    assert "'bash', 'zsh', 'fish'" in nowhere("completion", "tcsh", code=2).stderr
