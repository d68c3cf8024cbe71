"""The HTTP API of docs/api.md: requests in, models of `resile_shared.http.api` out.

application.py  all routes; the server
problems.py     every failure as a problem document
access.py       which requests are allowed
sessions.py     browsers that have logged on
page.py         the page, which is the files of `resile_monitor/page/`
requests.py     reading bodies, parameters and headers
pool.py         the pool as handlers see it: the projection, and commands to scheduler and registry
jobs.py, hosts.py, packages.py, downloads.py, events.py, logs.py    the handlers
following.py    server-sent events
"""
