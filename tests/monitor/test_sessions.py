"""The cookie of a browser: who gets it, what it is good for, and what it is not."""

import aiohttp
import pytest
from yarl import URL

from .monitors import TOKEN, Monitor, Monitors, Scene


async def log_on(browser: aiohttp.ClientSession, monitor: Monitor, *, token: str = TOKEN) -> aiohttp.ClientResponse:
    return await browser.post("/session", json={"token": token}, headers={"Origin": monitor.url})


def browser_of(monitor: Monitor) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(monitor.url, cookie_jar=aiohttp.CookieJar(unsafe=True))


async def test_the_token_is_exchanged_for_a_cookie_that_lets_the_page_in(monitors: Monitors, scene: Scene) -> None:
    monitor = await monitors.start()
    async with browser_of(monitor) as browser:
        assert (await browser.get("/v1/jobs")).status == 401
        answer = await log_on(browser, monitor)
        assert answer.status == 204
        (cookie,) = answer.cookies.values()
        assert (cookie["httponly"], cookie["samesite"], cookie["path"]) == (True, "Strict", "/")
        assert TOKEN not in cookie.value
        assert (await browser.get("/v1/jobs")).status == 200

        assert (await browser.delete("/session", headers={"Origin": monitor.url})).status == 204
        assert (await browser.get("/v1/jobs")).status == 401


async def test_all_monitors_of_a_pool_accept_the_cookie_and_another_pool_does_not(
    monitors: Monitors, scene: Scene
) -> None:
    first, second = await monitors.start(), await monitors.start()
    async with browser_of(first) as browser:
        await log_on(browser, first)
        cookies = {cookie.key: cookie.value for cookie in browser.cookie_jar}
    async with aiohttp.ClientSession(cookies=cookies) as browser:
        assert (await browser.get(f"{second.url}/v1/jobs")).status == 200
    other = await monitors.start(token="a-token-of-another-pool")
    async with aiohttp.ClientSession(cookies=cookies) as browser:
        assert (await browser.get(f"{other.url}/v1/jobs")).status == 401


@pytest.mark.parametrize("token", ["wrong", TOKEN + "x"])
async def test_a_wrong_token_gets_no_cookie(monitors: Monitors, scene: Scene, token: str) -> None:
    monitor = await monitors.start()
    async with browser_of(monitor) as browser:
        answer = await log_on(browser, monitor, token=token)
        assert answer.status == 401
        assert not answer.cookies
        assert (await answer.json())["detail"].startswith("wrong token")


@pytest.mark.parametrize("origin", ["https://pool.example.org", "http://pool.example.org", "https://[2001:db8::1]"])
async def test_a_pool_at_the_default_port_lets_its_page_in(monitors: Monitors, scene: Scene, origin: str) -> None:
    monitor = await monitors.start()
    headers = {"Origin": origin, "Host": origin.partition("://")[2]}
    async with browser_of(monitor) as browser:
        assert (await browser.post("/session", json={"token": TOKEN}, headers=headers)).status == 204
        assert (await browser.delete("/session", headers=headers)).status == 204
        for other in ("https://pool.example.org:8443", "https://example.org", "https://[2001:db8::1]:80"):
            assert (await browser.delete("/session", headers={**headers, "Origin": other})).status == 401


@pytest.mark.parametrize("origin", [None, "null", "http://127.0.0.1:1", "https://elsewhere.example", "http://[::1"])
async def test_what_another_site_makes_a_browser_send_changes_nothing(
    monitors: Monitors, scene: Scene, origin: str | None
) -> None:
    monitor = await monitors.start()
    headers = {"Origin": origin} if origin else {}
    async with browser_of(monitor) as browser:
        await log_on(browser, monitor)
        for method, path in (("PUT", "/v1/policy"), ("POST", "/v1/pool/suspend"), ("DELETE", "/session")):
            answer = await browser.request(method, path, json={}, headers=headers)
            assert answer.status == 401, (method, path)
            assert "must come from the page" in (await answer.json())["detail"]
        assert (await browser.post("/session", json={"token": TOKEN}, headers=headers)).status == 401


async def test_a_cookie_that_is_not_the_pools_is_as_good_as_none(monitors: Monitors, scene: Scene) -> None:
    monitor = await monitors.start()
    async with browser_of(monitor) as browser:
        await log_on(browser, monitor)
        (name,) = (cookie.key for cookie in browser.cookie_jar)
        for value in ("0" * 64, "", TOKEN, "\xe9"):
            browser.cookie_jar.clear()
            browser.cookie_jar.update_cookies({name: value}, URL(monitor.url))
            assert (await browser.get("/v1/jobs")).status == 401


async def test_a_request_with_a_token_is_judged_by_the_token(monitors: Monitors, scene: Scene) -> None:
    monitor = await monitors.start()
    async with browser_of(monitor) as browser:
        await log_on(browser, monitor)
        assert (await browser.get("/v1/jobs", headers={"Authorization": "Bearer wrong"})).status == 401
