"""The monitor: the window on the pool. It decides nothing, and stores only what it makes of reports and events.

Reads the buckets `jobs` and `hosts`, heartbeats, spans of changes, and the streams `events`, `reports` and `logs`;
serves them as the HTTP API of docs/api.md, and sends what people ask for as commands to scheduler and registry.
Packages, models and output go through the object storage. Any number of monitors may run, and each may end at any
moment.

projection.py  what is known of jobs and hosts; pure
views.py       how a job is shown; pure
curves.py      the curves of a job, thinned; pure
curve_store.py keeps them in the bucket `curves`
steps.py       a number over time, thinned; pure
slot_history.py  how many slots each job held over time; pure
slot_store.py  keeps this history in the buckets `jobslots` and `poolslots`
job_store.py   keeps a value derived from messages for each job, by several monitors
metrics.py     what a monitor measures of itself
kept_traces.py the newest traces of changes; pure
trace_urls.py  where a collector shows a trace; pure
changes.py     the changes of a job, from its history and these traces; pure
service.py     keeps the projection up to date
api/           the HTTP API
"""
