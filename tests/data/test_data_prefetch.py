"""Prefetching: the same items in the same order, errors at their positions, and no threads left behind."""

import gc
import itertools
import threading
import time

import jax
import numpy as np
import pytest

import weft as wf
from weft.core.errors import DataError
from weft.data import ByteTokenizer, ExampleStream, Phrases, PythonDocs, TokenWindows, prefetch


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "prefetch"]


@pytest.fixture(autouse=True)
def no_thread_stays():
    assert not threads()
    gc.freeze()  # a collection of all objects of the test session would take seconds
    yield
    gc.collect()
    assert not threads()


@pytest.mark.parametrize("ahead", [1, 2, 7, 99])
def test_all_items_in_their_order(ahead):
    assert list(prefetch(range(50), ahead)) == list(range(50))
    assert list(prefetch([], ahead)) == []
    assert list(prefetch([None, StopIteration(), None], ahead))[::2] == [None, None]


@pytest.mark.parametrize("ahead", [1, 3])
def test_no_more_than_ahead_are_made(ahead):
    made = []

    def items():
        for number in range(20):
            made.append(number)
            yield number

    taken = prefetch(items(), ahead)
    assert not made and not threads()  # nothing starts before the first request
    for number in taken:
        deadline = time.monotonic() + 5
        while len(made) < min(number + 1 + ahead, 20) and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.002)
        assert len(made) == min(number + 1 + ahead, 20)


def test_an_error_is_raised_at_its_position():
    def items():
        yield from range(3)
        raise KeyError("broken")

    taken = prefetch(items(), ahead=8)
    assert [next(taken) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(KeyError, match="broken") as error:
        next(taken)
    assert "items" in [entry.name for entry in error.traceback]  # where it was raised is shown too
    with pytest.raises(StopIteration):
        next(taken)


@pytest.mark.parametrize("leave", ["close", "break", "forget", "raise"])
def test_left_early_the_thread_ends_and_its_source_is_closed(leave):
    closed = threading.Event()

    def items():
        try:
            yield from itertools.count()
        finally:
            closed.set()

    def use():
        taken = prefetch(items(), ahead=2)
        for number in taken:
            assert len(threads()) == 1
            if number == 3 and leave == "raise":
                raise KeyError
            if number == 3:
                break
        if leave == "close":
            taken.close()

    start = time.monotonic()
    if leave == "raise":
        with pytest.raises(KeyError):
            use()
    else:
        use()
    gc.collect()
    assert not threads() and closed.is_set() and time.monotonic() - start < 10


def test_a_prefetch_of_zero_raises():
    with pytest.raises(DataError, match="ahead is 0"):
        prefetch([1], ahead=0)


def steps(stream, ahead):
    for batch, position in itertools.islice(stream.batches(2, ahead=ahead), 12):
        yield position, [np.asarray(leaf) for leaf in jax.tree.leaves(batch)]


@pytest.mark.parametrize("kind", ["stream", "windows", "placed"])
def test_streams_prefetch_the_same_batches(kind):
    place = dict(mesh=wf.Mesh("data=4 model=2"), layout=wf.Layout("batch:data length:model"))
    stream = {
        "stream": ExampleStream(Phrases(37), ByteTokenizer(), rows=3, length=64, epochs=2),
        "windows": TokenWindows(PythonDocs("valid")[:2], ByteTokenizer(), rows=3, length=64),
        "placed": ExampleStream(Phrases(37), ByteTokenizer(), rows=3, length=64, **place),
    }[kind]
    for (position, arrays), (other, expected) in zip(steps(stream, 2), steps(stream, 0), strict=True):
        assert position == other
        assert all(np.array_equal(a, b) for a, b in zip(arrays, expected, strict=True))


def test_only_the_loop_transfers_to_the_devices(monkeypatch):
    where, place = set(), wf.from_callback

    def recorded(*args):
        where.add(threading.current_thread().name)
        return place(*args)

    monkeypatch.setattr(wf, "from_callback", recorded)
    stream = TokenWindows(
        ["some text"] * 9, ByteTokenizer(), 4, 8, mesh=wf.Mesh("data=2"), layout=wf.Layout("batch:data")
    )
    list(itertools.islice(stream.batches(ahead=2), 5))
    assert where == {threading.current_thread().name}


def test_what_fails_in_the_thread_is_located_here():
    class Wrong(ByteTokenizer):
        def encode(self, text):
            return [400]

    with pytest.raises(DataError, match="token ids outside the tokenizer's vocabulary: 400") as error:
        next(ExampleStream(["a"], Wrong(), rows=1, length=4).batches(ahead=1))
    assert "test_data_prefetch.py:" in error.value.where and error.value.call.startswith("ExampleStream(")


def test_programs_run_while_batches_are_made():
    """200 steps with collectives, without waiting for any: the thread never blocks the devices."""
    mesh, layout = wf.Mesh("data=4 model=2"), wf.Layout("batch:data length:model")
    texts, settings = PythonDocs("valid"), dict(rows=8, length=16)
    stream = TokenWindows(texts, ByteTokenizer(), **settings, mesh=mesh, layout=layout)
    program = wf.spmd(lambda total, batch: total + wf.sum(batch.targets), mesh, layout)
    total = wf.tensor(0, ())
    for step in itertools.islice(stream.batches(ahead=2), 200):
        total = program(total, step.batch)
    alone = TokenWindows(texts, ByteTokenizer(), **settings)
    assert int(total) == sum(int(alone.make_rows(8 * n, 0, 8).arrays["targets"].sum()) for n in range(200))
