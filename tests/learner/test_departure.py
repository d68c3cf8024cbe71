"""How a worker leaves: confirmations, and links that are closed with nothing lost."""

from resile_learner.collectives.spec import Tag

from .link_group import Node, check_round, make_work, start, wait


def test_a_leaver_waits_for_the_confirmation_of_every_member_that_is_still_there(connect_group) -> None:
    group = connect_group(4)
    tag = Tag(1, 5)
    waiting = start(lambda: group.nodes[0].leave.await_confirmations([1, 2, 3, 8], tag))
    group.nodes[1].leave.confirm(0, tag)
    group.nodes[2].leave.confirm(0, Tag(1, 4))
    group.nodes[2].leave.confirm(0, Tag(1, 6))
    assert not waiting.done()
    group.nodes[3].poller.remove(0)
    wait([waiting])


def test_a_confirmation_arrives_behind_the_end_of_a_round(connect_group) -> None:
    group = connect_group(2)
    for number in range(10):
        tag = Tag(1, number)
        check_round(group, [0, 1], tag, make_work(2, [50_000]))
        group.nodes[1].leave.confirm(0, tag)
        group.nodes[0].leave.await_confirmations([1], tag)


def test_closing_gracefully_ends_when_all_peers_have_closed_their_ends(connect_group) -> None:
    group = connect_group(3)
    check_round(group, [0, 1, 2], Tag(1, 0), make_work(3, [1000]))
    leaving = start(lambda: group.nodes[0].leave.close_gracefully([1, 2]))
    group.nodes[1].poller.remove(0)
    assert not leaving.done()
    staying = start(lambda: group.nodes[2].leave.close_gracefully([0]))
    wait([leaving, staying])
    assert not group.nodes[0].poller.links
    assert group.nodes[2].poller.links.keys() == {1}
    check_round(group, [1, 2], Tag(2, 1), make_work(3, [1000]))


def test_confirming_to_a_worker_that_has_gone_is_no_error() -> None:
    node = Node(0)
    node.leave.confirm(4, Tag(1, 0))
    node.poller.close()
