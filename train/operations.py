"""What the operations of a compiled program are, and how long each kind of them took in a profile.

"products" are matrix products, alone or in a fusion; "copies" move an array as it is; "others" is the rest.
"""

import collections
import re

KINDS = ("products", "copies", "others")


def add_up(events, text, repeats):
    """{kind: {"operations", "seconds"}} of one of ``repeats`` calls, of profiled events (name, nanoseconds): those that are
    named like an operation of the compiled program's ``text``."""
    operations = kinds_of(text)
    found = collections.defaultdict(lambda: {"operations": 0.0, "seconds": 0.0})
    for name, duration in events:
        if name in operations:
            found[operations[name]]["operations"] += 1 / repeats
            found[operations[name]]["seconds"] += duration / 1e9 / repeats
    return {kind: found[kind] for kind in KINDS}


def kinds_of(text):
    """{name: kind} of every operation in a compiled program's text. A fusion is what the best known of its parts is."""
    computations, inside, calls = {}, None, {}
    for line in text.splitlines():
        if start := re.match(r"(?:ENTRY )?%?([\w.-]+) \(.*\{$", line):
            inside = computations.setdefault(start[1], [])
        elif inside is not None and (found := re.match(r"\s+(?:ROOT )?%?([\w.-]+) = .*? ([\w-]+)\(", line)):
            inside.append((found[1], found[2]))
            if called := re.search(r"calls=%?([\w.-]+)", line):
                calls[found[1]] = called[1]

    def kind(name, opcode):
        parts = {kind(*part) for part in computations.get(calls.get(name), [])}
        if opcode in ("dot", "convolution") or "products" in parts:
            return "products"
        return "copies" if opcode in ("copy", "transpose") and not parts else "others"

    return {name: kind(name, opcode) for operations in computations.values() for name, opcode in operations}
