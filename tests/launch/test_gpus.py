"""Counting GPUs without CUDA: the mask's rules, and the sentence when there are too few."""

from __future__ import annotations

import pytest

from tp_runtime.errors import ConfigError
from tp_runtime.launch.gpus import Gpus, count_visible

FOUR = ("GPU-aa11", "GPU-aa22", "GPU-bb33", "GPU-cc44")


@pytest.mark.parametrize(
    ("mask", "visible"),
    [
        (None, 4),
        ("", 0),
        ("0", 1),
        ("0,1", 2),
        (" 3 , 1 ", 2),
        ("0,9,1", 1),  # read up to the first that names no device
        ("-1", 0),
        ("-1,0", 0),
        ("0,-1,1", 1),
        ("NoDevFiles", 0),
        ("1,1", 0),
        ("GPU-bb", 1),
        ("GPU-aa", 0),  # two devices begin so
        ("GPU-aa11,GPU-aa22", 2),
        ("0,GPU-aa11", 0),  # the same one twice
        ("MIG-12/34", 1),
        ("0,1,2,3", 4),
    ],
)
def test_the_mask_is_read_as_cuda_reads_it(mask, visible):
    assert count_visible(FOUR, mask) == visible


def test_no_gpu_in_the_host_is_zero_whatever_the_mask():
    assert [count_visible((), mask) for mask in (None, "0", "MIG-1")] == [0, 0, 0]


def test_too_few_gpus_names_what_was_asked_what_is_seen_and_the_mask():
    with pytest.raises(ConfigError) as caught:
        Gpus(FOUR, 1, "2").require(2)
    sentence = str(caught.value)
    assert "2 GPUs were asked" in sentence
    assert "1 can be seen of 4" in sentence
    assert "CUDA_VISIBLE_DEVICES is '2'" in sentence
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES is not set"):
        Gpus((), 0, None).require(1)
    Gpus(FOUR, 4, None).require(4)
