"""One simulated world: the real cores and shells of all services and workers, with only their surroundings simulated.

loop.py       virtual time, and processes that crash and freeze between any two steps
nats.py       a client of the simulated bus, in place of the library's
server.py     the simulated nats-server with JetStream
worker.py     worker processes, from their bootstrap to their exit, and the fork server that starts them
threads.py    their threads: code that blocks, on the event loop
sockets.py    their connections: slow, cut, one-way, reset
storage.py    the object store
training.py   a training call whose arithmetic is a hash
services.py   registry, schedulers and agents, each in a process that is restarted when it ends
users.py      people who submit, pause, resume, stop, drain and change priorities
faults.py     what a seed does to the world
checks.py     the promises, checked at every step
sharing.py    those about the policy and tenants
knowledge.py  what the leader believes, compared with what is so
world.py      all of it, run from one seed
"""
