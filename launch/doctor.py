"""The command `tp-runtime doctor`: is this machine fit for a server, and what of a model fits here.

It gathers facts (doctor_examination), judges them (doctor_checks, doctor_model) and prints. The
exit status is 1 when something that a server needs is broken.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click

from tp_runtime.launch import exit_status
from tp_runtime.launch.doctor_checks import Finding, check_machine, is_broken
from tp_runtime.launch.doctor_examination import examine
from tp_runtime.launch.doctor_facts import MachineFacts
from tp_runtime.launch.doctor_model import (
    TYPICAL_DEVICES,
    check_files,
    check_fit,
    describe,
    memory_table,
    number_format,
)
from tp_runtime.model_config import ModelConfig
from tp_runtime.model_folder import resolve_model_folder

_USUAL_HEAD = 128
_MARKS = {"fine": "  ok    ", "note": "  note  ", "wrong": "  WRONG "}
_INDENT = " " * 8


@click.command("doctor")
@click.argument("model", required=False)
@click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
    default="auto",
    help="Number format of the model; auto: the checkpoint's own.",
)
def doctor_command(model: str | None, dtype: str) -> int:
    """Say what is wrong with this machine and what to do about it; for MODEL (a folder or a name
    on the Hugging Face hub) also how much memory it takes and how long a context fits.

    Exit status: 0 all is well, 1 something that is needed is broken, 2 MODEL cannot be read."""
    folder, config = None, None
    if model is not None:
        folder = resolve_model_folder(model)
        config = ModelConfig.from_folder(folder)
    facts = examine(
        _say,
        config.head_dim if config else _USUAL_HEAD,
        dtype,
        config.windows if config else (None,),
    )
    findings = check_machine(facts)
    table: list[str] = []
    if folder is not None and config is not None:
        findings[f"Model {model}"], table = examine_model(folder, config, dtype, facts)
    for heading, group in findings.items():
        if group:
            print("\n".join([heading, *map(_lines, group)]))
    if table:
        print("\nMemory of one rank, and the longest context of one sequence\n" + "\n".join(table))
    return _verdict(findings)


def examine_model(
    folder: Path, config: ModelConfig, dtype: str, facts: MachineFacts
) -> tuple[list[Finding], list[str]]:
    """Findings about the model and its table of memory."""
    number = number_format(dtype, config)
    gpus = facts.torch.gpus
    devices = [min(gpu.free for gpu in gpus)] if gpus else list(TYPICAL_DEVICES)
    findings = [*describe(config), *check_files(folder), *check_fit(config, number, facts)]
    return findings, memory_table(config, number, devices)


def _lines(finding: Finding) -> str:
    text = _MARKS[finding.level] + finding.text
    return f"{text}\n{_INDENT}-> {finding.advice}" if finding.advice else text


def _verdict(findings: dict[str, list[Finding]]) -> int:
    if is_broken(findings):
        wrong = [each for group in findings.values() for each in group if each.level == "wrong"]
        noun = "thing is" if len(wrong) == 1 else "things are"
        print(f"\n{len(wrong)} {noun} wrong (above, marked WRONG).")
        return exit_status.FAILED
    print("\nNothing is wrong.")
    return exit_status.OK


def _say(text: str) -> None:
    print(f"doctor: {text} ...", file=sys.stderr, flush=True)
