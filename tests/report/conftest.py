"""One headless browser for all tests of pages, where there is one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from . import browser as browsers


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[browsers.Browser]:
    program = browsers.find()
    if program is None:
        pytest.skip("no Chromium here: install chromium to test pages in a browser")
    opened = browsers.Browser(program, tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()
