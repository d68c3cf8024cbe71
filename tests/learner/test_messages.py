from resile_learner.messages import Member, Order


def test_an_order_says_which_members_share_a_host() -> None:
    hosts = ["10.0.0.2", "10.0.0.1", "10.0.0.2", "10.0.0.3"]
    members = tuple(Member(worker=worker, host=host, port=1) for worker, host in zip([7, 3, 4, 9], hosts, strict=True))
    order = Order(job="job-1", generation=1, members=members, secret="s")
    assert list(order.hosts.items()) == [("10.0.0.2", (7, 4)), ("10.0.0.1", (3,)), ("10.0.0.3", (9,))]
