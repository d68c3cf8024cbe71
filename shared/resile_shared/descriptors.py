"""How many files and connections a process may have open."""

import resource

ENOUGH = 1 << 20


def raise_descriptor_limit() -> None:
    """Raise the limit of this process, and of those that it starts, as far as the system allows, to 1,048,576 at most.

    Most systems start a process with 1,024, for the sake of programs that call `select`, and allow far more.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
