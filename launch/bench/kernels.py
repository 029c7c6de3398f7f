"""`tp-runtime bench kernels`: the operators of a decode step one by one, beside plain PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import click

from tp_runtime.launch.bench.coordinator import int_list
from tp_runtime.launch.bench.copy_rate import measure_copy_rate
from tp_runtime.launch.bench.report import print_json, print_table
from tp_runtime.launch.bench.shapes import SHAPES, shape_folder
from tp_runtime.launch.gpus import Gpus
from tp_runtime.model_config import ModelConfig

if TYPE_CHECKING:
    import torch


class Timed(NamedTuple):
    """Microseconds of a call; `plain_us`: of the PyTorch reference or library call in its place."""

    kernel: str
    rows: int
    us: float
    plain_us: float | None
    gb_s: float


@click.command("kernels")
@click.option("--shape", type=click.Choice(list(SHAPES)), default="qwen3-8b", show_default=True)
@click.option("-tp", "--tensor-parallel-size", "ranks", default=1, show_default=True)
@click.option("--device", type=click.Choice(["auto", "cuda", "cpu"]), default="auto")
@click.option("--dtype", type=click.Choice(["bfloat16", "float16", "float32"]), default="bfloat16")
@click.option("--rows", default="1,16,256", show_default=True, help="Sequences in a step.")
@click.option("--context", default=1024, show_default=True, help="Tokens of each.")
def kernels_command(
    shape: str, ranks: int, device: str, dtype: str, rows: str, context: int
) -> int:
    """Rank 0's share of a model's operators, on one device and without collectives."""
    if device == "auto":
        device = "cuda" if Gpus.seen().visible else "cpu"
    if device == "cuda":
        Gpus.seen().require(1)
    copy_rate = measure_copy_rate() if device == "cuda" else None
    import torch

    with shape_folder(shape) as folder:
        model = ModelConfig.from_folder(folder)
    timed = measure(model, ranks, getattr(torch, dtype), device, int_list(rows), context)
    print_table(
        ["kernel", "rows", "us", "plain us", "GB/s", "% of copy rate"],
        [[*row, copy_rate and 100 * row.gb_s * 1e9 / copy_rate] for row in timed],
    )
    if copy_rate:
        print(f"Copy rate of the GPU in this run: {copy_rate / 1e12:.2f} TB/s.")
    conditions: dict[str, Any] = {"shape": shape, "dtype": dtype, "tensor_parallel_size": ranks}
    conditions |= {"context": context, "copy_rate_gb_s": copy_rate and copy_rate / 1e9}
    print_json("kernels", conditions, [row._asdict() for row in timed])
    return 0


def measure(
    model: ModelConfig,
    ranks: int,
    dtype: torch.dtype,
    device: str,
    rows: list[int],
    context: int,
) -> list[Timed]:
    """Each case with fresh data, which is gone before the next."""
    import torch

    from tp_runtime.launch.bench.kernel_cases import Cases
    from tp_runtime.launch.bench.kernel_timer import copies_for, median_us

    place = torch.device(device)
    cases = Cases(model, ranks, dtype, place)
    timed = []
    with torch.inference_mode():
        for number in rows:
            for case in cases.of(number, context):
                pairs = [case.make() for _ in range(copies_for(case.num_bytes, place))]
                us = median_us([ours for ours, _ in pairs], place)
                plain = [other for _, other in pairs if other is not None]
                plain_us = median_us(plain, place) if plain else None
                timed.append(Timed(case.name, number, us, plain_us, case.num_bytes / us / 1000))
                del pairs, plain
    return timed
