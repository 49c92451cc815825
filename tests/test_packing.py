"""Packing: fixed shapes, nothing cut, masks by place; a packed batch trains exactly what its samples train alone."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from train_fakes import QWEN3, VOCAB, flat, one_batch, random_samples

from astrolabe.model.decoder import init_decoder
from astrolabe.records.errors import UsageError
from jax_train.losses.sft import sft_loss
from jax_train.packing import PackedBatch, Sample, empty_batch, fill_rows, max_segments, pack, pad_fraction, stack
from jax_train.step import Compute, batch_logprobs, make_gradient


def test_rows_are_filled_first_fit_decreasing() -> None:
    assert fill_rows([3, 8, 2, 5, 5], budget=10) == [[1, 2], [3, 4], [0]]


def test_every_token_of_every_sample_is_in_the_batches_once() -> None:
    samples = random_samples(40, seed=3)
    batches, places = pack(samples, rows=4, budget=24, vocab_size=VOCAB)
    assert {batch.shape for batch in batches} == {(4, 24)}
    assert sum(int((batch.segment_ids > 0).sum()) for batch in batches) == sum(map(len, samples))
    for sample, place in zip(samples, places, strict=True):
        batch, span = batches[place.batch], (place.row, slice(place.start, place.end))
        assert (batch.tokens[span] == sample.tokens).all()
        assert (batch.mask[span] == sample.mask).all()
        assert (batch.positions[span] == np.arange(len(sample))).all()
        assert len(set(batch.segment_ids[span])) == 1
        assert np.allclose(batch.logprobs[span], np.where(np.asarray(sample.mask) == 1, sample.logprobs, 0))


def test_a_sample_that_does_not_fit_is_an_error_with_the_number_to_change() -> None:
    with pytest.raises(UsageError, match=r"30 tokens.*batch\.budget to at least 30"):
        pack([Sample(tokens=[1] * 30, mask=[0] + [1] * 29)], rows=1, budget=24, vocab_size=VOCAB)
    batches, _ = pack(random_samples(40), rows=2, budget=16, vocab_size=VOCAB)
    with pytest.raises(UsageError, match=r"batch\.micro_batches"):
        stack(batches, micro=1)


def test_d30_an_id_out_of_range_is_an_error_on_the_host() -> None:
    with pytest.raises(ValueError, match=r"s7.*vocabulary has 64"):
        pack([Sample(tokens=[1, 64], mask=[0, 1], item="s7")], rows=1, budget=8, vocab_size=VOCAB)
    with pytest.raises(ValueError, match="vocabulary"):
        pack([Sample(tokens=[-1, 6], mask=[0, 1])], rows=1, budget=8, vocab_size=VOCAB)


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (Sample(tokens=[1, 2], mask=[1, 1]), "token 0"),
        (Sample(tokens=[1, 2, 3], mask=[0, 1]), "3,"),
        (Sample(tokens=[], mask=[]), "no tokens"),
        (Sample(tokens=[1, 2], mask=[0, 2]), "0 and 1"),
        (Sample(tokens=[1, 2], mask=[0, 1], logprobs=np.array([np.nan, np.nan])), "logprobs"),
        (Sample(tokens=[1, 2], mask=[0, 1], logprobs=np.array([-1.0])), "logprobs"),
    ],
)
def test_c20_a_sample_whose_arrays_disagree_is_an_error(sample: Sample, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack([sample], rows=1, budget=8, vocab_size=VOCAB)


def test_d26_missing_logprobs_of_untrained_tokens_do_not_enter_the_batch() -> None:
    sample = Sample(tokens=[1, 2, 3], mask=[0, 1, 0], logprobs=np.array([np.nan, -1.0, -np.inf]), advantage=2.0)
    batch = one_batch([sample], 1, 4)
    assert batch.logprobs.tolist() == [[0, -1, 0, 0]]
    assert batch.advantages.tolist() == [[0, 2, 0, 0]]


def test_c21_padding_is_by_length_even_where_the_pad_id_is_the_end_token() -> None:
    end = 1  # QWEN3's pad and end token
    batch = one_batch([Sample(tokens=[5, 6, end], mask=[0, 1, 1])], 1, 6)
    assert batch.mask.tolist() == [[0, 1, 1, 0, 0, 0]]
    assert batch.segment_ids.tolist() == [[1, 1, 1, 0, 0, 0]]


def test_pairs_stay_side_by_side() -> None:
    samples = random_samples(12, seed=5)
    batches, places = pack(samples, rows=2, budget=40, vocab_size=VOCAB, together=2)
    for chosen, rejected in zip(places[::2], places[1::2], strict=True):
        assert (chosen.batch, chosen.row, chosen.end) == (rejected.batch, rejected.row, rejected.start)
        segments = batches[chosen.batch].segment_ids[chosen.row]
        assert segments[chosen.start] % 2 == 1
        assert segments[rejected.start] == segments[chosen.start] + 1
    assert max(map(max_segments, batches)) % 2 == 0


def test_stacking_fills_up_with_empty_micro_batches() -> None:
    batch = one_batch(random_samples(3), 2, 32)
    stacked = stack([batch], micro=3)
    assert stacked.shape == (3, 2, 32)
    assert not stacked.segment_ids[1:].any()
    assert pad_fraction(empty_batch(1, 4)) == 1.0


def test_c22_packed_equals_unpacked_in_loss_and_gradient() -> None:
    samples = random_samples(6, seed=2)
    params = init_decoder(QWEN3, 0)[1]
    gradient = jax.jit(make_gradient(QWEN3, sft_loss, Compute(chunk=16)))
    forward = jax.jit(lambda batch: batch_logprobs(params, QWEN3, Compute(chunk=16), batch)[0])

    def result(batch: PackedBatch) -> tuple[np.ndarray, float]:
        grads, total, denominator, _ = gradient(params, stack([batch]))
        return flat(grads) / float(denominator), float(total) / float(denominator)

    # The same shape for both, so that one program serves: six rows of one sample, or all in as few rows as hold them.
    alone = [one_batch([sample], 1, 32) for sample in samples]
    unpacked = jax.tree.map(lambda *x: np.concatenate(x), *alone)
    packed, places = pack(samples, 6, 32, vocab_size=VOCAB)
    assert max_segments(packed[0]) > 1
    (a, la), (b, lb) = result(unpacked), result(packed[0])
    assert abs(la - lb) < 1e-5
    assert np.abs(a - b).max() < 1e-5
    one, many = np.asarray(forward(unpacked)), np.asarray(forward(packed[0]))
    for i, place in enumerate(places):
        assert np.abs(one[i, : len(samples[i])] - many[place.row, place.start : place.end]).max() < 1e-5
