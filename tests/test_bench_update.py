"""The update that is measured is train.py's, and its memory is really that of its tensors."""

import torch

from benches.update import LargestTensor, UpdateCase, memory_in_new_process, prepare_update


def test_the_largest_tensor_of_forward_and_backward_is_seen():
    a = torch.randn(3, 5, requires_grad=True)
    with LargestTensor() as largest:
        (a.sum() ** 2).backward()
    assert largest.elements == 15  # only the gradient is that large
    with LargestTensor() as largest:
        torch.zeros(100, dtype=torch.int64)
        a[:, None] * a
    assert largest.elements == 45  # integers do not count


def test_the_update_computes_every_rollout_and_moves_the_weights():
    update = prepare_update(UpdateCase(m=4, P=2, T=5, micro_batch=3))
    learner, kept, advantages, _ = update.args
    assert kept.mask.shape == (2, 4, 5) and kept.mask.all() and (advantages != 0).all()
    before = [weight.detach().clone() for weight in learner.model.parameters()]
    stats = update()
    assert not stats["skipped"] and stats["grad_norm"] > 0
    moved = [(a - b).abs().max() for a, b in zip(before, learner.model.parameters())]
    assert 0 < max(moved) < 1e-4  # hardly: the same policy is measured again and again


def test_memory_is_what_the_update_needs():
    small = memory_in_new_process(UpdateCase(m=2, P=1, T=16, micro_batch=2, vocabulary=2000))
    large = memory_in_new_process(UpdateCase(m=64, P=1, T=16, micro_batch=64, vocabulary=2000))
    assert small[1] >= 4 * 2 * 16 * 2000  # float32 logits [m, T, V], small enough for one chunk
    assert large[0] > large[1] > small[1]  # the peak holds its largest tensor
