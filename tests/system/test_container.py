"""`taskd` in a container, in short: with this machine's Python, and the Dockerfile's configuration.

The long form builds the image from the Dockerfile: python -m tests.system.container.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system import box, container, dockerfile

LACKS = box.lacks()


@pytest.mark.timeout(180)
@pytest.mark.skipif(bool(LACKS), reason=LACKS)
async def test_a_container_keeps_every_promise_of_the_readme(dsn: str, tmp_path: Path) -> None:
    config = dockerfile.config_of(dockerfile.ours()[-1])
    image = box.of_this_machine(tmp_path / "root", config)
    seen = await container.check(image, dsn, tmp_path)
    print(seen)
    assert not box.mounts_below(tmp_path)
