"""The command line, see `plan_corpus`."""

import argparse
from pathlib import Path

import weft as wf

from . import CORPUS
from .measure import measure, measure_in_subprocess, rows_as_json

MIB = 2**20


def main():
    parser = argparse.ArgumentParser(prog="python -m plan_corpus", description=__doc__)
    parser.add_argument("names", nargs="*", help="cases; all without any")
    parser.add_argument("--largest", action="store_true", help="print the largest live buffers planned")
    parser.add_argument("--dump", type=Path, help="a folder for XLA's HLO and buffer assignment of each case")
    parser.add_argument("--json", action="store_true", help="print JSON, and nothing else")
    options = parser.parse_args()
    by_name = {case.name: case for case in CORPUS}
    unknown = {*options.names} - {*by_name}
    if unknown:
        parser.error(f"no case is called {', '.join(sorted(unknown))}; the cases are {', '.join(by_name)}")
    names = options.names or list(by_name)
    if options.dump:
        # XLA reads its flags once in a process.
        rows = [row for name in names for row in measure_in_subprocess([name], folder(options.dump, name))]
    else:
        wf.cpu_devices(8)
        rows = [measure(by_name[name]) for name in names]
    if options.json:
        print(rows_as_json(rows))
        return
    for row in sorted(rows, key=lambda row: row.ratio):
        print(describe(row))
        for size, text in row.largest if options.largest else ():
            print(f"        {size / MIB:8.2f}  {text}")


def folder(dump, name):
    return dump.resolve() / name.replace(" ", "-").replace(",", "")


def describe(row):
    sent = (
        "" if row.planned_sent == row.compiled_sent else f"  bytes {row.planned_sent} != {row.compiled_sent}"
    )
    return f"{row.ratio:6.3f}  {row.planned / MIB:8.2f} MiB planned {row.compiled / MIB:8.2f} MiB compiled  {row.name}{sent}"


if __name__ == "__main__":
    main()
