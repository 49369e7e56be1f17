"""What the operations of a compiled program are, and how long each kind of them took in a profile.

"products" are matrix products, alone or in a fusion; "copies" move an array as it is; "others" is the rest.
"""

import collections

from train import hlo

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
    computations, _ = hlo.parse(text)

    def kind(instruction):
        called = instruction.attribute("calls", "").lstrip("%")
        parts = {kind(part) for part in computations[called].instructions} if called else set()
        if instruction.opcode in ("dot", "convolution") or "products" in parts:
            return "products"
        return "copies" if instruction.opcode in ("copy", "transpose") and not parts else "others"

    return {i.name: kind(i) for computation in computations.values() for i in computation.instructions}
