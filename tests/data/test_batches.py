"""Which text a row has is a function of the seed and the global sample index alone."""

from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from functional_par.data import Corpus, batches
from functional_par.errors import DataError

quick = settings(deadline=None, max_examples=15)
COUNTING = Corpus(np.arange(101), vocab=101)


def samples(seq_len, batch_size, count, **options):
    steps = -(-count // batch_size)
    made = batches(COUNTING, batch_size=batch_size, seq_len=seq_len, steps=steps, **options)
    return torch.cat([batch.all()["tokens"] for batch in made])[:count]


@quick
@given(st.integers(1, 100), st.integers(1, 9), st.integers(0, 5))
def test_labels_are_the_next_tokens(seq_len, batch_size, seed):
    for batch in batches(COUNTING, batch_size=batch_size, seq_len=seq_len, seed=seed, steps=2):
        rows = batch.all()
        assert rows["tokens"].shape == rows["labels"].shape == (batch_size, seq_len)
        assert rows["tokens"].dtype == rows["labels"].dtype == torch.int64
        assert torch.equal(rows["labels"], rows["tokens"] + 1)
        assert not (rows["tokens"][:, 0] % seq_len).any()


@quick
@given(st.integers(1, 30), st.integers(1, 9), st.integers(1, 9), st.integers(0, 5))
def test_samples_come_in_the_same_order_whatever_the_batch_size(seq_len, one, other, seed):
    assert torch.equal(samples(seq_len, one, 20, seed=seed), samples(seq_len, other, 20, seed=seed))


@quick
@given(st.integers(1, 50), st.integers(0, 5))
def test_an_epoch_reads_every_window_once(seq_len, seed):
    number = 100 // seq_len
    firsts = samples(seq_len, 3, 2 * number, seed=seed)[:, 0]
    for epoch in firsts.split(number):
        assert sorted(epoch.tolist()) == [seq_len * i for i in range(number)]


@quick
@given(st.integers(1, 9), st.integers(0, 20), st.data())
def test_rows_are_a_slice_of_the_whole_batch(batch_size, step, data):
    (batch,) = batches(COUNTING, batch_size=batch_size, seq_len=7, start=step, steps=1)
    start = data.draw(st.integers(0, batch_size))
    stop = data.draw(st.integers(start, batch_size))
    whole, part = batch.all(), batch.rows(start, stop)
    assert (batch.size, batch.step) == (batch_size, step)
    assert all(torch.equal(part[field], whole[field][start:stop]) for field in ("tokens", "labels"))


def test_rows_read_just_the_tokens_asked_for():
    class Recorder(np.ndarray):
        def __getitem__(self, item):
            read.append(item)
            return super().__getitem__(item)

    read = []
    corpus = Corpus(np.arange(101), vocab=101)
    object.__setattr__(corpus, "tokens", corpus.tokens.view(Recorder))
    (batch,) = batches(corpus, batch_size=8, seq_len=5, steps=1)
    assert read == []
    tokens = batch.rows(2, 4)["tokens"]
    assert [item.start for item in read] == tokens[:, 0].tolist()
    assert {item.stop - item.start for item in read} == {6}


def test_resuming_needs_only_the_step():
    through = [batch.all()["tokens"] for batch in batches(COUNTING, batch_size=3, seq_len=4, seed=1, steps=20)]
    resumed = batches(COUNTING, batch_size=3, seq_len=4, seed=1, start=13)
    for step, batch in zip(range(13, 20), resumed, strict=False):
        assert batch.step == step
        assert torch.equal(batch.all()["tokens"], through[step])


def test_without_steps_there_is_no_end_and_without_rows_no_read():
    far = next(islice(batches(COUNTING, batch_size=2, seq_len=4), 10_000, None))
    assert far.step == 10_000
    assert list(batches(COUNTING, batch_size=2, seq_len=4, steps=0)) == []
    assert far.rows(1, 1)["tokens"].shape == (0, 4)


def test_seeds_give_different_orders():
    assert len({tuple(samples(2, 5, 50, seed=seed)[:, 0].tolist()) for seed in range(10)}) == 10


def test_the_global_generators_are_left_alone():
    torch_before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()
    samples(4, 3, 30)
    assert torch.equal(torch.get_rng_state(), torch_before)
    assert np.array_equal(np.random.get_state()[1], numpy_before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"seq_len": 101},
            r"corpus has 101 tokens, too few for seq_len = 101: .* need 102\. .* seq_len of at most 100",
        ),
        ({"seq_len": 0}, r"seq_len = 0: an integer of at least 1"),
        ({"batch_size": 0}, r"batch_size = 0: an integer of at least 1"),
        ({"batch_size": 2.0}, r"batch_size = 2\.0: an integer"),
        ({"start": -1}, r"start = -1: an integer of at least 0"),
        ({"steps": -1}, r"steps = -1: an integer of at least 0"),
    ],
)
def test_numbers_out_of_range_are_errors_at_the_call(options, message):
    with pytest.raises(DataError, match=message):
        batches(COUNTING, **{"batch_size": 2, "seq_len": 4, **options})


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (2, 1), (0, 5)])
def test_rows_that_the_batch_lacks_are_an_error(start, stop):
    (batch,) = batches(COUNTING, batch_size=4, seq_len=4, start=3, steps=1)
    with pytest.raises(DataError, match=rf"rows {start} to {stop} of the batch of step 3, which has 4 rows"):
        batch.rows(start, stop)


def test_what_is_no_corpus_is_refused():
    with pytest.raises(DataError, match=r"corpus is a list; make a fp\.data\.Corpus of it"):
        batches([1, 2, 3], batch_size=1, seq_len=1)
