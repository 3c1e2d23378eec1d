"""Changes of a prefix index, as another machine gets them."""

from headrace.engine_proc.gateway.page_changes import LOOK_NS, PageChanges
from headrace.ipc.prefix_index import PrefixIndex, create_prefix_index

A, B = b"a" * 16, b"b" * 16


def test_changes_make_an_index_elsewhere_equal() -> None:
    there, here = (PrefixIndex(create_prefix_index()) for _ in range(2))
    changes, now = PageChanges(there), 0
    for change in (lambda: there.add(A), lambda: there.add(B), lambda: there.remove(A)):
        change()
        now += LOOK_NS
        found = changes.take(now)
        assert found is not None
        here.write(*found)
        assert here.words == there.words
    assert changes.take(now + LOOK_NS) is None
    changes.begin()
    again = changes.take(now + 2 * LOOK_NS)
    assert again is not None
    anew = PrefixIndex(create_prefix_index())
    anew.write(*again)
    assert anew.words == there.words


def test_it_looks_now_and_then() -> None:
    index = PrefixIndex(create_prefix_index())
    changes = PageChanges(index)
    index.add(A)
    assert changes.take(LOOK_NS) is not None
    index.add(B)
    assert changes.take(LOOK_NS + 1) is None
