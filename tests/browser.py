"""A real browser that looks at the page of a real monitor."""

import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Browser, ConsoleMessage, Page, async_playwright, expect

CHROMIUM = shutil.which("chromium")
PICTURES = os.environ.get("PAGE_PICTURES")
"""The folder in which the tests keep pictures of what they see, for people: `make screenshots`."""
DESKTOP = {"width": 1280, "height": 900}
LAUNCH_MILLISECONDS = 120_000
expect.set_options(timeout=30_000)  # a page shows what it has to when it gets there, on a busy machine later
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine: install Debian's package")


@dataclass
class Tab:
    """A page, and what went wrong in it."""

    page: Page
    faults: list[str] = field(default_factory=list)

    async def open(self, url: str, *, token: str) -> None:
        """Log on by the link that holds the token."""
        await self.page.goto(f"{url}/#token={token}")
        await self.page.wait_for_selector(".tile")

    async def text(self, selector: str) -> str:
        return " ".join((await self.page.inner_text(selector)).split())

    async def waits_for(self, selector: str, text: str) -> None:
        await self.page.locator(selector, has_text=text).first.wait_for()

    async def shows(self, selector: str, *texts: str) -> None:
        """Wait until the only element that fits the selector has all of these texts."""
        for text in texts:
            await expect(self.page.locator(selector)).to_contain_text(text, use_inner_text=True)

    async def picture(self, name: str) -> None:
        """Keep a picture of the page, as it is and on a desktop, if somebody asks for it: ``make screenshots``."""
        if not PICTURES:
            return
        Path(PICTURES).mkdir(parents=True, exist_ok=True)
        size = self.page.viewport_size
        await self.page.mouse.move(0, 0)  # over nothing that would look chosen
        for prefix, viewport in (("desktop", DESKTOP), ("phone", size)):
            if viewport is not None and (prefix == "desktop" or viewport["width"] < 500):
                await self.page.set_viewport_size(viewport)  # type: ignore[arg-type]
                await self.page.wait_for_timeout(400)
                await self.page.screenshot(path=Path(PICTURES) / f"{prefix}-{name}.png", full_page=True)
        list_pictures(Path(PICTURES))


def list_pictures(folder: Path) -> None:
    """Write ``index.html``, which shows all pictures of the folder."""
    shown = "\n".join(
        f'<figure><figcaption>{file.stem}</figcaption><img src="{file.name}" alt="{file.stem}" width="45%"></figure>'
        for file in sorted(folder.glob("*.png"))
    )
    (folder / "index.html").write_text(f"<!doctype html><title>Pictures of the page</title>\n{shown}\n")


@asynccontextmanager
async def browsing() -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS, timeout=LAUNCH_MILLISECONDS)
        yield browser
        await browser.close()


@asynccontextmanager
async def tab(browser: Browser, **options: Any) -> AsyncIterator[Tab]:
    """A new tab with cookies of its own; what its scripts complain about is in ``faults``."""
    context = await browser.new_context(**options)
    made = Tab(await context.new_page())

    def on_console(message: ConsoleMessage) -> None:
        if message.type == "error":
            made.faults.append(message.text)

    made.page.on("console", on_console)
    made.page.on("pageerror", lambda error: made.faults.append(str(error)))
    yield made
    await context.close()
