"""The next replica goes to the right node."""

from scripts.launch.placement import Node, choose_node


def node(name: str, gpus: float, num_replicas: int) -> Node:
    return Node(node_id=name, free={"CPU": 8, "GPU": gpus}, num_replicas=num_replicas)


def test_replicas_go_where_the_fewest_are_and_of_those_where_most_is_free() -> None:
    bundle = {"CPU": 1, "GPU": 2}
    assert choose_node([node("a", 8, 1), node("b", 4, 0), node("c", 6, 0)], bundle) == "c"
    assert choose_node([node("a", 8, 2), node("b", 1, 0), node("c", 0, 0)], bundle) == "a", "the only one with room"
    assert choose_node([node("a", 1, 0)], bundle) is None
    assert choose_node([], bundle) is None
